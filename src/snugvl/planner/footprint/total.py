"""The footprint of one way to run a model: its components, and how they add up.

Components of the phase "always" live from start to end. Those of a phase are gone when it is over: the
vision tower's workspace is freed before the decoder runs, so phases do not add.

    total = Σ always + max over phases of Σ phase

Tensors of a component take what torch's caching allocator makes of their sizes (PyTorch,
`c10/cuda/CUDACachingAllocator.cpp`): a request is rounded up to 512 bytes. Requests up to 1 MiB come from 2
MiB segments, those below 10 MiB from 20 MiB segments, larger ones get a segment of their own, rounded up to 2
MiB. A remainder of a large segment is split off for others unless it is 1 MiB or less: then the tensor counts
as that much larger. Blocks beyond a limit (`max_split_size_mb`) are never split. `reserved_bytes` and
`together_bytes` bound what tensors take in whatever order they come; `CachingAllocator` repeats the
allocator's own steps for tensors in the order in which they are made.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, Literal, NamedTuple

from snugvl.core.memory_kinds import Kind
from snugvl.core.options import Engine
from snugvl.core.sizes import MIB, format_size
from snugvl.hardware.calibration import cublas_bytes
from snugvl.planner.engines import rules_of
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

ROUND_BYTES: Final = 512
SMALL_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
MEDIUM_BYTES: Final = 10 * MIB
MEDIUM_SEGMENT_BYTES: Final = 20 * MIB
LARGE_ROUND_BYTES: Final = 2 * MIB


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def together_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Bytes of one segment that holds side by side all tensors too large for small segments.

    `sizes`: (bytes, count) each.
    """
    # A plan over the catalogue comes here for a hundred thousand tensors: `up`, without the call.
    large = sum(-(-size // ROUND_BYTES) * count for size, count in sizes if size > SMALL_BYTES)
    return up(large * ROUND_BYTES, LARGE_ROUND_BYTES)


def reserved_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Bytes of the segments that hold tensors of the given (bytes, count)."""
    small = medium = large = 0
    for size, count in sizes:
        rounded = up(size, ROUND_BYTES)
        if rounded <= SMALL_BYTES:
            small += rounded * count
        elif rounded < MEDIUM_BYTES:
            medium += rounded * count
        else:
            large += up(rounded, LARGE_ROUND_BYTES) * count
    return up(small, SMALL_SEGMENT_BYTES) + up(medium, MEDIUM_SEGMENT_BYTES) + large


class CachingAllocator:
    """The allocator's steps for tensors that stay: best fit among free blocks, else a new segment.

    Attributes:
        allocated: bytes of the blocks in use, as `torch.cuda.memory_allocated` counts them.
        reserved: bytes of all segments, as the driver sees them.
    """

    def __init__(self, max_split_bytes: int | None = None) -> None:
        self.allocated = 0
        self.reserved = 0
        self._max_split = max_split_bytes
        self._small: list[int] = []  # free blocks, in order of size
        self._large: list[int] = []

    def allocate(self, nbytes: int) -> None:
        """Make a tensor of `nbytes` bytes."""
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        small = size <= SMALL_BYTES
        if self._max_split is not None and size >= self._max_split:
            # No block this large is ever split, nor free while all stay: a segment of its own.
            block = up(size, LARGE_ROUND_BYTES)
            self.allocated += block
            self.reserved += block
            return
        free = self._small if small else self._large
        place = bisect_left(free, size)
        if place < len(free):
            block = free.pop(place)
        else:
            block = _segment_bytes(size)
            self.reserved += block
        rest = block - size
        if rest >= ROUND_BYTES if small else rest > SMALL_BYTES:
            insort(free, rest)
            block = size
        self.allocated += block


def _segment_bytes(size: int) -> int:
    """Bytes of a new segment for a rounded request."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return MEDIUM_SEGMENT_BYTES if size < MEDIUM_BYTES else up(size, LARGE_ROUND_BYTES)


Phase = Literal["always", "load", "vision", "prefill", "decode"]
Basis = Literal["computed", "predicted", "measured", "default"]

PHASES: Final[tuple[Phase, ...]] = ("load", "vision", "prefill", "decode")
MOST_MULTIPROCESSORS = 148
DEFAULT = "documented default, not measured"
PROCESS = Kind.PROCESS.value
PROCESS_BYTES = 320 << 20  # of a process with torch, as `/memory` measured it with pocket on Linux
FUSED_SINCE = (8, 0)  # flash attention in PyTorch; before, grouped heads fall back to plain matrix products


class Component(NamedTuple):
    """A component of a footprint: bytes with a name and a reason.

    Attributes:
        kind: how it is counted and shown, whatever its name is.
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


predicted, measured = partial(Component, basis="predicted"), partial(Component, basis="measured")


@dataclass(frozen=True, slots=True)
class Footprint:
    """All components of one way to run a model on one GPU, in the order they are shown."""

    components: tuple[Component, ...]
    always_bytes: int = field(init=False)
    peak_phase: Phase = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sums: dict[Phase, int] = dict.fromkeys(("always", *PHASES), 0)
        for name, _kind, nbytes, phase, _basis, _why in self.components:
            assert nbytes >= 0, f"{name} has {nbytes} bytes"
            sums[phase] += nbytes
        peak = max(PHASES, key=sums.__getitem__)
        object.__setattr__(self, "always_bytes", sums["always"])
        object.__setattr__(self, "peak_phase", peak)
        object.__setattr__(self, "total_bytes", sums["always"] + sums[peak])

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
    """A footprint of those components that take any memory."""
    return Footprint(tuple([component for component in components if component.nbytes]))


@dataclass(frozen=True, slots=True)
class Device:
    """The facts of a GPU that a footprint depends on (or of a CPU, whose context costs nothing).

    Attributes:
        context_bytes: CUDA context, torch's libraries and cuBLAS' workspace.
        context_measured: whether `context_bytes` was measured on this machine; else it is the default.
        cpu: whether it is host memory, without a GPU; `free_bytes` of it decide about float32.
        multiprocessors: number of them, on which the split of small products depends; unknown: the most.
        host_bytes: host memory that weights beside a GPU may take; None where it wasn't measured.
        pinned_bytes: available page-locked host memory, where it is scarce (WSL2, Windows), or None.
        api: API by which the GPU is reached, for people.
        unified: whether its memory is host memory, so an engine's host memory counts as well.
        context_basis: where `context_bytes` is from, in words; empty: that isn't known any more.
    """

    context_bytes: int
    context_measured: bool = False
    compute_capability: tuple[int, int] | None = None
    cpu: bool = False
    free_bytes: int = 0
    multiprocessors: int = MOST_MULTIPROCESSORS
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    api: str = "CUDA"
    unified: bool = False
    context_basis: str = ""

    @property
    def cublas_bytes(self) -> int:
        """Bytes of cuBLAS' workspace in torch, for each stream."""
        return cublas_bytes(self.compute_capability)

    @property
    def fused_attention(self) -> bool:
        """Whether it has a fused attention kernel for grouped heads; unknown GPUs count as recent."""
        return self.compute_capability is None or self.compute_capability >= FUSED_SINCE


@lru_cache(maxsize=8192)  # plans of one model for other wishes and budgets ask for many of them again
def footprint(model: Inventory, settings: Settings, device: Device) -> Footprint:
    """Every component of `settings` on the fullest of its GPUs."""
    if settings.data_parallel > 1:  # each copy for itself, with its share of the requests
        settings = settings._replace(concurrency=settings.concurrency_of_copy, data_parallel=1)
    rules, known = rules_of(settings.engine), device.context_measured
    parts = []
    if device.cpu:
        own = rules.process_bytes
        parts.append(measured(PROCESS, Kind.PROCESS, own, why="the engine's process, idle"))
    if device.context_bytes:
        parts.append(
            Component(
                f"{device.api} context and libraries",
                Kind.CONTEXT if device.api == "CUDA" else Kind.OTHER,
                device.context_bytes,
                basis="measured" if known else "default",
                why=device.context_basis or ("measured on this GPU" if known else DEFAULT),
            )
        )
    return footprint_of(parts + rules.components(model, settings, device))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an engine can't run a model, isn't chosen for it, or has no room for what was tried.

    Attributes:
        text: the reason as a clause; where `short_bytes` isn't 0, the thing that was tried, such as
            "16,384-token images (16.8 megapixels)".
        model: its name; empty where it is the chosen one, or one that the caller knows.
        short_bytes: bytes of memory missing, or 0 where memory isn't the reason.
        blame: name and bytes of the largest component that could shrink, else of the largest one.
        remedy: a change that was tried and fits, as a clause, or None.
    """

    engine: Engine
    text: str
    model: str = ""
    short_bytes: int = 0
    blame: str = ""
    blame_bytes: int = 0
    remedy: str | None = None

    def __str__(self) -> str:
        if not self.short_bytes:
            return self.text
        why = f"{self.blame} would take {format_size(self.blame_bytes)} alone"
        line = f"{self.text}: {format_size(self.short_bytes)} too much ({why})"
        return f"{line}; {self.remedy}" if self.remedy else line
