"""Products of stored weights with up to 16 rows of input: decode, bound by reading the weights.

The matrix unit does the sums, so that what is left for a weight is its load and one or two instructions that
unpack it. Weights are the left operand, 16 rows of them an instruction; rows of the input are its 8 columns.
Nothing goes through shared memory on the way: the order of columns inside a group is free as long as both
operands have the same, so a thread's share of an operand is made of 16 neighbouring bytes of a row, the
widest load there is.

    a program     BN outputs, all columns; its WARPS warps take one group of columns each, in turns
    in the end    the warps' sums are added up, in their order

    [RMSNorm] ─ x · Wᵀ ─ [+ bias] ─ [SwiGLU of two halves] ─ [+ residual]

int4 is multiplied as codes − 8, which need no rounding. What the zero point is off 8 multiplies the sum of
the group's inputs, which the matrix unit computes too: a product with ones.

The instruction's layout: PTX ISA, "Matrix fragments for mma.m16n8k16".
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.unpack import e4m3_values, e4m3_values_factor, int4_values, int8_values
from snugvl.layers.kernels.weights import BF16, FP8, INT4, scale_offsets


@triton.jit
def _columns(
    v, HEAD: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, PAIR: tl.constexpr, WORDS: tl.constexpr
):
    """`[…HEAD…, GROUP]` with columns in the operands' order: `EACH` of four threads, by `PAIR`s in turns."""
    chunks: tl.constexpr = GROUP // (4 * EACH)
    if WORDS and EACH > 8:
        v = tl.reshape(v, [HEAD, chunks, 4, EACH // 16, 2, 8])
        v = tl.permute(v, [0, 1, 2, 3, 5, 4])
    v = tl.reshape(v, [HEAD, chunks, 4, EACH // PAIR, PAIR])
    return tl.reshape(tl.permute(v, [0, 1, 3, 2, 4]), [HEAD, GROUP])


@triton.jit
def _fetch(w, rows, ROW: tl.constexpr, FIRST: tl.constexpr):
    """Ask for the `FIRST` bytes of `rows`, `ROW` bytes each: into the L2 cache."""
    lines: tl.constexpr = triton.next_power_of_2((min(ROW, FIRST) + 127) // 128)
    line = tl.minimum(tl.arange(0, lines) * 128, ROW - 1)
    at = w.to(tl.int64) + rows.to(tl.int64)[:, None] * ROW + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _weights(
    w,
    rows,
    group,
    live,
    groups: tl.constexpr,
    kind: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    PAIR: tl.constexpr,
    MASKED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One group of columns a warp, `[WARPS, BN, GROUP]`, columns in the operands' order.

    Args:
        rows: `[8, 1, BN // 8, 1, 1]`, where they begin.
        group: `[1, WARPS, 1, 1, 1]`.

    The shape of the load says which thread loads what: its last axis is cut into four threads, then the first
    one into eight; the second one is the warps'.
    """
    inner: tl.constexpr = GROUP // 8 if FORMAT == INT4 else GROUP  # elements or words of a group
    chunks: tl.constexpr = GROUP // (4 * EACH)
    chunk = tl.arange(0, chunks)[None, None, None, :, None]
    within = tl.arange(0, inner // chunks)[None, None, None, None, :]
    at = rows * (groups * inner) + group * inner + chunk * (inner // chunks) + within
    if MASKED:
        raw = tl.load(w + at, mask=live, other=0, eviction_policy="evict_first")
    else:
        raw = tl.load(w + at, eviction_policy="evict_first")
    if FORMAT == BF16:
        value = raw
    elif FORMAT == FP8:
        value = e4m3_values(raw, kind, ASSEMBLY, NATIVE)
    elif FORMAT == INT4:
        value = int4_values(raw, kind, ASSEMBLY)
    else:
        value = int8_values(raw, kind, ASSEMBLY)
    if FORMAT == INT4 and EACH > 8:
        value = tl.reshape(value, [8, WARPS, BN // 8, chunks, 4, EACH // 16, 2, 8])
        value = tl.permute(value, [0, 1, 2, 3, 4, 5, 7, 6])
    value = tl.reshape(value, [8, WARPS, BN // 8, chunks, 4, EACH // PAIR, PAIR])
    return tl.reshape(tl.permute(value, [1, 2, 0, 3, 5, 4, 6]), [WARPS, BN, GROUP])


@triton.jit
def _inputs(
    x,
    norm,
    group,
    rstd,
    M,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    EACH: tl.constexpr,
    PAIR: tl.constexpr,
    WARPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ONE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """`[WARPS, GROUP, BM]`: the same groups of the input, transposed, columns in the operands' order."""
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [WARPS, GROUP]
    here = column < K
    token = tl.arange(0, BM)
    if ONE:
        v = tl.load(x + column, mask=here, other=0)
        if HAS_NORM:  # rounded where transformers rounds
            v = (v.to(tl.float32) * rstd).to(x.dtype.element_ty) * tl.load(norm + column, mask=here, other=0)
        v = _columns(v, WARPS, GROUP, EACH, PAIR, WORDS)
        return tl.broadcast_to(v[:, :, None], [WARPS, GROUP, BM])  # all columns alike; the first is kept
    at = token.to(tl.int64)[None, :, None] * K + column[:, None, :]
    v = tl.load(x + at, mask=(token < M)[None, :, None] & here[:, None, :], other=0)
    v = tl.reshape(v, [WARPS * BM, GROUP])
    v = tl.reshape(_columns(v, WARPS * BM, GROUP, EACH, PAIR, WORDS), [WARPS, BM, GROUP])
    return tl.permute(v, [0, 2, 1])


@triton.jit
def _with_sum(value, v, WARPS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr):
    """`value · v` and the sums of `v`, `[WARPS, BN, BM]`: rows of ones stand under those of `value`."""
    ones = tl.full([WARPS, BN, GROUP], 1.0, value.dtype)
    both = tl.reshape(tl.permute(tl.join(value, ones), [0, 3, 1, 2]), [WARPS, 2 * BN, GROUP])
    y = tl.reshape(tl.dot(both, v), [WARPS, 2, BN, BM])
    return tl.split(tl.permute(y, [0, 2, 3, 1]))


@triton.jit(do_not_specialize=["M"])
def skinny(
    x,
    norm,
    w,
    scale,
    zero,
    bias,
    residual,
    out,
    M,
    N,
    eps,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WARPS: tl.constexpr,
    ONE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    NATIVE: tl.constexpr,
    EACH: tl.constexpr,
    PAIR: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`out[m, n] = X[m] · W[n] …`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one.

    Args:
        BM: 8 or 16, at least `M`.
        BN: rows of the weights a program reads, 16 or more; of a SWIGLU, half are gate's and half up's.
        ONE: `M` is 1.
        EACH: neighbouring weights of one load of a thread.
        PAIR: how many of them the compiler's operand layout keeps together.
        EARLY: the kernel starts while the one before it ends (Hopper and later), and lets the next one.
        AHEAD: turns whose weights it asks for meanwhile.
    """
    groups: tl.constexpr = K // GROUP
    turns: tl.constexpr = (groups + WARPS - 1) // WARPS
    outputs: tl.constexpr = BN // 2 if SWIGLU else BN
    kind: tl.constexpr = x.dtype.element_ty
    bits: tl.constexpr = 4 if FORMAT == INT4 else w.dtype.element_ty.primitive_bitwidth
    first = tl.program_id(0) * outputs

    # Row r of the tile in the shape that the load has: [8, 1, BN // 8, 1, 1].
    r = tl.arange(0, BN // 8)[None, None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None, None]
    flat = tl.arange(0, BN)
    load_rows = tl.minimum(first + r % outputs, N - 1) + (r // outputs) * N
    rows = tl.minimum(first + flat % outputs, N - 1) + (flat // outputs) * N
    load_rows = load_rows.to(tl.int64)
    if EARLY:
        gdc_launch_dependents()
        if AHEAD > 0:
            _fetch(w, rows, K * bits // 8, WARPS * AHEAD * GROUP * bits // 8)
        gdc_wait()

    rstd = 1.0
    if HAS_NORM:
        everything = tl.arange(0, WIDE)
        whole = tl.load(x + everything, mask=everything < K, other=0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
    acc = tl.zeros([WARPS, BN, BM], tl.float32)
    warp = tl.arange(0, WARPS)
    warp5 = tl.arange(0, WARPS)[None, :, None, None, None]
    for turn in tl.range(0, turns):
        group = turn * WARPS + warp
        group5 = turn * WARPS + warp5
        value = _weights(
            w, load_rows, group5, group5 < groups, groups, kind, FORMAT, GROUP, BN, WARPS, EACH, PAIR,
            groups % WARPS != 0, ASSEMBLY, NATIVE,
        )  # fmt: skip
        v = _inputs(x, norm, group, rstd, M, K, GROUP, BM, EACH, PAIR, WARPS, HAS_NORM, ONE, FORMAT == INT4)
        v = v.to(kind)
        if FORMAT == BF16:
            acc = tl.dot(value, v, acc)
        else:
            here = (group < groups)[:, None]
            where = scale_offsets(rows[None, :], group[:, None], groups, FORMAT)  # [WARPS, BN]
            s = tl.load(scale + where, mask=here, other=0).to(tl.float32)
            if FORMAT == INT4:
                off = 8.0 - tl.load(zero + where, mask=here, other=0).to(tl.float32)
                part, total = _with_sum(value, v, WARPS, BN, BM, GROUP)
                part += off[:, :, None] * total
            else:
                part = tl.dot(value, v)
            if FORMAT == FP8:
                s *= e4m3_values_factor(ASSEMBLY, NATIVE)
            acc += part * s[:, :, None]
    y = tl.sum(acc, 0)  # [BN, BM]
    out_type = out.dtype.element_ty
    if SWIGLU:
        y = tl.permute(tl.reshape(y, [2, BN // 2, BM]), [1, 2, 0])
        gate, up = tl.split(y)
        gate = gate.to(kind).to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
        y = gate * up.to(kind).to(tl.float32)
    n = first + tl.arange(0, outputs)
    m = tl.arange(0, BM)
    live = (n < N)[:, None] & (m < M)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[:, None]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    if HAS_RESIDUAL:
        y = y.to(kind).to(tl.float32) + tl.load(residual + at, mask=live, other=0).to(tl.float32)
    tl.store(out + at, y.to(out_type), mask=live)
