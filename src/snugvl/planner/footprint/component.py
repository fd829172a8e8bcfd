"""A component of the footprint, and how components add up.

Components of the phase "always" live from start to end. Those of a phase are gone when it is over: the
vision tower's workspace is freed before the decoder runs, so phases do not add.

    total = Σ always + max over phases of Σ phase
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from snugvl.core.memory_kinds import Kind

Phase = Literal["always", "load", "vision", "prefill", "decode"]
Basis = Literal["computed", "predicted", "measured", "default"]

PHASES: Final[tuple[Phase, ...]] = ("load", "vision", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Component:
    """Bytes with a name and a reason.

    Attributes:
        kind: how it is counted and shown; the name only says what it is.
        basis: computed (exact), predicted (a formula that follows from the source), measured on this
            machine, or a documented default.
        why: the formula with its numbers, one line.
    """

    name: str
    kind: Kind
    nbytes: int
    phase: Phase = "always"
    basis: Basis = "computed"
    why: str = ""

    def __post_init__(self) -> None:
        assert self.nbytes >= 0, f"{self.name} has {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class Footprint:
    """All components of one way to run a model on one GPU, in the order they are shown."""

    components: tuple[Component, ...]
    always_bytes: int = field(init=False)
    peak_phase: Phase = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sums: dict[Phase, int] = dict.fromkeys(("always", *PHASES), 0)
        for component in self.components:
            sums[component.phase] += component.nbytes
        peak = max(PHASES, key=lambda phase: sums[phase])
        object.__setattr__(self, "always_bytes", sums["always"])
        object.__setattr__(self, "peak_phase", peak)
        object.__setattr__(self, "total_bytes", sums["always"] + sums[peak])

    def phase_bytes(self, phase: Phase) -> int:
        """Bytes of the components of one phase."""
        return sum(component.nbytes for component in self.components if component.phase == phase)

    def of(self, *kinds: Kind) -> int:
        """Bytes of all components of these kinds, in any phase."""
        return sum(part.nbytes for part in self.components if part.kind in kinds)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self.components if part.kind.group is Kind.WEIGHTS)

    def named(self, prefix: str) -> int:
        """Bytes of the components whose name starts with `prefix`."""
        return sum(component.nbytes for component in self.components if component.name.startswith(prefix))

    @property
    def counted(self) -> tuple[Component, ...]:
        """The components that make up the total: those that always live, and those of the peak phase."""
        return tuple(
            part for part in self.components if part.nbytes and part.phase in ("always", self.peak_phase)
        )


def footprint_of(components: Iterable[Component]) -> Footprint:
    """Components that take memory, as a footprint."""
    return Footprint(tuple(component for component in components if component.nbytes))
