"""Products of stored weights with up to `SKINNY_ROWS` rows of input: decode, bound by reading the weights.

The matrix unit does the sums, so that what is left for a weight is its load and one or two instructions that
unpack it. Weights are the left operand, 16 rows of them an instruction; rows of the input are its 8 columns.
Nothing goes through shared memory on the way: the order of columns inside a group is free as long as both
operands have the same, so a thread's share of an operand is made of neighbouring weights, 16 bytes of a row,
and the same columns of the input.

    a program     BN outputs, all columns; its warps take BATCH groups of columns at once, side by side
    loads         all those of the next BATCH groups are under way while one is multiplied
    in the end    the warps' sums are added up, in their order; then what comes after (`epilogue.py`)

int4 is multiplied as codes − 8, which need no rounding. What the zero point is off 8 multiplies the sum of
the group's inputs, which the matrix unit computes too: a product with ones. bf16 weights are operands as they
are loaded, like the input.

A row of the input gets the same bits whatever other rows there are.

The instruction's layout: PTX ISA, "Matrix fragments for mma.m16n8k16".
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.epilogue import add_residual, normalised, rms_factor, swiglu
from snugvl.layers.kernels.products.unpack import unpacked, unpacked_factor
from snugvl.layers.kernels.products.weights import BF16, INT4, scale_offsets


@triton.jit
def _operand(
    v,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    PAIR: tl.constexpr,
    PER: tl.constexpr,
):
    """`[8, BATCH, ROWS / 8, GROUP / 4 / EACH, 4, EACH]` → `[BATCH, ROWS, GROUP]`.

    The columns get the order of the operands: by `PAIR`s, in turns from the `EACH` of four threads. Those are
    words of `PER`, of which `unpack.py` pairs two.
    """
    chunks: tl.constexpr = GROUP // (4 * EACH)
    if EACH > PER and PER > 1:
        v = tl.reshape(v, [8, BATCH, ROWS // 8, chunks, 4, EACH // (2 * PER), 2, PER])
        v = tl.permute(v, [0, 1, 2, 3, 4, 5, 7, 6])
    v = tl.reshape(v, [8, BATCH, ROWS // 8, chunks, 4, EACH // PAIR, PAIR])
    return tl.reshape(tl.permute(v, [1, 2, 0, 3, 5, 4, 6]), [BATCH, ROWS, GROUP])


@triton.jit
def _loaded(start, at, mask, MASKED: tl.constexpr, EVICTION: tl.constexpr, FLIP: tl.constexpr):
    """`start[at]`, five axes: the last is cut into four threads, the first into eight, the second into warps.

    The compiler's layout of a load does so when the axes come in this order, or FLIPped in the reverse.
    """
    if FLIP:
        at, mask = tl.permute(at, [3, 2, 1, 0, 4]), tl.permute(mask, [3, 2, 1, 0, 4])
    if MASKED:
        v = tl.load(start + at, mask=mask, other=0, eviction_policy=EVICTION)
    else:
        v = tl.load(start + at, eviction_policy=EVICTION)
    if FLIP:
        v = tl.permute(v, [3, 2, 1, 0, 4])
    return v


@triton.jit
def _stored(
    w, rows, first, groups: tl.constexpr, GROUP: tl.constexpr, BATCH: tl.constexpr, EACH: tl.constexpr,
    PER: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """`BATCH` groups of weights from `first` on, `[8, BATCH, BN / 8, GROUP / 4 / EACH, 4 EACH / PER]` words.

    Args:
        rows: `[8, 1, BN // 8, 1, 1]`, which of the matrix.
        PER: weights of a word; 1: the weights themselves.
    """
    chunks: tl.constexpr = GROUP // (4 * EACH)
    wide: tl.constexpr = 4 * EACH // PER
    group = first + tl.arange(0, BATCH)[None, :, None, None, None]
    if PER == 1:
        at = rows * (groups * GROUP) + _columns(first, GROUP, BATCH, EACH)
    else:
        chunk = tl.arange(0, chunks)[None, None, None, :, None]
        word = tl.arange(0, wide)[None, None, None, None, :]
        # Neighbours only within a share: the compiler would give a thread 16 bytes of a group, which may
        # have 32.
        within = word // (EACH // PER) * (EACH // PER) + word % (EACH // PER)
        at = rows * (groups * chunks * wide) + group * (chunks * wide) + chunk * wide + within
    return _loaded(w, at, group < groups, groups % BATCH != 0, "evict_first", FLIP)


@triton.jit
def _columns(first, GROUP: tl.constexpr, BATCH: tl.constexpr, EACH: tl.constexpr):
    """Which columns the loads of 16-bit numbers take in `BATCH` groups from `first` on, five axes."""
    chunks: tl.constexpr = GROUP // (4 * EACH)
    parts: tl.constexpr = EACH // 8  # loads of a thread for one of the weights
    group = (first + tl.arange(0, BATCH))[None, :, None, None, None]
    part = tl.arange(0, chunks * parts)[None, None, None, :, None]
    thread = tl.arange(0, 32)[None, None, None, None, :]
    return group * GROUP + part // parts * (4 * EACH) + part % parts * 8 + thread // 8 * EACH + thread % 8


@triton.jit
def _inputs(
    x, norm, first, rstd, M, K: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BATCH: tl.constexpr,
    EACH: tl.constexpr, PAIR: tl.constexpr, PER: tl.constexpr, FLIP: tl.constexpr, HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """`[BATCH, GROUP, BM]`: the same groups of the input, transposed; rows beyond `M` repeat the last."""
    chunks: tl.constexpr = GROUP // (4 * EACH)
    token = tl.arange(0, 8)[:, None, None] + tl.arange(0, BM // 8)[None, None, :] * 8
    token = tl.minimum(token, M - 1)[:, :, :, None, None]
    column = _columns(first, GROUP, BATCH, EACH)
    here = (first + tl.arange(0, BATCH))[None, :, None, None, None] * GROUP < K
    masked: tl.constexpr = K // GROUP % BATCH != 0
    v = _loaded(x, token * K + column, here, masked, "", FLIP)
    if HAS_NORM:
        # Loaded for each token as the input is, by the threads that need it.
        g = _loaded(norm, token * 0 + column, here, masked, "", FLIP)
        v = normalised(v, g, rstd, OFFSET)
    v = tl.reshape(v, [8, BATCH, BM // 8, chunks, EACH // 8, 4, 8])
    v = tl.reshape(tl.permute(v, [0, 1, 2, 3, 5, 4, 6]), [8, BATCH, BM // 8, chunks, 4, EACH])
    return tl.permute(_operand(v, BATCH, BM, GROUP, EACH, PAIR, PER), [0, 2, 1])


@triton.jit
def _factors(scale, zero, rows, first, groups: tl.constexpr, BATCH: tl.constexpr, FORMAT: tl.constexpr):
    """Scales and zero points (without any, scales; of bf16 nothing) of the same groups, `[BATCH, BN]`."""
    if FORMAT == BF16:
        s, z = 1.0, 1.0
    else:
        group = first + tl.arange(0, BATCH)
        where = scale_offsets(rows[None, :], group[:, None], groups, FORMAT)
        here = (group < groups)[:, None]
        s = tl.load(scale + where, mask=here, other=0)
        z = tl.load(zero + where, mask=here, other=0) if FORMAT == INT4 else s
    return s, z


@triton.jit
def _with_sum(value, v, BATCH: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr):
    """`value · v` and the sums of `v`, `[BATCH, BN, BM]`: rows of ones stand under those of `value`."""
    ones = tl.full([BATCH, BN, GROUP], 1.0, value.dtype)
    both = tl.reshape(tl.permute(tl.join(value, ones), [0, 3, 1, 2]), [BATCH, 2 * BN, GROUP])
    y = tl.reshape(tl.dot(both, v), [BATCH, 2, BN, BM])
    return tl.split(tl.permute(y, [0, 2, 3, 1]))


@triton.jit
def _multiplied(
    acc, words, s, z, v, kind: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BATCH: tl.constexpr, EACH: tl.constexpr, PAIR: tl.constexpr, PER: tl.constexpr,
    ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`acc` and the product of `BATCH` groups, `[BATCH, BN, BM]`."""
    chunks: tl.constexpr = GROUP // (4 * EACH)
    value = words if FORMAT == BF16 else unpacked(words, kind, FORMAT, ASSEMBLY, NATIVE)
    value = tl.reshape(value, [8, BATCH, BN // 8, chunks, 4, EACH])
    value = _operand(value, BATCH, BN, GROUP, EACH, PAIR, PER)
    if FORMAT == BF16:
        acc = tl.dot(value, v, acc)
    else:
        if FORMAT == INT4:
            part, total = _with_sum(value, v, BATCH, BN, BM, GROUP)
            part += (8.0 - z.to(tl.float32))[:, :, None] * total
        else:
            part = tl.dot(value, v)
        acc += part * (s.to(tl.float32) * unpacked_factor(FORMAT, ASSEMBLY, NATIVE))[:, :, None]
    return acc


@triton.jit
def _store(
    y, bias, residual, out, flat, first, M, N, kind: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """A tile `y` `[BN, BM]`, and what comes after the product, to `out` from output `first` on."""
    outputs: tl.constexpr = BN // 2 if SWIGLU else BN
    if HAS_BIAS:
        y += tl.load(bias + flat).to(tl.float32)[:, None]
    if SWIGLU:
        y = tl.permute(tl.reshape(y, [2, BN // 2, BM]), [1, 2, 0])
        gate, up = tl.split(y)
        y = swiglu(gate, up, kind)
    n = first + tl.arange(0, outputs)
    m = tl.arange(0, BM)
    live = (n < N)[:, None] & (m < M)[None, :]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    if HAS_RESIDUAL:
        y = add_residual(y, tl.load(residual + at, mask=live, other=0), kind)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)


@launched
@triton.jit(do_not_specialize=["M"])
def skinny(
    x, norm, w, scale, zero, bias, residual, out, M, N, eps, K: tl.constexpr, WIDE: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr, EACH: tl.constexpr, PAIR: tl.constexpr, FLIP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`out[m, n] = X[m] · W[n] …`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one.

    Args:
        w: int32 words, four weights each, of int4 eight; or bf16.
        BM: 8, 16 or 32, at least `M`.
        BN: rows of the weights a program reads, 16 or more; of a SWIGLU, half are gate's and half up's.
        BATCH: groups of columns at once, at least as many as warps.
        HAS_NORM: of one row of input only.
        EACH: neighbouring weights of one load of a thread.
        PAIR: how many of them the compiler's operand layout keeps together.
        FLIP: in which order it gives the axes of a load to threads.
        PDL: the kernel starts while the one before it ends: see `compiler/launch.py`.
    """
    groups: tl.constexpr = K // GROUP
    last: tl.constexpr = (groups - 1) // BATCH * BATCH
    outputs: tl.constexpr = BN // 2 if SWIGLU else BN
    kind: tl.constexpr = x.dtype.element_ty
    per: tl.constexpr = 1 if FORMAT == BF16 else 8 if FORMAT == INT4 else 4  # weights of a word
    first = tl.program_id(0) * outputs

    # Row r of the tile in the shape that the load has: [8, 1, BN // 8, 1, 1].
    r = tl.arange(0, BN // 8)[None, None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None, None]
    flat = tl.arange(0, BN)
    rows = (tl.minimum(first + r % outputs, N - 1) + (r // outputs) * N).to(tl.int64)
    flat = tl.minimum(first + flat % outputs, N - 1) + (flat // outputs) * N

    words = _stored(w, rows, 0, groups, GROUP, BATCH, EACH, per, FLIP)
    s, z = _factors(scale, zero, flat, 0, groups, BATCH, FORMAT)
    if PDL:
        gdc_wait()
    rstd = 1.0
    if HAS_NORM:
        rstd = rms_factor(x, eps, K, WIDE)
    v = _inputs(x, norm, 0, rstd, M, K, GROUP, BM, BATCH, EACH, PAIR, per, FLIP, HAS_NORM, OFFSET)
    acc = tl.zeros([BATCH, BN, BM], tl.float32)
    for at in tl.range(BATCH, last + BATCH, BATCH, num_stages=1):
        next_words = _stored(w, rows, at, groups, GROUP, BATCH, EACH, per, FLIP)
        next_s, next_z = _factors(scale, zero, flat, at, groups, BATCH, FORMAT)
        next_v = _inputs(x, norm, at, rstd, M, K, GROUP, BM, BATCH, EACH, PAIR, per, FLIP, HAS_NORM, OFFSET)
        acc = _multiplied(
            acc, words, s, z, v, kind, FORMAT, GROUP, BM, BN, BATCH, EACH, PAIR, per, ASSEMBLY, NATIVE
        )
        words, s, z, v = next_words, next_s, next_z, next_v
    if PDL:
        gdc_launch_dependents()
    acc = _multiplied(
        acc, words, s, z, v, kind, FORMAT, GROUP, BM, BN, BATCH, EACH, PAIR, per, ASSEMBLY, NATIVE
    )
    y = tl.sum(acc, 0)  # [BN, BM]
    _store(y, bias, residual, out, flat, first, M, N, kind, BM, BN, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
