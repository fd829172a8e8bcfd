"""How many bits each matrix gets: more where they save most of what few cost, within a mean of all.

Bits are those that our engine holds: of codes with 4 to 6 bits a scale and a zero point of 16 bits for a
group of columns, of 8-bit codes a scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from snugvl.core.formats import FEW_BITS, FORMATS, GROUPS, integer_of
from snugvl.errors import InputError
from snugvl.quantize.passes import Matrix, Place, Scheme

USUAL_GROUP: Final = 64


def held_bits(scheme: Scheme) -> float:
    """Bits of a weight in memory, scales included."""
    bits, group = scheme
    return FORMATS[integer_of(bits)].held_bits(group)


def group_of(columns: int, bits: int, asked: int | None = None) -> int | None:
    """Columns that share a scale; None where they don't divide.

    `asked`: of fewer bits than 8; narrower groups are taken where these don't divide. 8 bits have the widest
    there are.
    """
    most = max(GROUPS) if bits == 8 else asked or USUAL_GROUP
    return next(
        (group for group in sorted(GROUPS, reverse=True) if group <= most and not columns % group), None
    )


@dataclass(frozen=True, slots=True)
class WidthOptions:
    """What each matrix may have, the first of which is measured, and the mean bits of all that may be had."""

    schemes: Mapping[Place, Sequence[Scheme]]
    matrices: Mapping[Place, Matrix]

    @property
    def least(self) -> dict[Place, Scheme]:
        """Each matrix's scheme of the fewest bits."""
        return {place: min(schemes, key=held_bits) for place, schemes in self.schemes.items()}

    @property
    def most(self) -> dict[Place, Scheme]:
        """Each matrix's scheme of the most bits."""
        return {place: max(schemes, key=held_bits) for place, schemes in self.schemes.items()}

    def mean(self, chosen: Mapping[Place, Scheme]) -> float:
        """Bits of a weight."""
        weights = sum(each.weights for each in self.matrices.values())
        held = sum(held_bits(chosen[place]) * each.weights for place, each in self.matrices.items())
        return held / weights

    def check(self, bits: float) -> None:
        """
        Raises:
            InputError: so few bits can't be had, or so many do nothing.
        """
        least, most = self.mean(self.least), self.mean(self.most)
        if not least <= bits <= most:
            raise InputError(
                f"{bits:g} bits a weight can't be had: with scales these matrices take {least:.2f} (all in 4 "
                f"bits) to {most:.2f} (all in 8)"
            )

    def within(self, bits: float, costs: Mapping[Place, Mapping[Scheme, float]]) -> dict[Place, Scheme]:
        """More bits where they save most nats for a byte, as long as the mean is no more than `bits`."""
        chosen = self.least
        weights = sum(each.weights for each in self.matrices.values())
        left = (bits - self.mean(chosen) + 1e-6) * weights
        while True:
            steps = (
                (nats / more, more, place, scheme)
                for place, of in costs.items()
                for scheme in self.schemes[place]
                if 0 < (more := self._more(place, chosen[place], scheme)) <= left
                and (nats := of[chosen[place]] - of[scheme]) > 0
            )
            best = max(steps, default=None)
            if best is None:
                return chosen
            _, more, place, scheme = best
            chosen[place] = scheme
            left -= more

    def _more(self, place: Place, now: Scheme, then: Scheme) -> float:
        """Bits that a matrix takes more."""
        return (held_bits(then) - held_bits(now)) * self.matrices[place].weights


def choice_of(matrices: Mapping[Place, Matrix], group: int | None = None) -> WidthOptions:
    """What matrices whose columns divide may have; `group`: columns that share a scale in 4 bits."""
    return WidthOptions({place: _schemes(each.columns, group) for place, each in matrices.items()}, matrices)


def _schemes(columns: int, group: int | None) -> list[Scheme]:
    """Schemes that one matrix may have; the first one is measured first."""
    narrowest, *finer = (FORMATS[kind].bits for kind in reversed(FEW_BITS) if FORMATS[kind].offered)
    kinds: list[tuple[int, int | None]] = [(narrowest, group)]
    if group is None:
        kinds.append((narrowest, max(GROUPS)))
    kinds += [(each, most) for each in finer for most in (None, max(GROUPS))]
    kinds.append((8, None))
    found = ((each, group_of(columns, each, width)) for each, width in kinds)
    return list(dict.fromkeys((each, width) for each, width in found if width is not None))
