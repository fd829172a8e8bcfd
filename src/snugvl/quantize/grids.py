"""Grids that a matrix' weights are rounded to: integers, and a line through each group of them.

    a weight = (code − zero) · scale

Our own format (`models/own_format.py`) keeps a group's scale and zero point in bf16. GGUF's blocks
(`layers/ggml.py`) keep them in fewer bits:

| | scale | zero · scale |
|---|---|---|
| Q4_0, Q5_0, Q8_0 | f16 | half of all codes lie below 0 |
| Q4_1, Q5_1 | f16 | f16 |
| Q4_K, Q5_K | 6 bits, times an f16 of the super-block of 256 weights | the same, from 0 on |
| Q6_K | 8 bits and a sign, the same | half of all codes lie below 0 |
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch

from snugvl.core.formats import FORMATS, integer_of
from snugvl.layers.ggml import LAYOUTS, GgmlType
from snugvl.layers.weights import shares_of, to_few_bits, to_int8

BLOCKS: Final[tuple[GgmlType, ...]] = ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
MINIMA: Final = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")  # those whose groups have a zero point of their own
LEVELS: Final[Mapping[GgmlType, int]] = {"Q4_K": 63, "Q5_K": 63, "Q6_K": 127}  # the largest scale
LEAST: Final = 2.0**-24  # an f16 above 0
ROUNDS: Final = 4  # of fitting lines


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
        kept = scale.to(torch.bfloat16 if self.block is None else torch.float16).float()
        return torch.where(kept == 0, LEAST, kept)

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
        """Lines that blocks have: in turns codes are rounded and the lines through them are fitted; the best
        of each block count."""
        rows, columns = values.shape
        wide = values.view(rows, -1, self.group)
        share = shares_of(squares, columns, self.group, wide.device)
        mean = (wide * share).sum(-1)
        if self.middle is None:  # the code `at` means `point`
            point = wide.amin(-1).clamp(max=0)
            scale, at = (wide.amax(-1) - point) / self.most, torch.zeros_like(point)
        else:  # what is largest in size is code 0
            largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))[..., 0]
            scale, at, point = (
                largest / -self.middle,
                torch.full_like(mean, self.middle),
                torch.zeros_like(mean),
            )
        best, least = self._line(scale, at, point), torch.full_like(mean, torch.inf)
        for _ in range(ROUNDS + 1):
            lines = self._line(scale, at, point)
            codes = self.codes(wide, lines.scale[..., None], lines.zero[..., None])
            error = (
                (codes - lines.zero[..., None]).mul_(lines.scale[..., None]).sub_(wide).square_().mul_(share)
            )
            error = self._together(error.sum(-1).view(rows, -1, self._groups).sum(-1))
            better = error < least
            best = joined((lines, best), partial(_chosen, better))
            least = torch.minimum(error, least)
            if self.middle is None:
                at, point = (codes * share).sum(-1), mean
            codes -= at[..., None]
            spread = (codes.square() * share).sum(-1)
            slope = codes.mul_(wide).mul_(share).sum(-1) / spread.clamp(min=1e-12)
            scale = torch.where(slope * lines.scale.sign() > LEAST, slope, lines.scale)
        return best

    def _line(self, scale: torch.Tensor, at: torch.Tensor, point: torch.Tensor) -> Lines:
        """The lines nearest to those of such scales by which the code `at` means `point`."""
        unit = self._unit(scale)
        scale = self.scale(scale, unit)
        zero = at - point / scale
        low_unit = self._unit((zero * scale).clamp(min=0)) if self.middle is None else None
        return Lines(scale, self.zero(zero, scale, low_unit), unit, low_unit)

    def codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The nearest codes of values, as floats."""
        return (values / scale).add_(zero).round_().clamp_(0, self.most)

    @property
    def _groups(self) -> int:
        """Groups of a block."""
        return 1 if self.block is None else LAYOUTS[self.block].block // self.group

    def _together(self, of_blocks: torch.Tensor) -> torch.Tensor:
        return of_blocks.repeat_interleave(self._groups, -1)

    def _unit(self, sizes: torch.Tensor) -> torch.Tensor | None:
        """The units of groups whose scales, or minima, are of these sizes, `[rows, groups]`."""
        if self.block is None or self.block not in LEVELS:
            return None
        most = sizes.abs().view(len(sizes), -1, self._groups).amax(-1)
        return self._together((most / LEVELS[self.block]).half().float().clamp(min=LEAST))


def _chosen(first: torch.Tensor, pair: list[torch.Tensor]) -> torch.Tensor:
    return torch.where(first, pair[0], pair[1])
