"""How many bits each matrix gets: 8 where they save most of what 4 cost, within a mean of all.

Bits are those that our engine holds: of 4-bit codes with a scale and a zero point of 16 bits for a group of
columns (files have 4 bits of the zero point), of 8-bit codes with a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from snugvl.checkpoint.quantized import GROUPS
from snugvl.errors import InputError
from snugvl.quantize.packed import Scheme
from snugvl.quantize.passes import Matrix, Place
from snugvl.quantize.rounding import Bits

USUAL_GROUP: Final = 64
SCALE_BITS: Final[Mapping[Bits, int]] = {4: 32, 8: 16}  # of a group
DEFAULT_BITS: Final = 4.75


def held_bits(scheme: Scheme) -> float:
    """Of a weight, scales included."""
    bits, group = scheme
    return bits + SCALE_BITS[bits] / group


def stored_bits(scheme: Scheme) -> float:
    """Of a weight in files."""
    bits, group = scheme
    return bits + (20 if bits == 4 else 16) / group


def group_of(columns: int, bits: Bits, asked: int | None = None) -> int | None:
    """Columns that share a scale; None where they don't divide.

    `asked`: of 4 bits; narrower groups are taken where these don't divide. 8 bits have the widest there are.
    """
    most = max(GROUPS) if bits == 8 else asked or USUAL_GROUP
    return next(
        (group for group in sorted(GROUPS, reverse=True) if group <= most and not columns % group), None
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """Both schemes of each matrix, and the mean bits of all that may be had."""

    fours: Mapping[Place, Scheme]
    eights: Mapping[Place, Scheme]
    matrices: Mapping[Place, Matrix]

    def mean(self, schemes: Mapping[Place, Scheme]) -> float:
        """Bits of a weight."""
        weights = sum(each.weights for each in self.matrices.values())
        held = sum(held_bits(schemes[place]) * each.weights for place, each in self.matrices.items())
        return held / weights

    def check(self, bits: float) -> None:
        """
        Raises:
            InputError: so few bits can't be had, or so many do nothing.
        """
        least, most = self.mean(self.fours), self.mean(self.eights)
        if not least <= bits <= most:
            raise InputError(
                f"{bits:g} bits a weight can't be had: with scales these matrices take {least:.2f} (all in 4 "
                f"bits) to {most:.2f} (all in 8)"
            )

    def within(self, bits: float, costs: Mapping[Place, float]) -> dict[Place, Scheme]:
        """8 bits where they save most nats for a byte, as long as the mean is no more than `bits`."""
        chosen = dict(self.fours)
        weights = sum(each.weights for each in self.matrices.values())
        left = bits * weights - self.mean(chosen) * weights
        more = {
            place: (held_bits(self.eights[place]) - held_bits(self.fours[place])) * each.weights
            for place, each in self.matrices.items()
        }
        for place in sorted(costs, key=lambda place: costs[place] / more[place], reverse=True):
            if more[place] <= left + 1e-6 * weights:
                chosen[place] = self.eights[place]
                left -= more[place]
        return chosen


def choice_of(matrices: Mapping[Place, Matrix], group: int | None = None) -> Choice:
    """The schemes of matrices whose columns divide; `group`: columns of 4-bit groups."""
    fours: dict[Place, Scheme] = {}
    eights: dict[Place, Scheme] = {}
    for place, matrix in matrices.items():
        four, eight = group_of(matrix.columns, 4, group), group_of(matrix.columns, 8)
        assert four is not None, "`matrices_of` leaves out what doesn't divide"
        assert eight is not None
        fours[place], eights[place] = (4, four), (8, eight)
    return Choice(fours, eights, matrices)
