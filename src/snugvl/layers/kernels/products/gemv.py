"""Decode of one sequence: a matrix of weights times one vector, bound by reading the weights.

One program computes a few outputs over the whole input, and what stands before and after (`epilogue.py`).
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, wait_for_others
from snugvl.layers.kernels.products.epilogue import add_residual, normalised, rms_factor, swiglu
from snugvl.layers.kernels.products.weights import (
    BF16,
    FP8,
    INT4,
    e4m3_factor,
    e4m3_to_f16,
    power_for,
    scale_offsets,
    tiny_codes,
)


@triton.jit
def _vector(x, norm, at, rstd, mask, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr):
    """Elements of the input in float32, normalised, rounded where transformers rounds."""
    v = tl.load(x + at, mask=mask, other=0)
    if HAS_NORM:
        v = normalised(v, tl.load(norm + at, mask=mask, other=0), rstd, OFFSET)
    return v.to(tl.float32)


@triton.jit
def _stored(
    w, rows, live, start, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr
):
    """`BG` groups of columns as they are stored, `[BN, BG, elements or words of a group]`."""
    groups: tl.constexpr = K // GROUP
    inner: tl.constexpr = GROUP // 8 if FORMAT == INT4 else GROUP
    group = start + tl.arange(0, BG)
    mask = live[:, None, None] & (group < groups)[None, :, None]
    columns = group[:, None] * inner + tl.arange(0, inner)[None, :]
    at = rows.to(tl.int64)[:, None, None] * (groups * inner) + columns[None, :, :]
    return tl.load(w + at, mask=mask, other=0)


@triton.jit
def _dot_rows(
    x, norm, w, scale, zero, raw, rows, live, rstd, K: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """`x · W[rows]ᵀ`, `[BN]` float32; `BG` groups of columns at a time, so that many loads are under way.

    `raw`: the first of them, loaded already.
    """
    groups: tl.constexpr = K // GROUP
    rows = rows.to(tl.int64)
    total = tl.zeros([BN, BG], tl.float32)
    for start in tl.static_range(0, groups, BG):
        group = start + tl.arange(0, BG)
        here = group < groups
        if start > 0:
            raw = _stored(w, rows, live, start, K, FORMAT, GROUP, BG)
        element = tl.arange(0, GROUP)
        at = group[:, None] * GROUP + element[None, :]
        v = _vector(x, norm, at, rstd, here[:, None], HAS_NORM, OFFSET)
        if FORMAT == BF16:
            total += tl.sum(raw.to(tl.float32) * v[None, :, :], 2)
        else:
            where = scale_offsets(rows[:, None], group[None, :], groups, FORMAT)
            both = live[:, None] & here[None, :]
            s = tl.load(scale + where, mask=both, other=0).to(tl.float32)
            if FORMAT == INT4:
                z = tl.load(zero + where, mask=both, other=0).to(tl.float32)
                # 2¹⁰⁰ of the 2¹⁴⁹ go to the input, which stays finite, the rest to the sum.
                large = v * power_for(element, 100)[None, :]
                codes = tl.reshape(tiny_codes(raw), [BN, BG, GROUP])
                part = tl.sum(codes * large[None, :, :], 2) * 562949953421312.0
                total += (part - z * tl.sum(v, 1)[None, :]) * s
            elif FORMAT == FP8:
                value = e4m3_to_f16(raw, NATIVE).to(tl.float32)
                total += tl.sum(value * v[None, :, :], 2) * (s * e4m3_factor(NATIVE))
            else:
                total += tl.sum(raw.to(tl.float32) * v[None, :, :], 2) * s
    return tl.sum(total, 1)


@triton.jit
def wide_rows(
    x, norm, w, out, first, eps, K: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BN` outputs from `first` on of weights in the type of `x`, for a kernel of other weights."""
    rows = first + tl.arange(0, BN)
    live = rows >= 0
    raw = _stored(w, rows, live, 0, K, BF16, 128, 4)
    wait_for_others(PDL)
    rstd = 1.0
    if HAS_NORM:
        rstd = rms_factor(x, eps, K, WIDE)
    y = _dot_rows(x, norm, w, w, w, raw, rows, live, rstd, K, BF16, 128, BN, 4, HAS_NORM, OFFSET, False)
    tl.store(out + rows, y.to(out.dtype.element_ty))


@launched
@triton.jit
def gemv(
    x, norm, w, scale, zero, bias, residual, out, N, eps, K: tl.constexpr, WIDE: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one of them."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows < N
    kind: tl.constexpr = x.dtype.element_ty
    raw = _stored(w, rows, live, 0, K, FORMAT, GROUP, BG)  # no kernel writes weights: they come early
    raw_up = raw
    if SWIGLU:
        raw_up = _stored(w, rows + N, live, 0, K, FORMAT, GROUP, BG)
    wait_for_others(PDL)
    rstd = 1.0
    if HAS_NORM:
        rstd = rms_factor(x, eps, K, WIDE)
    y = _dot_rows(
        x, norm, w, scale, zero, raw, rows, live, rstd, K, FORMAT, GROUP, BN, BG, HAS_NORM, OFFSET, NATIVE
    )
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=live, other=0).to(tl.float32)
    if SWIGLU:
        up = _dot_rows(
            x, norm, w, scale, zero, raw_up, rows + N, live, rstd, K, FORMAT, GROUP, BN, BG, HAS_NORM, OFFSET,
            NATIVE,
        )  # fmt: skip
        if HAS_BIAS:
            up += tl.load(bias + rows + N, mask=live, other=0).to(tl.float32)
        y = swiglu(y, up, kind)
    if HAS_RESIDUAL:
        y = add_residual(y, tl.load(residual + rows, mask=live, other=0), kind)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=live)
