"""A matrix rounded to integers of 3 to 8 bits, in our own format or in a GGUF's blocks (`grids.py`).

    a weight = (code − zero) · scale

Scale and zero point of a group of columns are found first, so that the squares of errors, each times the mean
square of its input, are the least, as weights are rounded while loading (`layers/weights.py`). Then columns
are rounded one after the other, those with the largest inputs first, and what one loses is given to those
that follow, by how their inputs go together: GPTQ, Frantar et al. 2022 (https://arxiv.org/abs/2210.17323).

How inputs go together is known of the tokens that were seen alone. The fewer tokens for each column, the
less of it is true of others. So each column's own mean square counts for more (`TRUST`) beside GPTQ's
damping, which alone is the same for all columns, though some have inputs a hundred times larger.

What is rounded is not the weights themselves, but weights that also make up for what the matrices before have
lost: for inputs x as they are behind those, X as they were, and r, R what the product is added to, the least
squares of

    Q x + r  −  (W X + R)       Q = W + Σ (W (X − x) + R − r) xᵀ (Σ x xᵀ)⁻¹

(asymmetric calibration: Li et al. 2025, https://arxiv.org/abs/2504.02692). Only a part of that is taken
(`SHARE`): the whole of it made answers worse, as it follows the tokens that were seen too closely.

Columns that share a scale should be alike in size. So each column is divided by most of its own size where
its input can be multiplied with it: in the weights of a norm that the matrix alone reads, or in the rows of
the matrix before (`factors_of`).
"""

from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from snugvl.core.formats import integer_of
from snugvl.layers.ggml import sort_bytes, to_blocks, wide_planes
from snugvl.layers.weights import Weights, in_few_bits
from snugvl.quantize.grids import Grid, Lines, joined

DAMPING: Final = 0.01  # of the mean square of all inputs, added to each
TRUST: Final = 0.3  # of its own mean square, added to each
SHARE: Final = 0.5  # of what was lost before, that a matrix makes up for
AT_ONCE: Final = 96  # columns whose errors reach the others together
SLICE_ROWS: Final = 4096  # rows that are rounded together, so that memory is bounded
ROUNDS: Final = 2  # of descent
POWER: Final = 0.75  # of its own size, that a column is divided by
SMALL: Final = 0.01  # of the mean size, below which columns count as being of this


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A rounded matrix.

    Attributes:
        codes: uint8 `[rows, columns]`, columns in the order in which they are stored.
        lines: the line through each group of them.
        order: the matrix' own columns in that order, `[columns]`; None: as they are.
    """

    grid: Grid
    codes: torch.Tensor
    lines: Lines
    order: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The rounded matrix in float32, `[rows, columns]`."""
        if self.grid.block is not None:
            values = wide_planes(sort_bytes(self.blocks(), self.grid.block), self.grid.block)
        else:
            codes = self.codes.view(len(self.codes), -1, self.grid.group).float()
            values = ((codes - self.lines.zero[..., None]) * self.lines.scale[..., None]).flatten(1)
        return values if self.order is None else values[:, self.order.argsort()]

    def weights(self) -> Weights:
        """The rounded matrix in our own format."""
        scale, zero = (each.to(torch.bfloat16) for each in self.lines[:2])
        if self.grid.bits == 8:
            codes = (self.codes ^ 128).view(torch.int8)  # less 128
            return Weights("int8", len(codes), codes.shape[1], codes, scale, group=self.grid.group)
        return in_few_bits(self.codes.int(), integer_of(self.grid.bits), scale, zero)

    def blocks(self) -> torch.Tensor:
        """The rounded matrix as a GGUF stores it, `[rows, bytes of a row]` uint8."""
        assert self.grid.block is not None, "our own format has other bytes"
        scale, zero, unit, low_unit = self.lines
        return to_blocks(self.grid.block, self.codes, scale, scale * zero, unit, low_unit)


class Moments:
    """Second moments of the inputs of a matrix.

    Attributes:
        sums: `[columns, columns]` float32, sums of products of inputs.
        lost: `[rows, columns]` float32, sums of products of the outputs' error with inputs; None where it
            isn't wanted.
    """

    def __init__(self, columns: int, device: torch.device, *, rows: int | None = None) -> None:
        """`rows`: number of rows of `lost`; None: without it."""
        self.sums = torch.zeros(columns, columns, device=device)
        self.lost = None if rows is None else torch.zeros(rows, columns, device=device)
        self.count = 0

    def add(self, x: torch.Tensor, lacking: torch.Tensor | None = None) -> None:
        """Add inputs `[tokens, columns]`, and their outputs' error `[tokens, rows]`."""
        x = x.float()
        self.sums.addmm_(x.T, x)
        self.count += len(x)
        if self.lost is not None and lacking is not None:
            self.lost.addmm_(lacking.float().T, x)

    def ordered(self, order: torch.Tensor) -> "Moments":
        """Second moments of the columns in another order, `[columns]`."""
        made = copy(self)
        made.sums = self.sums[order][:, order]
        made.lost = None if self.lost is None else self.lost[:, order]
        return made

    @property
    def squares(self) -> torch.Tensor:
        """The mean square of each column, `[columns]`."""
        return self.sums.diagonal() / max(self.count, 1)


def factors_of(weight: torch.Tensor) -> torch.Tensor:
    """Factors for the columns of `weight` `[rows, columns]` before they are rounded, `[columns]`, float32."""
    sizes = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32)
    even = (sizes / sizes.mean().clamp(min=1e-20)).clamp(min=SMALL)
    factors: torch.Tensor = even.pow(-POWER)
    return factors


def rounded(
    values: torch.Tensor, grid: Grid, moments: Moments, *, compensate: bool, order: torch.Tensor | None = None
) -> Rounded:
    """`values` `[rows, columns]`, of any float type, rounded for inputs like these.

    Args:
        compensate: give what a column loses to the others, and make up for what was lost before; else round
            each for itself.
        order: the columns in the order in which they are stored; None: as they are.
    """
    if order is not None:
        values, moments = values[:, order], moments.ordered(order)
    damped = _damped(moments) if compensate else None
    factor = None if damped is None else _factor(damped)
    codes, lines = [], []
    for start in range(0, len(values), SLICE_ROWS):
        rows = values[start : start + SLICE_ROWS].float()
        if factor is not None and moments.lost is not None:
            lost = moments.lost[start : start + SLICE_ROWS] * (SHARE / max(moments.count, 1))
            rows = rows + _made_up_for(lost, *factor)
        found = grid.fitted(rows, moments.squares)
        if damped is None or factor is None:
            made = grid.codes(rows, *_wide(found, grid))
        else:
            made = _compensated(rows, grid, found, *factor)
            made, found = _descended(rows, grid, made, found, damped)
        codes.append(made.to(torch.uint8))
        lines.append(found)
    return Rounded(grid, torch.cat(codes), joined(lines, torch.cat), order)


def _wide(lines: Lines, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of each weight, `[rows, columns]`."""
    return lines.scale.repeat_interleave(grid.group, 1), lines.zero.repeat_interleave(grid.group, 1)


def _damped(moments: Moments) -> torch.Tensor:
    """Mean products of inputs, each column's own counting for more, `[columns, columns]`."""
    squares = moments.squares.clamp(min=1e-12)
    damped = moments.sums / max(moments.count, 1)
    damped.diagonal().add_(squares * TRUST + squares.mean() * DAMPING)
    return damped


def _factor(damped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of columns, largest inputs first, and the upper Cholesky factor of the inverse in it."""
    order = damped.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    return order, torch.linalg.cholesky(inverse, upper=True)


def _made_up_for(lost: torch.Tensor, order: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Mean products of what outputs lack with inputs as changes of weights, `[rows, columns]` both."""
    found = torch.empty_like(lost)
    found[:, order] = lost[:, order] @ upper.T @ upper
    return found


def _compensated(
    values: torch.Tensor, grid: Grid, lines: Lines, order: torch.Tensor, upper: torch.Tensor
) -> torch.Tensor:
    """Codes `[rows, columns]`, as floats."""
    columns = values.shape[1]
    left, step, zero = (each.T[order].contiguous() for each in (values, *_wide(lines, grid)))
    found, inverse = torch.empty_like(left), upper.diagonal().reciprocal().tolist()
    for start in range(0, columns, AT_ONCE):
        end = min(start + AT_ONCE, columns)
        errors = torch.empty(end - start, left.shape[1], device=left.device)
        for i in range(start, end):
            torch.div(left[i], step[i], out=found[i]).add_(zero[i]).round_().clamp_(0, grid.most)
            off = torch.addcmul(left[i], found[i] - zero[i], step[i], value=-1)
            torch.mul(off, inverse[i], out=errors[i - start])
            left[i + 1 : end].addr_(upper[i, i + 1 : end], errors[i - start], alpha=-1)
        left[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    back = torch.empty_like(found)
    back[order] = found
    return back.T


def _descended(
    values: torch.Tensor, grid: Grid, made: torch.Tensor, lines: Lines, damped: torch.Tensor
) -> tuple[torch.Tensor, Lines]:
    """Codes, and scales and zero points, that lose less, by going through the groups of columns again.

    With all else as it is, each code in turn becomes the best one, then the scale and the zero point of the
    group do: coordinate descent on the mean square of what outputs lose, so none of it makes that larger.

    Args:
        made: codes `[rows, columns]`, as floats.
        damped: `[columns, columns]`, see `_damped`.
    """
    exact, codes = (each.T.contiguous() for each in (values, made))
    turned = joined([lines], lambda each: each[0].T.contiguous())
    scale, zero = turned.scale, turned.zero
    group = grid.group

    def meant(number: int) -> torch.Tensor:
        return (codes[number * group : (number + 1) * group] - zero[number]) * scale[number]

    inverse = damped.diagonal().reciprocal().tolist()
    slope = damped @ (torch.cat([meant(number) for number in range(len(scale))]) - exact)
    for number in [*range(len(scale))] * ROUNDS:
        here = slice(number * group, (number + 1) * group)
        own, mine, before = damped[here, here], slope[here] / scale[number], meant(number)
        for i, column in enumerate(codes[here]):
            best = torch.add(column, mine[i], alpha=-inverse[here.start + i]).round_().clamp_(0, grid.most)
            mine.addr_(own[i], best - column)
            column.copy_(best)
        mine.mul_(scale[number])
        line = joined([turned], partial(_member, number))
        scale[number], zero[number] = _best_line(codes[here], grid, line, own, mine)
        slope.addmm_(damped[:, here], meant(number) - before)
    return codes.T, joined([turned], lambda each: each[0].T)


def _member(number: int, each: list[torch.Tensor]) -> torch.Tensor:
    return each[0][number]


def _best_line(
    codes: torch.Tensor, grid: Grid, line: Lines, own: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point `[rows]` of one group's codes `[columns, rows]`, as the grid has them.

    Args:
        line: members `[rows]`.
        own: mean products of the group's inputs, `[columns, columns]`.
        slope: gradient of the outputs' loss, `[columns, rows]`, at the given scale and zero point.
    """
    scale, zero, unit, low_unit = line
    middle = codes - zero
    spread = own @ middle
    moves = grid.middle is None
    a, d = (middle * spread).sum(0), own.sum()
    b = spread.sum(0) * moves
    e, f = -(middle * slope).sum(0), -slope.sum(0) * moves
    area = (a * d - b * b).clamp(min=1e-6 * a * d).clamp(min=1e-30)
    new_scale = grid.scale(scale + (e * d - b * f) / area, unit)
    new_scale = torch.where(new_scale * scale.sign() > 1e-8, new_scale, scale)
    shift = (f - b * (new_scale - scale)) / d.clamp(min=1e-30)  # the best one beside that scale
    new_zero = grid.zero(zero - shift / new_scale, new_scale, low_unit)
    change = (codes - new_zero) * new_scale - middle * scale
    better = (change * (slope + 0.5 * (own @ change))).sum(0) < 0
    return torch.where(better, new_scale, scale), torch.where(better, new_zero, zero)
