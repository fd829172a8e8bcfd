"""Products of low-bit weights with several rows of input: prefill, and decode of several sequences.

The weights are the left operand (`Wᵀ` would have to be written to shared memory after conversion; on the
left they stay in registers), so a program computes `[BN, BM]` of the transposed output:

    acc[BN, BM] += W[BN, group] · X[BM, group]ᵀ · scale        one group of columns at a time

Stored weights are multiplied in float16: every e4m3 number and int8 code is one, where bf16 would cost a
conversion more for each. The input is divided by 16 for it, so that up to a million it stays finite, and
has three bits more than bf16 gave it.

With few rows the columns are split over programs; the last one to finish a tile adds the parts up, in
their order, so the result doesn't depend on who was last.
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.epilogue import add_residual, swiglu
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
def _input(v):
    """Input as the product takes it: float16 (of a sixteenth) unless it is that already, or float32."""
    if v.dtype == tl.bfloat16:
        result = tl.clamp(v.to(tl.float32) * 0.0625, -65504.0, 65504.0).to(tl.float16)
    else:
        result = v
    return result


@triton.jit
def _operand(value, kind: tl.constexpr):
    """Weights in the type that `_input` makes of a `kind`."""
    return value.to(tl.float32 if kind == tl.float32 else tl.float16)


@triton.jit
def _factor(kind: tl.constexpr):
    """Factor that a product must be multiplied with where the network's type is `kind`."""
    if kind == tl.bfloat16:
        return 16.0
    return 1.0


@launched
@triton.jit
def sixteenth(x, out, size, STEP: tl.constexpr):
    """`x / 16` in float16, for products with so many rows that each of the input is read often."""
    at = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    tl.store(out + at, _input(tl.load(x + at, mask=at < size, other=0)), mask=at < size)


@triton.jit
def product_of(
    x, w, scale, zero, tokens, rows, first, last, M, live, K: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`W[rows, first:last] · X[tokens, first:last]ᵀ` over groups of columns, `[BN, BM]` float32."""
    groups: tl.constexpr = K // GROUP
    inner: tl.constexpr = GROUP // 8 if FORMAT == INT4 else GROUP  # elements or words of a group
    within = tl.arange(0, inner)
    rows = rows.to(tl.int64)
    at_w = w + rows[:, None] * (groups * inner) + within[None, :]
    element = tl.arange(0, GROUP)
    at_x = x + tokens.to(tl.int64)[None, :] * K + element[:, None]
    seen = (tokens < M)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for group in tl.range(first, last):
        raw = tl.load(at_w + group * inner, mask=live[:, None], other=0)
        v = tl.load(at_x + group * GROUP, mask=seen, other=0)
        if FORMAT == BF16:
            acc = tl.dot(raw, v, acc, input_precision="ieee")  # of float32 alone: a router's
        else:
            where = scale_offsets(rows, group, groups, FORMAT)
            s = tl.load(scale + where, mask=live, other=0).to(tl.float32)
            if FORMAT == INT4:
                z = tl.load(zero + where, mask=live, other=0).to(tl.float32)
                codes = tl.reshape(tiny_codes(raw), [BN, GROUP]) * 1.7014118346046923e38  # 2¹²⁷ of 2¹⁴⁹
                value = codes * power_for(element, 22)[None, :] - z[:, None]
                acc += tl.dot(_operand(value, v.dtype), _input(v)) * s[:, None]
            elif FORMAT == FP8:
                value = _operand(e4m3_to_f16(raw, NATIVE), v.dtype)
                acc += tl.dot(value, _input(v)) * (s * e4m3_factor(NATIVE))[:, None]
            else:
                acc += tl.dot(_operand(raw, v.dtype), _input(v)) * s[:, None]
    if FORMAT != BF16:
        acc *= _factor(KIND)
    return acc


@triton.jit
def _store(
    acc, up, bias, residual, out, rows, tokens, live, M, N, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """A tile `[BN, BM]`, and what comes after the product, to `out`."""
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=live, other=0).to(tl.float32)[:, None]
    if SWIGLU:
        if HAS_BIAS:
            up += tl.load(bias + rows + N, mask=live, other=0).to(tl.float32)[:, None]
        acc = swiglu(acc, up, KIND)
    y = tl.trans(acc)  # [BM, BN]: written along the rows of the output
    mask = (tokens < M)[:, None] & live[None, :]
    at = tokens.to(tl.int64)[:, None] * N + rows[None, :]
    if HAS_RESIDUAL:
        y = add_residual(y, tl.load(residual + at, mask=mask, other=0), KIND)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@launched
@triton.jit(do_not_specialize=["arrivals", "M"])
def gemm(
    x, w, scale, zero, bias, residual, out, parts, arrivals, M, N, K: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, BAND: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, NATIVE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """`out[m, n] = X[m] · W[n] (+ bias[n]) (+ residual[m, n])`.

    Args:
        parts: `[SPLIT, 1 or 2, tiles, BN, BM]` float32 workspace; unused with SPLIT 1.
        arrivals: `[tiles]` int32, zero before and after.
        KIND: type that transformers would round intermediate results to.
    """
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # BAND tiles of rows share what they read of the weights while it is in the L2 cache.
    in_band = BAND * tiles_n
    band = tile // in_band
    band_m = min(tiles_m - band * BAND, BAND)
    tile_m = band * BAND + (tile % in_band) % band_m
    tile_n = (tile % in_band) // band_m
    rows = tile_n * BN + tl.arange(0, BN)
    tokens = tile_m * BM + tl.arange(0, BM)
    live = rows < N
    groups: tl.constexpr = K // GROUP
    each: tl.constexpr = (groups + SPLIT - 1) // SPLIT
    first = split * each
    last = min(first + each, groups)
    acc = product_of(
        x, w, scale, zero, tokens, rows, first, last, M, live, K, FORMAT, GROUP, BM, BN, NATIVE, KIND
    )
    up = acc
    if SWIGLU:
        up = product_of(
            x, w, scale, zero, tokens, rows + N, first, last, M, live, K, FORMAT, GROUP, BM, BN, NATIVE, KIND
        )
    done = True
    if SPLIT > 1:
        cell = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tiles = tiles_n * tiles_m
        size: tl.constexpr = BN * BM * (2 if SWIGLU else 1)
        mine = parts + (split * tiles + tile) * size
        tl.store(mine + cell, acc)
        if SWIGLU:
            tl.store(mine + BN * BM + cell, up)
        tl.debug_barrier()  # all threads' parts are written before the arrival is counted
        done = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
        if done:
            acc = tl.zeros([BN, BM], tl.float32)
            up = tl.zeros([BN, BM], tl.float32)
            for other in range(SPLIT):
                theirs = parts + (other * tiles + tile) * size
                acc += tl.load(theirs + cell, cache_modifier=".cg")
                if SWIGLU:
                    up += tl.load(theirs + BN * BM + cell, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if done:
        _store(acc, up, bias, residual, out, rows, tokens, live, M, N, KIND, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
