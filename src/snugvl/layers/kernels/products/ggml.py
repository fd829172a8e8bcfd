"""Products with a GGUF's blocks as `layers/ggml.py` sorts them: values are made in registers alone.

    one row of input      a program sums a few outputs over all columns:  Σ (a Σ code · x + b Σ x)  by groups
    up to 64              tiles of `a · code + b` in float16, multiplied by matrix instructions
    more                  slices are widened and multiplied by the library (`products/linear.py`)

All types are codes of 4, 5, 6 or 8 bits with a factor and an addend for each group of 16 or 32 columns, so
one kernel serves all. A code becomes a float without a conversion, which runs at a fraction of the speed of
the rest: its bits under the exponent of 2²³, less 2²³.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from snugvl.layers.ggml import GgmlType, Part
from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others
from snugvl.layers.kernels.products.epilogue import Epilogue, add_residual, normalised, rms_factor, swiglu
from snugvl.layers.kernels.rows import normed
from snugvl.layers.weights import Weights

Q4_0, Q4_1, Q8_0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
Q4_K, Q5_K, Q6_K = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
TYPES: Final[dict[GgmlType, tl.constexpr]] = {
    "Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0, "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K,
}  # fmt: skip
KINDS: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
FEW: Final = 64  # rows of input that have a kernel
STEP: Final = 1024  # columns that a program of one row loads at a time
DEEP: Final = 128  # columns of a tile


@triton.jit
def _number(bits):
    """Whole numbers below 2²³ as float32."""
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _code(words, high, PLACE: tl.constexpr, TYPE: tl.constexpr):
    code = (words >> (4 * PLACE)) & 15
    if TYPE == Q5_K:
        code |= ((high >> PLACE) & 1) << 4
    elif TYPE == Q6_K:
        code |= ((high >> (2 * PLACE)) & 3) << 4
    return _number(code)


@triton.jit
def _eight(words, high, TYPE: tl.constexpr):
    """`words` `[…, n]` int32, and as many high bits, as `[…, n, 2, 2, 2]` float32 in their order."""
    a = tl.join(_code(words, high, 0, TYPE), _code(words, high, 4, TYPE))
    b = tl.join(_code(words, high, 1, TYPE), _code(words, high, 5, TYPE))
    c = tl.join(_code(words, high, 2, TYPE), _code(words, high, 6, TYPE))
    d = tl.join(_code(words, high, 3, TYPE), _code(words, high, 7, TYPE))
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _stored(w, rows, group, mask, K: tl.constexpr, TYPE: tl.constexpr):
    """Codes of groups of columns as they are stored, `[rows, groups, words or bytes]`: the low bits."""
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    inner: tl.constexpr = size if TYPE == Q8_0 else size // 8
    at = rows.to(tl.int64)[:, None, None] * (K // size * inner)
    at += group[None, :, None] * inner + tl.arange(0, inner)[None, None, :]
    if TYPE == Q8_0:
        raw = tl.load(w.to(tl.pointer_type(tl.int8)) + at, mask=mask[:, :, None], other=0)
    else:
        raw = tl.load(w.to(tl.pointer_type(tl.int32)) + at, mask=mask[:, :, None], other=0)
    return raw


@triton.jit
def _codes(
    w, raw, count, rows, group, mask, K: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr
):
    """`raw` as numbers, `[rows, groups, columns of a group]` float32."""
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    if TYPE == Q8_0:
        result = raw.to(tl.float32)
    else:
        words: tl.constexpr = size // 8
        at = rows.to(tl.int64)[:, None, None] * (K // 8)
        at += group[None, :, None] * words + tl.arange(0, words)[None, None, :]
        plane = w + count * (K // 2)
        if TYPE == Q5_K:
            high = tl.load(plane + at, mask=mask[:, :, None], other=0).to(tl.int32)
        elif TYPE == Q6_K:
            pairs = plane.to(tl.pointer_type(tl.uint16)) + at
            high = tl.load(pairs, mask=mask[:, :, None], other=0).to(tl.int32)
        else:
            high = raw
        result = tl.reshape(_eight(raw, high, TYPE), [BN, BG, size])
        if TYPE == Q6_K:
            result -= 32.0
    return result


@triton.jit
def _affine(w, count, rows, group, mask, K: tl.constexpr, TYPE: tl.constexpr):
    """Factor and addend of each group, `[rows, groups]` float32; codes of Q6_K have theirs already."""
    row = rows.to(tl.int64)[:, None]
    g = group[None, :]
    halves = w.to(tl.pointer_type(tl.float16))
    if TYPE == Q4_0:
        a = tl.load(halves + count * (K // 4) + row * (K // 32) + g, mask=mask, other=0).to(tl.float32)
        b = -8.0 * a
    elif TYPE == Q4_1:
        at = halves + count * (K // 4) + (row * (K // 32) + g) * 2
        a = tl.load(at, mask=mask, other=0).to(tl.float32)
        b = tl.load(at + 1, mask=mask, other=0).to(tl.float32)
    elif TYPE == Q8_0:
        a = tl.load(halves + count * (K // 2) + row * (K // 32) + g, mask=mask, other=0).to(tl.float32)
        b = a * 0.0
    elif TYPE == Q6_K:
        plane = w + count * (K // 4 * 3)
        scale = tl.load(plane.to(tl.pointer_type(tl.int8)) + row * (K // 16) + g, mask=mask, other=0)
        d = (plane + count * (K // 16)).to(tl.pointer_type(tl.float16)) + row * (K // 256) + g // 16
        a = tl.load(d, mask=mask, other=0).to(tl.float32) * scale.to(tl.float32)
        b = a * 0.0
    else:
        plane = w + count * (K // 2 if TYPE == Q4_K else K // 8 * 5)
        block = row * (K // 256) + g // 8
        at = plane + block * 12 + g % 4
        low = tl.load(at, mask=mask, other=0).to(tl.int32)
        middle = tl.load(at + 4, mask=mask, other=0).to(tl.int32)
        rest = tl.load(at + 8, mask=mask, other=0).to(tl.int32)
        first = g % 8 < 4
        scale = tl.where(first, low & 63, (rest & 15) | ((low >> 6) << 4))
        least = tl.where(first, middle & 63, (rest >> 4) | ((middle >> 6) << 4))
        d = (plane + count * (K // 256 * 12)).to(tl.pointer_type(tl.float16)) + block * 2
        a = tl.load(d, mask=mask, other=0).to(tl.float32) * _number(scale)
        b = -tl.load(d + 1, mask=mask, other=0).to(tl.float32) * _number(least)
    return a, b


@triton.jit
def _dot_rows(
    x, norm, w, raw, count, rows, live, rstd, K: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr,
    BG: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """`x · W[rows]ᵀ`, `[BN]` float32. `raw`: the first codes, loaded already."""
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    groups: tl.constexpr = K // size
    total = tl.zeros([BN, BG], tl.float32)
    for start in tl.static_range(0, groups, BG):
        group = start + tl.arange(0, BG)
        here = group < groups
        mask = live[:, None] & here[None, :]
        if start > 0:
            raw = _stored(w, rows, group, mask, K, TYPE)
        at = group[:, None] * size + tl.arange(0, size)[None, :]
        v = tl.load(x + at, mask=here[:, None], other=0)
        if HAS_NORM:
            v = normalised(v, tl.load(norm + at, mask=here[:, None], other=0), rstd, OFFSET)
        v = v.to(tl.float32)
        a, b = _affine(w, count, rows, group, mask, K, TYPE)
        codes = _codes(w, raw, count, rows, group, mask, K, TYPE, BN, BG)
        total += tl.sum(codes * v[None, :, :], 2) * a
        if TYPE != Q8_0 and TYPE != Q6_K:
            total += b * tl.sum(v, 1)[None, :]
    return tl.sum(total, 1)


@launched
@triton.jit
def one_row(
    x, norm, w, bias, residual, out, count, outputs, eps, K: tl.constexpr, WIDE: tl.constexpr,
    TYPE: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]` of `count` rows; with SWIGLU the first half are gates, `outputs` of them."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows < outputs
    kind: tl.constexpr = x.dtype.element_ty
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    count = count.to(tl.int64)
    group = tl.arange(0, BG)
    mask = live[:, None] & (group < K // size)[None, :]
    raw = _stored(w, rows, group, mask, K, TYPE)  # weights are nobody's to write: they come early
    wait_for_others(PDL)
    rstd = 0.0
    if HAS_NORM:
        rstd = rms_factor(x, eps, K, WIDE)
    y = _dot_rows(x, norm, w, raw, count, rows, live, rstd, K, TYPE, BN, BG, HAS_NORM, OFFSET)
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=live, other=0).to(tl.float32)
    if SWIGLU:
        others = rows + outputs
        raw = _stored(w, others, group, mask, K, TYPE)
        up = _dot_rows(x, norm, w, raw, count, others, live, rstd, K, TYPE, BN, BG, HAS_NORM, OFFSET)
        if HAS_BIAS:
            up += tl.load(bias + others, mask=live, other=0).to(tl.float32)
        y = swiglu(y, up, kind)
    if HAS_RESIDUAL:
        y = add_residual(y, tl.load(residual + rows, mask=live, other=0), kind)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _tile(
    x, w, count, rows, live, tokens, M, K: tl.constexpr, TYPE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`W[rows] · X[tokens]ᵀ`, `[BN, BM]` float32; of bf16 input a sixteenth, in float16, which is finite."""
    size: tl.constexpr = 16 if TYPE == Q6_K else 32
    each: tl.constexpr = BK // size
    acc = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(0, K // size, each):
        group = start + tl.arange(0, each)
        mask = live[:, None] & (group < K // size)[None, :]
        raw = _stored(w, rows, group, mask, K, TYPE)
        a, b = _affine(w, count, rows, group, mask, K, TYPE)
        codes = _codes(w, raw, count, rows, group, mask, K, TYPE, BN, each)
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
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[m, n] = X[m] · W[n]`, `stride` from row to row of `out` and of what is added."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    live = rows < outputs
    count = count.to(tl.int64)
    wait_for_others(PDL)
    acc = _tile(x, w, count, rows, live, tokens, M, K, TYPE, BM, BN, BK)
    if HAS_BIAS:
        acc += tl.load(bias + rows, mask=live, other=0).to(tl.float32)[:, None]
    if SWIGLU:
        others = rows + outputs
        up = _tile(x, w, count, others, live, tokens, M, K, TYPE, BM, BN, BK)
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
    BK: tl.constexpr, BY_ID: tl.constexpr, PDL: tl.constexpr,
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
    raw = _stored(w, rows, group, mask, K, TYPE)
    a, b = _affine(w, count, rows, group, mask, K, TYPE)
    value = _codes(w, raw, count, rows, group, mask, K, TYPE, BN, each) * a[:, :, None] + b[:, :, None]
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


def _few(x: torch.Tensor, weights: Weights, part: Part, beside: Epilogue, out: torch.Tensor) -> None:
    outputs, columns, tokens = beside.outputs(part.rows), weights.columns, len(x)
    mine = slice(part.start, part.start + outputs)
    bias = None if beside.bias is None else beside.bias[part.start : part.start + part.rows]
    residual = None if beside.residual is None else beside.residual[:, mine]
    norm, bias_, residual_ = beside._replace(bias=bias, residual=residual).tensors(x)
    has = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "SWIGLU": beside.swiglu}
    w, into, kind = weights.data[part.offset :], out[:, mine], TYPES[part.type]
    if tokens == 1:
        step = min(STEP, triton.next_power_of_2(columns))
        one_row[(-(-outputs // 4),)](
            x, norm, w, bias_, residual_, into, part.rows, outputs, beside.eps, K=columns,
            WIDE=triton.next_power_of_2(columns), TYPE=kind, BN=4, BG=step // part.layout.group,
            HAS_NORM=beside.norm is not None, OFFSET=beside.offset, **has, num_warps=4, **pdl(x.device),
        )  # fmt: skip
        return
    assert residual is None or residual.stride(0) == into.stride(0)
    rows = 16 if outputs < 4096 else 32
    few_rows[(-(-outputs // rows),)](
        x, w, bias_, residual_, into, tokens, part.rows, outputs, into.stride(0), K=columns, TYPE=kind,
        BM=max(16, triton.next_power_of_2(tokens)), BN=rows, BK=DEEP, **has, KIND=KINDS[x.dtype],
        num_warps=4, num_stages=3 if x.element_size() == 2 else 1, **pdl(x.device),
    )  # fmt: skip


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


def _widen(weights: Weights, part: Part, out: torch.Tensor, first: int, ids: torch.Tensor | None) -> None:
    rows = 16 if ids is None else 1
    widen_rows[(-(-len(out) // rows), -(-weights.columns // 256))](
        weights.data[part.offset :], out if ids is None else ids, out, part.rows, first, len(out),
        K=weights.columns, TYPE=TYPES[part.type], BN=rows, BK=256, BY_ID=ids is not None, num_warps=4,
        **pdl(out.device),
    )  # fmt: skip
