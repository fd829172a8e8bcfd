"""Products with a GGUF's blocks as `layers/ggml.py` sorts them: values are made in registers alone.

    one row of input      a program sums a few outputs over all columns:  Σ (a Σ code · x + b Σ x)  by groups
    up to 64              tiles of `a · code + b` in float16, multiplied by matrix instructions
    more                  slices are widened and multiplied by the library (`products/linear.py`)

What is loaded, and how it becomes numbers, is `products/ggml_blocks.py`'s.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from snugvl.layers.ggml import GgmlType, TypedRows
from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others
from snugvl.layers.kernels.products.epilogue import Epilogue, add_residual, normalised, rms_factor, swiglu
from snugvl.layers.kernels.products.ggml_blocks import (
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    affine,
    codes_of,
    high_bits,
    loaded,
    power_of,
    power_of_high,
    stored,
    tiny_high,
    tiny_low,
)
from snugvl.layers.kernels.products.tiles import HEAD_OUTPUTS
from snugvl.layers.kernels.rows import normed
from snugvl.layers.weights import Weights

TYPES: Final[dict[GgmlType, tl.constexpr]] = {
    "Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0, "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K,
}  # fmt: skip
KINDS: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
FEW: Final = 64  # rows of input that have a kernel
DEEP: Final = 128  # columns of a tile


@triton.jit
def _dot_rows(
    x, norm, w, raw, count, rows, live, rstd, K: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr,
    BG: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`x · W[rows]ᵀ`, `[BN]` float32. `raw`: the first codes, loaded already."""
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    groups: tl.constexpr = K // size
    total = tl.zeros([BN, BG], tl.float32)
    for start in tl.static_range(0, groups, BG):
        group = start + tl.arange(0, BG)
        here = group < groups
        mask = live[:, None] & here[None, :]
        later = raw
        if start + BG < groups:  # on their way while these are multiplied
            then = group + BG
            later = stored(w, rows, then, live[:, None] & (then < groups)[None, :], K, TYPE, EVEN)
        at = group[:, None] * size + tl.arange(0, size)[None, :]
        v = loaded(x + at, here[:, None], EVEN)
        if HAS_NORM:
            v = normalised(v, loaded(norm + at, here[:, None], EVEN), rstd, OFFSET)
        v = v.to(tl.float32)
        a, b = affine(w, count, rows, group, mask, K, TYPE, EVEN)
        codes = tl.reshape(tiny_low(raw, TYPE), [BN, BG, size])
        part = tl.sum(codes * (v * power_of(tl.arange(0, size), TYPE)[None, :])[None, :, :], 2)
        if TYPE == Q5_K:
            high = high_bits(w, count, rows, group, mask, K, TYPE, EVEN)
            codes = tl.reshape(tiny_high(high, 1), [BN, BG, size])
            part += tl.sum(codes * (v * power_of_high(tl.arange(0, size), 1)[None, :])[None, :, :], 2)
        elif TYPE == Q6_K:
            high = high_bits(w, count, rows, group, mask, K, TYPE, EVEN)
            codes = tl.reshape(tiny_high(high, 2), [BN, BG, size])
            part += tl.sum(codes * (v * power_of_high(tl.arange(0, size), 2)[None, :])[None, :, :], 2)
            b = -32.0 * a
        elif TYPE == Q8_0:
            b = -128.0 * a
        total += part * 562949953421312.0 * a + b * tl.sum(v, 1)[None, :]  # 2⁴⁹ of 2¹⁴⁹
        raw = later
    return tl.sum(total, 1)


@launched
@triton.jit
def one_row(
    x, norm, w, bias, residual, out, count, outputs, eps, K: tl.constexpr, WIDE: tl.constexpr,
    TYPE: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]` of `count` rows; with SWIGLU the first half are gates, `outputs` of them."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows < outputs
    kind: tl.constexpr = x.dtype.element_ty
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    count = count.to(tl.int64)
    group = tl.arange(0, BG)
    mask = live[:, None] & (group < K // size)[None, :]
    raw = stored(w, rows, group, mask, K, TYPE, EVEN)  # weights are nobody's to write: they come early
    wait_for_others(PDL)
    rstd = 0.0
    if HAS_NORM:
        rstd = rms_factor(x, eps, K, WIDE)
    y = _dot_rows(x, norm, w, raw, count, rows, live, rstd, K, TYPE, BN, BG, HAS_NORM, OFFSET, EVEN)
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=live, other=0).to(tl.float32)
    if SWIGLU:
        others = rows + outputs
        raw = stored(w, others, group, mask, K, TYPE, EVEN)
        up = _dot_rows(x, norm, w, raw, count, others, live, rstd, K, TYPE, BN, BG, HAS_NORM, OFFSET, EVEN)
        if HAS_BIAS:
            up += tl.load(bias + others, mask=live, other=0).to(tl.float32)
        y = swiglu(y, up, kind)
    if HAS_RESIDUAL:
        y = add_residual(y, tl.load(residual + rows, mask=live, other=0), kind)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _tile(
    x, w, count, rows, live, tokens, M, K: tl.constexpr, TYPE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`W[rows] · X[tokens]ᵀ`, `[BN, BM]` float32; of bf16 input a sixteenth, in float16, which is finite."""
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    each: tl.constexpr = BK // size
    acc = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(0, K // size, each):
        group = start + tl.arange(0, each)
        mask = live[:, None] & (group < K // size)[None, :]
        raw = stored(w, rows, group, mask, K, TYPE, EVEN)
        a, b = affine(w, count, rows, group, mask, K, TYPE, EVEN)
        codes = codes_of(w, raw, count, rows, group, mask, K, TYPE, BN, each, EVEN)
        value = tl.reshape(codes * a[:, :, None] + b[:, :, None], [BN, BK])
        column = start * size + tl.arange(0, BK)
        seen = (tokens < M)[None, :] & (column < K)[:, None]
        v = tl.load(x + tokens.to(tl.int64)[None, :] * K + column[:, None], mask=seen, other=0)
        if v.dtype == tl.float32:
            acc = tl.dot(value, v, acc)
        elif v.dtype == tl.bfloat16:
            narrow = tl.clamp(v.to(tl.float32) * 0.0625, -65504.0, 65504.0).to(tl.float16)
            acc = tl.dot(value.to(tl.float16), narrow, acc)
        else:
            acc = tl.dot(value.to(tl.float16), v, acc)
    if x.dtype.element_ty == tl.bfloat16:
        acc *= 16.0
    return acc


@launched
@triton.jit(do_not_specialize=["M"])
def few_rows(
    x, w, bias, residual, out, M, count, outputs, stride, K: tl.constexpr, TYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`out[m, n] = X[m] · W[n]`, `stride` from row to row of `out` and of what is added."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    live = rows < outputs
    count = count.to(tl.int64)
    wait_for_others(PDL)
    acc = _tile(x, w, count, rows, live, tokens, M, K, TYPE, BM, BN, BK, EVEN)
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=live, other=0).to(tl.float32)[:, None]
    if SWIGLU:
        others = rows + outputs
        up = _tile(x, w, count, others, live, tokens, M, K, TYPE, BM, BN, BK, EVEN)
        if HAS_BIAS:
            up += tl.load(bias + others, mask=live, other=0).to(tl.float32)[:, None]
        acc = swiglu(acc, up, KIND)
    y = tl.trans(acc)  # [BM, BN]: written along the rows of the output
    mask = (tokens < M)[:, None] & live[None, :]
    at = tokens.to(tl.int64)[:, None] * stride + rows[None, :]
    if HAS_RESIDUAL:
        y = add_residual(y, tl.load(residual + at, mask=mask, other=0), KIND)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@launched
@triton.jit(do_not_specialize=["first", "wanted", "stride"])
def widen_rows(
    w, ids, out, count, first, wanted, K: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BY_ID: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows `first …`, or those that `ids` `[wanted]` says, to `out` `[wanted, K]`."""
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    each: tl.constexpr = BK // size
    local = tl.program_id(0) * BN + tl.arange(0, BN)
    live = local < wanted
    count = count.to(tl.int64)
    wait_for_others(PDL)
    rows = (local + first).to(tl.int64)
    if BY_ID:
        rows = tl.load(ids + local, mask=live, other=0)
    group = tl.program_id(1) * each + tl.arange(0, each)
    mask = live[:, None] & (group < K // size)[None, :]
    raw = stored(w, rows, group, mask, K, TYPE, EVEN)
    a, b = affine(w, count, rows, group, mask, K, TYPE, EVEN)
    value = (
        codes_of(w, raw, count, rows, group, mask, K, TYPE, BN, each, EVEN) * a[:, :, None] + b[:, :, None]
    )
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    at = local.to(tl.int64)[:, None] * K + column[None, :]
    inside = live[:, None] & (column < K)[None, :]
    tl.store(out + at, tl.reshape(value, [BN, BK]).to(out.dtype.element_ty), mask=inside)


def fits(x: torch.Tensor, weights: Weights, *, swiglu: bool) -> bool:
    """Whether `few` multiplies them: up to `FEW` rows of input; gate and up are of one type."""
    return x.shape[0] <= FEW and not (swiglu and len(weights.parts) > 1)


def few(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    """Write `x` `[M, columns]` times `weights`, with what is `beside`, to `out` `[M, outputs]`."""
    if beside.norm is not None and len(x) > 1:
        x, beside = normed(x, beside.norm, beside.eps, beside.offset), beside._replace(norm=None)
    for part in weights.parts:
        _few(x, weights, part, beside, out)


def _few(x: torch.Tensor, weights: Weights, part: TypedRows, beside: Epilogue, out: torch.Tensor) -> None:
    outputs, columns, tokens = beside.outputs(part.rows), weights.columns, len(x)
    mine = slice(part.start, part.start + outputs)
    bias = None if beside.bias is None else beside.bias[part.start : part.start + part.rows]
    residual = None if beside.residual is None else beside.residual[:, mine]
    norm, bias_, residual_ = beside._replace(bias=bias, residual=residual).tensors(x)
    has = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "SWIGLU": beside.swiglu}
    w, into, kind = weights.data[part.offset :], out[:, mine], TYPES[part.type]
    if tokens == 1:
        rows, step, warps = lone_tile(part.type, outputs, columns, swiglu=beside.swiglu)
        one_row[(-(-outputs // rows),)](
            x, norm, w, bias_, residual_, into, part.rows, outputs, beside.eps, K=columns,
            WIDE=triton.next_power_of_2(columns), TYPE=kind, BN=rows, BG=step // part.layout.group,
            HAS_NORM=beside.norm is not None, OFFSET=beside.offset, **has,
            EVEN=columns % step == 0 and outputs % rows == 0, num_warps=warps, **pdl(x.device),
        )  # fmt: skip
        return
    assert residual is None or residual.stride(0) == into.stride(0)
    rows = 16 if outputs < 4096 else 32
    few_rows[(-(-outputs // rows),)](
        x, w, bias_, residual_, into, tokens, part.rows, outputs, into.stride(0), K=columns, TYPE=kind,
        BM=max(16, triton.next_power_of_2(tokens)), BN=rows, BK=DEEP, **has, KIND=KINDS[x.dtype],
        EVEN=columns % DEEP == 0 and outputs % rows == 0, num_warps=4,
        num_stages=3 if x.element_size() == 2 else 1, **pdl(x.device),
    )  # fmt: skip


def lone_tile(kind: GgmlType, outputs: int, columns: int, *, swiglu: bool) -> tuple[int, int, int]:
    """For one row of input: rows of weights of a program, columns that it loads at a time, warps.

    Chosen of those that `benchmarks/kernels/gguf_speed.py --tiles` tried on an H200.
    """
    most = min(512, triton.next_power_of_2(columns))
    if outputs >= HEAD_OUTPUTS or (columns % 512 and columns % 256 == 0):
        return 4, min(256, most), 1
    if kind == "Q8_0" and not swiglu:
        return 4, most, 4
    return 2, most, 1


def widen(weights: Weights, first: int, out: torch.Tensor) -> None:
    """Write rows `first …` as they are meant to `out` `[n, columns]`."""
    for part in weights.parts:
        begin, end = max(first, part.start), min(first + len(out), part.start + part.rows)
        if begin < end:
            _widen(weights, part, out[begin - first : end - first], begin - part.start, None)


def lookup(ids: torch.Tensor, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` `[n]` int64 of weights of one type: `[n, columns]`."""
    (part,) = weights.parts
    out = torch.empty(len(ids), weights.columns, dtype=dtype, device=ids.device)
    if len(ids):
        _widen(weights, part, out, 0, ids)
    return out


def _widen(
    weights: Weights, part: TypedRows, out: torch.Tensor, first: int, ids: torch.Tensor | None
) -> None:
    rows = 16 if ids is None else 1
    widen_rows[(-(-len(out) // rows), -(-weights.columns // 256))](
        weights.data[part.offset :], out if ids is None else ids, out, part.rows, first, len(out),
        K=weights.columns, TYPE=TYPES[part.type], BN=rows, BK=256, BY_ID=ids is not None,
        EVEN=weights.columns % 256 == 0 and len(out) % rows == 0, num_warps=4, **pdl(out.device),
    )  # fmt: skip
