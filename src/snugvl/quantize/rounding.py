"""A matrix rounded to integers of 4, 5, 6 or 8 bits, as our engine runs them.

    a weight = (code − zero) · scale        of 8 bits: zero is 128

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

from dataclasses import dataclass
from typing import Final

import torch

from snugvl.core.formats import integer_of
from snugvl.layers.weights import Weights, in_few_bits, to_few_bits, to_int8

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
    """`codes` uint8 `[rows, columns]`, `scale` and `zero` bf16 `[rows, columns / group]`."""

    bits: int
    group: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def values(self) -> torch.Tensor:
        """The rounded matrix in float32, `[rows, columns]`."""
        rows = len(self.codes)
        codes = self.codes.view(rows, -1, self.group).float()
        return ((codes - self.zero[..., None].float()) * self.scale[..., None].float()).view(rows, -1)

    def weights(self) -> Weights:
        """The rounded matrix as our engine holds it."""
        if self.bits == 8:
            codes = (self.codes ^ 128).view(torch.int8)  # less 128
            return Weights("int8", len(codes), codes.shape[1], codes, self.scale, group=self.group)
        return in_few_bits(self.codes.int(), integer_of(self.bits), self.scale, self.zero)


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


def rounded(values: torch.Tensor, bits: int, group: int, moments: Moments, *, compensate: bool) -> Rounded:
    """`values` `[rows, columns]`, of any float type, rounded for inputs like these.

    Args:
        compensate: give what a column loses to the others, and make up for what was lost before; else round
            each for itself.
    """
    damped = _damped(moments) if compensate else None
    factor = None if damped is None else _factor(damped)
    slices = []
    for start in range(0, len(values), SLICE_ROWS):
        rows = values[start : start + SLICE_ROWS].float()
        if factor is not None and moments.lost is not None:
            lost = moments.lost[start : start + SLICE_ROWS] * (SHARE / max(moments.count, 1))
            rows = rows + _made_up_for(lost, *factor)
        made = _rounded(rows, bits, _fitted(rows, bits, group, moments.squares), factor)
        slices.append(made if damped is None else _descended(rows, bits, made, damped))
    return Rounded(bits, group, *(torch.cat(parts) for parts in zip(*slices, strict=True)))


def _rounded(
    values: torch.Tensor,
    bits: int,
    fitted: tuple[torch.Tensor, torch.Tensor],
    factor: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zero points; `fitted`: the last two."""
    scale, zero = fitted
    group = values.shape[1] // scale.shape[1]
    step, middle = (each.float().repeat_interleave(group, 1) for each in fitted)
    if factor is None:
        codes = (values / step + middle).round_().clamp_(0, (1 << bits) - 1)
    else:
        codes = _compensated(values, step, middle, bits, *factor)
    return codes.to(torch.uint8), scale, zero


def _fitted(
    values: torch.Tensor, bits: int, group: int, squares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points `[rows, groups]` in bf16; of 8 bits all zero points are 128."""
    if bits == 8:
        scale = to_int8(values, group).scale
        assert scale is not None
        return scale, torch.full_like(scale, 128)
    made = to_few_bits(values, integer_of(bits), group, squares)
    assert made.scale is not None
    assert made.zero is not None
    return made.scale, made.zero


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
    values: torch.Tensor,
    step: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
    order: torch.Tensor,
    upper: torch.Tensor,
) -> torch.Tensor:
    """Codes `[rows, columns]`."""
    columns, most = values.shape[1], (1 << bits) - 1
    left, step, zero = (each.T[order].contiguous() for each in (values, step, zero))
    found = torch.empty_like(left)
    for start in range(0, columns, AT_ONCE):
        end = min(start + AT_ONCE, columns)
        errors = torch.empty(end - start, left.shape[1], device=left.device)
        for i in range(start, end):
            found[i] = (left[i] / step[i] + zero[i]).round_().clamp_(0, most)
            errors[i - start] = (left[i] - (found[i] - zero[i]) * step[i]) / upper[i, i]
            left[i + 1 : end].addr_(upper[i, i + 1 : end], errors[i - start], alpha=-1)
        left[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    back = torch.empty_like(found)
    back[order] = found
    return back.T


def _descended(
    values: torch.Tensor,
    bits: int,
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    damped: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zero points that lose less, by going through the groups of columns again.

    With all else as it is, each code in turn becomes the best one, then the scale and the zero point of the
    group do: coordinate descent on the mean square of what outputs lose, so none of it makes that larger.

    Args:
        made: codes uint8 `[rows, columns]`, scales and zero points bf16 `[rows, groups]`.
        damped: `[columns, columns]`, see `_damped`.
    """
    most, groups = (1 << bits) - 1, made[1].shape[1]
    exact, codes = (each.float().T.contiguous() for each in (values, made[0]))
    scale, zero = (each.float().T.contiguous() for each in made[1:])
    group = len(codes) // groups

    def meant(number: int) -> torch.Tensor:
        return (codes[number * group : (number + 1) * group] - zero[number]) * scale[number]

    slope = damped @ (torch.cat([meant(number) for number in range(groups)]) - exact)
    for number in [*range(groups)] * ROUNDS:
        here = slice(number * group, (number + 1) * group)
        own, mine, before = damped[here, here], slope[here].clone(), meant(number)
        for i, column in enumerate(codes[here]):
            best = (column - mine[i] / (own[i, i] * scale[number])).round_().clamp_(0, most)
            mine.addr_(own[:, i], (best - column) * scale[number])
            column.copy_(best)
        scale[number], zero[number] = _best_line(
            codes[here], scale[number], zero[number], own, mine, moves=bits != 8
        )
        slope.addmm_(damped[:, here], meant(number) - before)
    return codes.T.to(torch.uint8), scale.T.to(torch.bfloat16), zero.T.to(torch.bfloat16)


def _best_line(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    own: torch.Tensor,
    slope: torch.Tensor,
    *,
    moves: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point `[rows]` of one group's codes `[columns, rows]`, as bf16 has them.

    Args:
        own: mean products of the group's inputs, `[columns, columns]`.
        slope: gradient of the outputs' loss, `[columns, rows]`, at the given scale and zero point.
        moves: whether the zero point may change as well.
    """
    middle = codes - zero
    spread = own @ middle
    a, d = (middle * spread).sum(0), own.sum()
    b = spread.sum(0) * moves
    e, f = -(middle * slope).sum(0), -slope.sum(0) * moves
    area = (a * d - b * b).clamp(min=1e-6 * a * d).clamp(min=1e-30)
    wider, shift = (e * d - b * f) / area, (a * f - b * e) / area
    new_scale = (scale + wider).to(torch.bfloat16).float()
    new_scale = torch.where(new_scale > 1e-8, new_scale, scale)
    new_zero = (zero - shift / new_scale).to(torch.bfloat16).float() if moves else zero
    change = (codes - new_zero) * new_scale - middle * scale
    better = (change * (slope + 0.5 * (own @ change))).sum(0) < 0
    return torch.where(better, new_scale, scale), torch.where(better, new_zero, zero)
