"""Grids that a matrix' weights are rounded to: integers, and a line through each group of them.

    a weight = (code − zero) · scale

Our own format (`models/own_format.py`) keeps a group's scale and zero point in bf16. GGUF's blocks
(`layers/ggml.py`) keep them in fewer bits:

| | scale | zero · scale |
|---|---|---|
| Q4_0, Q5_0, Q8_0 | f16 | half of all codes lie below 0 |
| Q4_1, Q5_1 | f16 | f16 |
| Q4_K, Q5_K | 6 bits, times an f16 of the super-block of 256 weights | the same, from 0 on |
| Q3_K | 5 bits and a sign, the same | half of all codes lie below 0 |
| Q6_K | 8 bits and a sign, the same | half of all codes lie below 0 |
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from snugvl.core.formats import FORMATS, integer_of
from snugvl.layers.ggml import LAYOUTS, GgmlType
from snugvl.layers.weights import shares_of, to_few_bits, to_int8

BLOCKS: Final[tuple[GgmlType, ...]] = (
    "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
)  # fmt: skip
MINIMA: Final = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")  # those whose groups have a zero point of their own
LEVELS: Final[Mapping[GgmlType, int]] = {"Q3_K": 31, "Q4_K": 63, "Q5_K": 63, "Q6_K": 127}  # the largest scale
LEAST: Final = 2.0**-24  # an f16 above 0
STARTS: Final = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)  # added to the number of steps between codes
ROUNDS: Final = 2  # of fitting lines from each


class Lines(NamedTuple):
    """Scales and zero points of groups, `[rows, groups]` float32.

    Attributes:
        unit, low_unit: what scales, and zero points times scales, are whole multiples of; None: of nothing.
    """

    scale: torch.Tensor
    zero: torch.Tensor
    unit: torch.Tensor | None = None
    low_unit: torch.Tensor | None = None


def joined(lines: Sequence[Lines], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Lines:
    """Lines of one grid, each member joined with the same of all others."""
    scale, zero, *units = (
        [each for each in members if each is not None] for members in zip(*lines, strict=True)
    )
    return Lines(join(scale), join(zero), *(join(each) if each else None for each in units))


class Grid(NamedTuple):
    """The codes and lines that a matrix may have.

    Attributes:
        bits: bits of a code.
        group: columns that share a scale.
        block: type of a GGUF's blocks; None: our own format.
    """

    bits: int
    group: int
    block: GgmlType | None = None

    @property
    def held_bits(self) -> float:
        """Bits of a weight in files and in memory, scales included."""
        if self.block is None:
            return FORMATS[integer_of(self.bits)].held_bits(self.group)
        layout = LAYOUTS[self.block]
        return 8 * layout.nbytes / layout.block

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int | None:
        """The zero point of all groups; None where each has its own."""
        own = self.bits != 8 if self.block is None else self.block in MINIMA
        return None if own else 1 << (self.bits - 1)

    def fitted(self, values: torch.Tensor, squares: torch.Tensor) -> Lines:
        """Lines of least square error through the groups of `values` `[rows, columns]`, float32.

        `squares`: mean square of each column's input, `[columns]`, which a weight's error is multiplied with.
        """
        if self.block is not None:
            return self._blocks(values, squares)
        if self.bits == 8:
            made = to_int8(values, self.group)
        else:
            made = to_few_bits(values, integer_of(self.bits), self.group, squares)
        assert made.scale is not None
        scale = made.scale.float()
        return Lines(scale, torch.full_like(scale, 128) if made.zero is None else made.zero.float())

    def scale(self, scale: torch.Tensor, unit: torch.Tensor | None) -> torch.Tensor:
        """The scales nearest to these that can be stored."""
        if unit is not None:
            assert self.block is not None
            most = LEVELS[self.block]
            least = 1 if self.middle is None else -most
            count = (scale / unit).round().clamp(least, most)
            return unit * torch.where(count == 0, 1, count)
        return _above_0(scale.to(torch.bfloat16 if self.block is None else torch.float16).float())

    def zero(self, zero: torch.Tensor, scale: torch.Tensor, low_unit: torch.Tensor | None) -> torch.Tensor:
        """The zero points nearest to these that can be stored beside such scales."""
        if self.middle is not None:
            return torch.full_like(zero, self.middle)
        if self.block is None:
            return zero.to(torch.bfloat16).float()
        low = zero * scale
        if low_unit is None:
            low = low.half().float()
        else:
            low = low_unit * (low / low_unit).round().clamp(0, LEVELS[self.block])
        return low / scale

    def _blocks(self, values: torch.Tensor, squares: torch.Tensor) -> Lines:
        """Lines that blocks have: from several starts on, in turns codes are rounded and the line through
        them is fitted; the best line of each group counts, and is stored."""
        rows, columns = values.shape
        wide = values.view(rows, -1, self.group)
        share = shares_of(squares, columns, self.group, wide.device)
        mean, low = (wide * share).sum(-1), wide.amin(-1).clamp(max=0)
        if self.middle is None:
            span, steps = wide.amax(-1) - low, self.most
        else:  # what is largest in size is code 0
            span = -wide.gather(-1, wide.abs().argmax(-1, keepdim=True))[..., 0]
            steps, fixed = self.middle, torch.full_like(mean, self.middle)
        best = least = torch.full_like(mean, torch.inf)
        kept = torch.zeros_like(mean)
        for start in STARTS:
            scale = span / (steps + start)
            zero = -low / _above_0(scale) if self.middle is None else fixed
            for _ in range(ROUNDS + 1):
                scale = _above_0(scale)
                codes = self.codes(wide, scale[..., None], zero[..., None])
                error = (
                    (codes - zero[..., None]).mul_(scale[..., None]).sub_(wide).square_().mul_(share).sum(-1)
                )
                best, kept = torch.where(error < least, scale, best), torch.where(error < least, zero, kept)
                least = torch.minimum(error, least)
                at = (codes * share).sum(-1) if self.middle is None else fixed
                codes -= at[..., None]
                spread = (codes.square() * share).sum(-1)
                slope = codes.mul_(wide).mul_(share).sum(-1) / spread.clamp(min=1e-12)
                scale = torch.where(slope * scale.sign() > LEAST, slope, scale)
                zero = at - mean / scale if self.middle is None else fixed
        unit = self._unit(best)
        scale = self.scale(best, unit)
        # The middle code keeps its meaning, whatever its scale has become.
        zero = self.most / 2 - (self.most / 2 - kept) * best / scale
        low_unit = self._unit((zero * scale).clamp(min=0)) if self.middle is None else None
        return Lines(scale, self.zero(zero, scale, low_unit), unit, low_unit)

    def codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The nearest codes of values, as floats."""
        return (values / scale).add_(zero).round_().clamp_(0, self.most)

    def _unit(self, sizes: torch.Tensor) -> torch.Tensor | None:
        """The units of groups whose scales, or minima, are of these sizes, `[rows, groups]`."""
        if self.block is None or self.block not in LEVELS:
            return None
        groups = LAYOUTS[self.block].block // self.group
        most = sizes.abs().view(len(sizes), -1, groups).amax(-1)
        unit = (most / LEVELS[self.block]).half().float().clamp(min=LEAST)
        return unit.repeat_interleave(groups, -1)


def _above_0(scale: torch.Tensor) -> torch.Tensor:
    """Scales, the smallest one instead of none."""
    return torch.where(scale == 0, LEAST, scale)
