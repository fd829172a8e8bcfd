"""Rounding to few bits while weights are loaded: `weights.to_few_bits` in one launch.

Plain torch passes over a matrix in float32 a hundred times; here each group of columns is read once and stays
in registers.
"""

import torch
import triton
import triton.language as tl

from snugvl.core.formats import FORMATS
from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.weights import WORDS, FormatName, Weights, shares_of

WEIGHTS = 2048  # of a program
HALF_EVEN: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 · 2²³: next to it float32 has no fractions


@triton.jit
def _rounded(wide, step, zero, most: tl.constexpr):
    """Codes as float32, halves to even."""
    codes = tl.div_rn(wide, step[:, None] + tl.zeros_like(wide)) + zero[:, None]
    return (tl.minimum(tl.maximum(codes, 0.0), most) + HALF_EVEN) - HALF_EVEN


@triton.jit
def _stored(x):
    """In bf16, halves to even: by its bits, which Triton's interpreter would just cut off."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -0x10000).to(tl.float32, bitcast=True)


@launched
@triton.jit(do_not_specialize=["groups", "rows_groups"])
def round_groups(
    values, shares, words, upper, scale, zero, groups, rows_groups, BITS: tl.constexpr, GROUP: tl.constexpr,
    COUNT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Round COUNT of all `groups`, each of GROUP values side by side in `values`; see `to_few_bits`.

    Args:
        shares: `[rows_groups, GROUP]` float32, weight of a column in its group's error; the same for all
            rows.
        words: int32, eight codes' lowest four bits each; `upper`: their other bits, unless BITS is 4.
        scale, zero: bf16, one of each for a group.
    """
    most: tl.constexpr = (1 << BITS) - 1
    mine = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    live = mine < groups
    column = tl.arange(0, GROUP)
    there = live[:, None]
    wide = tl.load(values + mine[:, None] * GROUP + column[None, :], mask=there, other=0).to(tl.float32)
    share = tl.load(shares + (mine % rows_groups)[:, None] * GROUP + column[None, :], mask=there, other=0)
    low, high = tl.min(wide, 1), tl.max(wide, 1)
    step = _stored(tl.maximum(tl.div_rn(high - low, tl.full([COUNT], most, tl.float32)), 1e-8))
    at = _stored(tl.div_rn(-low, step))
    mean = tl.sum(wide * share, 1)
    least = tl.full([COUNT], float("inf"), tl.float32)
    kept_step, kept_at = step, at
    for last in tl.static_range(ROUNDS, -1, -1):
        codes = _rounded(wide, step, at, most)
        off = (codes - at[:, None]) * step[:, None] - wide
        error = tl.sum(off * off * share, 1)
        better = error < least
        kept_step, kept_at = tl.where(better, step, kept_step), tl.where(better, at, kept_at)
        least = tl.minimum(error, least)
        if last > 0:
            middle = tl.sum(codes * share, 1)
            codes -= middle[:, None]
            spread = tl.sum(codes * codes * share, 1)
            slope = tl.div_rn(tl.sum(codes * wide * share, 1), tl.maximum(spread, 1e-12))
            step = _stored(tl.where(slope > 1e-8, slope, step))
            at = _stored(middle - tl.div_rn(mean, step))
    codes = _rounded(wide, kept_step, kept_at, most).to(tl.int32)
    eights = tl.reshape(codes, [COUNT, GROUP // 8, 8])
    place = tl.arange(0, 8)[None, None, :]
    eighth = tl.arange(0, GROUP // 8)
    where = mine[:, None] * (GROUP // 8) + eighth[None, :]
    tl.store(words + where, tl.sum((eights & 15) << (4 * place), 2), mask=there)
    if BITS > 4:
        rest = tl.sum((eights >> 4) << ((BITS - 4) * place), 2)
        tl.store(upper + where, rest.to(upper.dtype.element_ty), mask=there)
    tl.store(scale + mine, kept_step.to(tl.bfloat16), mask=live)
    tl.store(zero + mine, kept_at.to(tl.bfloat16), mask=live)


def to_few_bits(
    values: torch.Tensor, kind: FormatName, group: int, squares: torch.Tensor | None, rounds: int
) -> Weights:
    """See `weights.to_few_bits`; sums are added up in another order."""
    rows, columns = values.shape
    form, device = FORMATS[kind], values.device
    words = torch.empty(rows, columns // 8, dtype=torch.int32, device=device)
    upper = None
    if form.upper:
        upper = torch.empty(rows, columns // 8, dtype=WORDS[form.upper], device=device)
    scale, zero = (torch.empty(rows, columns // group, dtype=torch.bfloat16, device=device) for _ in range(2))
    shares = shares_of(squares, columns, group, device).contiguous()
    groups, count = rows * (columns // group), WEIGHTS // group
    round_groups[(triton.cdiv(groups, count),)](
        values.contiguous(), shares, words, words if upper is None else upper, scale, zero, groups,
        columns // group, BITS=form.bits, GROUP=group, COUNT=count, ROUNDS=rounds, num_warps=4,
    )  # fmt: skip
    return Weights(kind, rows, columns, words, scale, zero, group, upper=upper)
