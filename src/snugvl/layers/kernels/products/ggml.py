"""Products with a GGUF's blocks as `layers/ggml.py` sorts them: values are made in registers alone.

    one row of bf16       `products/lone_ggml.py`: Σ (a Σ code · x + b Σ x) by groups; `LONE`, from Ampere on
    else one              tiles of `a · code + b`, times the input
    up to 64              such tiles in float16, multiplied by matrix instructions; of float32 as they are
    more                  slices are dequantized and multiplied by the library (`products/linear.py`)

What is loaded, and how it becomes numbers, is `products/ggml_blocks.py`'s.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from snugvl.layers.ggml import GgmlType, TypedRows
from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others
from snugvl.layers.kernels.device import TENSOR_CORES, capability, in_loops
from snugvl.layers.kernels.products.epilogue import Epilogue, add_residual, swiglu
from snugvl.layers.kernels.products.ggml_blocks import (
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    affine,
    codes_of,
    stored,
)
from snugvl.layers.kernels.products.lone_ggml import lone_ggml
from snugvl.layers.kernels.products.tiles import HEAD_OUTPUTS, Fragments
from snugvl.layers.kernels.rows import normed
from snugvl.layers.replaced import usable
from snugvl.layers.weights import Weights

TYPES: Final[dict[GgmlType, tl.constexpr]] = {
    "Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0, "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K, "Q5_0": Q5_0,
    "Q5_1": Q5_1, "Q2_K": Q2_K, "Q3_K": Q3_K, "IQ4_NL": IQ4_NL, "IQ4_XS": IQ4_XS, "MXFP4": MXFP4,
}  # fmt: skip
LONE: Final = frozenset(("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))  # with a kernel for one row of bf16
KINDS: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
FEW: Final = 64  # rows of input that have a kernel
LEAST: Final = 16  # rows of weights of a program, for one row of input
DEEP: Final = 128  # columns of a tile
SHALLOW: Final = 32  # the same, multiplied in loops over registers


@triton.jit
def product_of(
    x, w, count, rows, live, tokens, M, K: tl.constexpr, TYPE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`W[rows] · X[tokens]ᵀ`, `[BN, BM]` float32; of bf16 input a sixteenth, in float16, which is finite."""
    size: tl.constexpr = 16 if TYPE >= Q6_K else 32
    each: tl.constexpr = BK // size
    acc = tl.zeros([BN, BK if BM == 1 else BM], tl.float32)
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
        if BM == 1:
            acc += value * tl.trans(v.to(tl.float32))
        elif v.dtype == tl.float32:
            acc = tl.dot(value, v, acc, input_precision="ieee")
        elif v.dtype == tl.bfloat16:
            narrow = tl.clamp(v.to(tl.float32) * 0.0625, -65504.0, 65504.0).to(tl.float16)
            acc = tl.dot(value.to(tl.float16), narrow, acc)
        else:
            acc = tl.dot(value.to(tl.float16), v, acc)
    if BM == 1:
        acc = tl.sum(acc, 1)[:, None]
    elif x.dtype.element_ty == tl.bfloat16:
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
    acc = product_of(x, w, count, rows, live, tokens, M, K, TYPE, BM, BN, BK, EVEN)
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=live, other=0).to(tl.float32)[:, None]
    if SWIGLU:
        others = rows + outputs
        up = product_of(x, w, count, others, live, tokens, M, K, TYPE, BM, BN, BK, EVEN)
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
def dequantize_rows(
    w, ids, out, count, first, wanted, K: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BY_ID: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows `first …`, or those that `ids` `[wanted]` says, to `out` `[wanted, K]`."""
    size: tl.constexpr = 16 if TYPE >= Q6_K else 32
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
    if x.shape[0] > FEW or (swiglu and len(weights.parts) > 1):
        return False
    return usable("few_rows") or (_fits_lone(x, weights) and usable("lone_ggml"))


def few(x: torch.Tensor, weights: Weights, beside: Epilogue, out: torch.Tensor) -> None:
    """Write `x` `[M, columns]` times `weights`, with what is `beside`, to `out` `[M, outputs]`."""
    lone = _fits_lone(x, weights) and usable("lone_ggml")
    if beside.norm is not None and not lone:
        x, beside = normed(x, beside.norm, beside.eps, beside.offset), beside._replace(norm=None)
    for part in weights.parts:
        _few(x, weights, part, beside, out, lone=lone)


def _fits_lone(x: torch.Tensor, weights: Weights) -> bool:
    fast = len(x) == 1 and x.dtype == torch.bfloat16 and capability(x.device) >= TENSOR_CORES
    return fast and all(part.rows >= LEAST and part.type in LONE for part in weights.parts)


def _few(
    x: torch.Tensor, weights: Weights, part: TypedRows, beside: Epilogue, out: torch.Tensor, *, lone: bool
) -> None:
    outputs, columns, tokens = beside.outputs(part.rows), weights.columns, len(x)
    mine = slice(part.start, part.start + outputs)
    bias = None if beside.bias is None else beside.bias[part.start : part.start + part.rows]
    residual = None if beside.residual is None else beside.residual[:, mine]
    norm, bias_, residual_ = beside._replace(bias=bias, residual=residual).tensors(x)
    has = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "SWIGLU": beside.swiglu}
    w, into, kind = weights.data[part.offset :], out[:, mine], TYPES[part.type]
    if lone:
        tile = lone_tile(outputs, columns)
        lone_ggml[(-(-outputs // beside.outputs(tile.rows)),)](
            x, norm, w, bias_, residual_, into, part.rows, outputs, beside.eps, K=columns,
            WIDE=triton.next_power_of_2(columns), TYPE=kind, R=tile.rows, W=tile.warps,
            HAS_NORM=beside.norm is not None, OFFSET=beside.offset, **has,
            SOON=tile.soon, num_warps=tile.warps, **pdl(x.device),
        )  # fmt: skip
        return
    assert residual is None or residual.stride(0) == into.stride(0)
    rows = 16 if outputs < 4096 else 32
    loops = tokens > 1 and in_loops(x.device, x.dtype)
    deep = SHALLOW if loops else DEEP
    few_rows[(-(-outputs // rows),)](
        x, w, bias_, residual_, into, tokens, part.rows, outputs, into.stride(0), K=columns, TYPE=kind,
        BM=1 if tokens == 1 else max(16, triton.next_power_of_2(tokens)), BN=rows, BK=deep, **has,
        KIND=KINDS[x.dtype], EVEN=columns % deep == 0 and outputs % rows == 0, num_warps=8 if loops else 4,
        num_stages=3 if x.element_size() == 2 else 1, **pdl(x.device),
    )  # fmt: skip


def lone_tile(outputs: int, columns: int) -> Fragments:
    """For one row of input, as `benchmarks/gguf_speed.py` measured it of every type on an H200."""
    warps = 8 if columns > 4096 else 2 if outputs >= HEAD_OUTPUTS else 4
    return Fragments(16, warps, soon=outputs * columns > 1 << 22)  # a small one ends before the next starts


def dequantize(weights: Weights, first: int, out: torch.Tensor) -> None:
    """Write rows `first …` as they are meant to `out` `[n, columns]`."""
    for part in weights.parts:
        begin, end = max(first, part.start), min(first + len(out), part.start + part.rows)
        if begin < end:
            _dequantize(weights, part, out[begin - first : end - first], begin - part.start, None)


def lookup(ids: torch.Tensor, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` `[n]` int64 of weights of one type: `[n, columns]`."""
    (part,) = weights.parts
    out = torch.empty(len(ids), weights.columns, dtype=dtype, device=ids.device)
    if len(ids):
        _dequantize(weights, part, out, 0, ids)
    return out


def _dequantize(
    weights: Weights, part: TypedRows, out: torch.Tensor, first: int, ids: torch.Tensor | None
) -> None:
    rows = 16 if ids is None else 1
    dequantize_rows[(-(-len(out) // rows), -(-weights.columns // 256))](
        weights.data[part.offset :], out if ids is None else ids, out, part.rows, first, len(out),
        K=weights.columns, TYPE=TYPES[part.type], BN=rows, BK=256, BY_ID=ids is not None,
        EVEN=weights.columns % 256 == 0 and len(out) % rows == 0, num_warps=4, **pdl(out.device),
    )  # fmt: skip
