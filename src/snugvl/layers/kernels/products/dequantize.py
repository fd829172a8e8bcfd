"""Stored weights back to the network's type, a slice of rows at a time, for products with many rows of input.

From some hundred tokens on, a product is bound by arithmetic, and the library's dense product on a slice that
was dequantized just before is twice as fast as converting inside our own: the slice is written and read once,
mostly in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from snugvl.core.formats import FORMATS
from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.device import native_fp8
from snugvl.layers.kernels.products import ggml
from snugvl.layers.kernels.products.epilogue import Epilogue
from snugvl.layers.kernels.products.planes import dequantize_planes
from snugvl.layers.kernels.products.weights import (
    FP8,
    INT4,
    STORED_AS,
    e4m3_factor,
    e4m3_to_f16,
    operands,
    planes_of,
    power_for,
    scale_offsets,
    tiny_codes,
)
from snugvl.layers.weights import Weights

WIDE_BYTES = 32 << 20  # of a dequantized slice
WIDE_TILE = 32  # rows dequantized by one program


@launched
@triton.jit(do_not_specialize=["first", "half", "beyond"])
def dequantize(
    w, scale, zero, out, first, half, beyond, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows `first …` of one group of columns; `out` `[rows, K]`. Rows are whole tiles: no masks.

    From row `half` of `out` on, rows that stand `beyond` further on in the weights: SwiGLU's second half.
    """
    group = tl.program_id(1)
    groups: tl.constexpr = K // GROUP
    inner: tl.constexpr = GROUP // 8 if FORMAT == INT4 else GROUP
    local = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    rows = local + first + tl.where(local >= half, beyond, 0)
    raw = tl.load(w + rows[:, None] * (groups * inner) + group * inner + tl.arange(0, inner)[None, :])
    where = scale_offsets(rows, group, groups, FORMAT)
    s = tl.load(scale + where).to(tl.float32)
    element = tl.arange(0, GROUP)
    if FORMAT == INT4:
        z = tl.load(zero + where).to(tl.float32)
        codes = tl.reshape(tiny_codes(raw), [BN, GROUP]) * 1.7014118346046923e38  # 2¹²⁷ of 2¹⁴⁹
        value = (codes * power_for(element, 22)[None, :] - z[:, None]) * s[:, None]
    elif FORMAT == FP8:
        value = e4m3_to_f16(raw, NATIVE).to(tl.float32) * (s * e4m3_factor(NATIVE))[:, None]
    else:
        value = raw.to(tl.float32) * s[:, None]
    tl.store(out + local[:, None] * K + group * GROUP + element[None, :], value.to(out.dtype.element_ty))


@launched
@triton.jit(do_not_specialize=["first", "count"])
def dequantize_codes(
    w, scale, out, first, count, K: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`count` rows from `first` on of int8; `out` `[count, K]`. Any number of rows, columns and groups."""
    local = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BK + tl.arange(0, BK))[None, :]
    mask = (local < count) & (column < K)
    row = local + first
    code = tl.load(w + row * K + column, mask=mask, other=0).to(tl.float32)
    s = tl.load(scale + row * (K // GROUP) + column // GROUP, mask=mask, other=0).to(tl.float32)
    tl.store(out + local * K + column, (code * s).to(out.dtype.element_ty), mask=mask)


def dequantize_int8(weights: Weights, first: int, out: torch.Tensor) -> None:
    """Write rows `first …` of int8 weights to `out` `[n, columns]`, whatever their groups."""
    grid = (triton.cdiv(len(out), 8), triton.cdiv(weights.columns, 256))
    dequantize_codes[grid](
        weights.data,
        weights.scale,
        out,
        first,
        len(out),
        K=weights.columns,
        GROUP=weights.group,
        BN=8,
        BK=256,
        num_warps=4,
    )


@launched
@triton.jit
def gated(gate_up, out, columns, first, width, STEP: tl.constexpr):
    """`silu(gate) · up` of a slice: `gate_up` `[tokens, 2 · columns]` to columns `first …` of `out`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    mask = at < columns
    gate = tl.load(gate_up + token * 2 * columns + at, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * columns + columns + at, mask=mask, other=0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * width + first + at, (gate * up).to(out.dtype.element_ty), mask=mask)


def swiglu(gate_up: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """Write `silu(gate) · up` of `gate_up` `[tokens, 2 · columns]` to `out[:, first : first + columns]`."""
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    grid = (tokens, triton.cdiv(columns, 1024))
    gated[grid](gate_up, out, columns, first, out.shape[1], STEP=1024, num_warps=4)


def multiply_dequantized(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    """Dequantize a slice of rows, multiply, go on: the workspace is that of one slice."""
    outputs, parts = out.shape[1], 2 if beside.swiglu else 1
    step = max(WIDE_TILE, WIDE_BYTES // (parts * weights.columns * x.element_size()) // WIDE_TILE * WIDE_TILE)
    slices = -(-outputs // step)
    step = -(-outputs // (slices * WIDE_TILE)) * WIDE_TILE  # of equal size
    wide = torch.empty(parts * step, weights.columns, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        count = min(step, outputs - first)
        _dequantize(weights, first, wide[: parts * count], count, outputs - count)
        bias = beside.bias
        shift = None if bias is None else bias.view(parts, -1)[:, first : first + count].flatten().to(x.dtype)
        if beside.swiglu:
            swiglu(linear(x, wide[: 2 * count], shift), out, first)
        elif out.dtype != x.dtype:  # which the library does not write
            out[:, first : first + count] = linear(x, wide[:count], shift)
        elif shift is None:
            torch.mm(x, wide[:count].T, out=out[:, first : first + count])
        else:
            torch.addmm(shift, x, wide[:count].T, out=out[:, first : first + count])
    if beside.residual is not None:
        out += beside.residual


def _dequantize(weights: Weights, first: int, out: torch.Tensor, half: int, beyond: int) -> None:
    """Rows `first …` to `out`; from its row `half` on those that stand `beyond` further on."""
    if weights.format == "ggml":
        for rows, start in ((out[:half], first), (out[half:], first + half + beyond)):
            ggml.dequantize(weights, start, rows)
        return
    if weights.upper is not None:
        dequantize_planes[(-(-out.shape[0] // WIDE_TILE), weights.columns // weights.group)](
            *planes_of(weights), out, len(out), first, half, beyond,
            K=weights.columns, BITS=FORMATS[weights.format].bits, GROUP=weights.group, BN=WIDE_TILE,
            num_warps=4,
        )  # fmt: skip
        return
    dequantize[(out.shape[0] // WIDE_TILE, weights.columns // weights.group)](
        *operands(weights), out, first, half, beyond, K=weights.columns, FORMAT=STORED_AS[weights.format],
        GROUP=weights.group, BN=WIDE_TILE, NATIVE=native_fp8(out.device), num_warps=4,
    )  # fmt: skip
