"""Products of stored weights with one row of input: decode of one sequence, bound by reading the weights.

Of fp8 and int8; int4 has a kernel of its own (`lone_int4.py`).

As in `skinny.py` the matrix unit does the sums and operands are loaded as the instruction wants them. It has
room for 16 rows of weights and 8 of the input, and there is one. So columns take the room: eight units of 64
columns stand as eight rows of weights, and the same eight units of the input as its 8 columns. The product of
each with each has what is wanted on its diagonal, the eight parts of one output.

    weights  unit 0 of row r    ┐         input   unit 0 1 … 7
             unit 1 of row r    │ 8 rows          ├ 64 columns each, of which
             …                  │                 │ a thread holds those that it
             unit 7 of row r    ┘                 └ holds of the weights, too

So a load of a warp takes neighbouring bytes of one row, and a thread needs each number of the input once for
all rows of a program, normalised once.

    a program     BN rows, all columns: BATCH times 512 at once, side by side in its warps
    loads         of weights and scales of the next ones are under way while one is multiplied
    in the end    the diagonals are added up, in their order; then what comes after (`epilogue.py`)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.epilogue import add_residual, normalised, rms_factor, swiglu
from snugvl.layers.kernels.products.gemv import wide_rows
from snugvl.layers.kernels.products.skinny import _loaded, _operand
from snugvl.layers.kernels.products.unpack import unpacked, unpacked_factor
from snugvl.layers.kernels.products.weights import FP8

UNIT = tl.constexpr(64)  # columns
EACH = tl.constexpr(16)  # of them a thread's
TAIL_ROWS = 2  # of a program


@triton.jit
def _weights(w, rows, first, K: tl.constexpr, BATCH: tl.constexpr, PER: tl.constexpr, FLIP: tl.constexpr):
    """Eight units of `BATCH` slices from `first` on, `[8, BATCH, BN, 1, UNIT / PER]` words."""
    wide: tl.constexpr = UNIT // PER
    each: tl.constexpr = EACH // PER
    unit = _units(first, BATCH)[:, :, None, None, None]
    word = tl.arange(0, wide)[None, None, None, None, :]
    within = word // each * each + word % each  # the compiler shall give a thread no more than its share
    at = rows[None, None, :, None, None] * (K // PER) + unit * wide + within
    return _loaded(w, at, unit < K // UNIT, K // UNIT % (8 * BATCH) != 0, "evict_first", FLIP)


@triton.jit
def _units(first, BATCH: tl.constexpr):
    """`[8, BATCH]`: which units of columns."""
    return (tl.arange(0, BATCH)[None, :] + first) * 8 + tl.arange(0, 8)[:, None]


@triton.jit
def _factors(
    start, rows, first, GROUP: tl.constexpr, K: tl.constexpr, BATCH: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Scales, or zero points, of the same weights, `[BATCH, 8 BN]`, as stored."""
    unit = tl.permute(_units(first, BATCH), [1, 0])[:, None, :]
    if FORMAT == FP8:
        rows = rows // 128
    at = rows[None, :, None] * (K // GROUP) + unit * UNIT // GROUP
    at = tl.reshape(at, [BATCH, 8 * BN])
    if K // UNIT % (8 * BATCH) != 0:
        here = tl.reshape(tl.broadcast_to(unit < K // UNIT, [BATCH, BN, 8]), [BATCH, 8 * BN])
        return tl.load(start + at, mask=here, other=0)
    return tl.load(start + at)


@triton.jit
def _stored(
    w, scale, rows, first, K: tl.constexpr, GROUP: tl.constexpr, BATCH: tl.constexpr, BN: tl.constexpr,
    FORMAT: tl.constexpr, PER: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Words and scales of `BATCH` slices of rows, as stored."""
    words = _weights(w, rows, first, K, BATCH, PER, FLIP)
    return words, _factors(scale, rows, first, GROUP, K, BATCH, BN, FORMAT)


@triton.jit
def _numbers(start, first, K: tl.constexpr, BATCH: tl.constexpr, FLIP: tl.constexpr):
    """Eight units of the input or of the norm's weight for each slice, `[8, BATCH, 1, EACH / 8, 32]`."""
    unit = _units(first, BATCH)[:, :, None, None, None]
    part = tl.arange(0, EACH // 8)[None, None, None, :, None]  # loads of a thread
    thread = tl.arange(0, 32)[None, None, None, None, :]
    at = unit * UNIT + part * 8 + thread // 8 * EACH + thread % 8
    return _loaded(start, at, unit < K // UNIT, K // UNIT % (8 * BATCH) != 0, "", FLIP)


@triton.jit
def _input(
    v, gain, rstd, BATCH: tl.constexpr, PAIR: tl.constexpr, PER: tl.constexpr, HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """`_numbers` as an operand, normalised: `[BATCH, UNIT, 8]`."""
    if HAS_NORM:
        v = normalised(v, gain, rstd, OFFSET)
    v = tl.reshape(v, [8, BATCH, 1, 1, EACH // 8, 4, 8])
    v = tl.reshape(tl.permute(v, [0, 1, 2, 3, 5, 4, 6]), [8, BATCH, 1, 1, 4, EACH])
    return tl.permute(_operand(v, BATCH, 8, UNIT, EACH, PAIR, PER), [0, 2, 1])


@triton.jit
def _diagonal(y, BATCH: tl.constexpr, BN: tl.constexpr):
    """Columns 2 i and 2 i + 1 of `[BATCH, 8 BN, 8]` as one that has the diagonal: `[BATCH, 8 BN, 4]`.

    They are a thread's, so this moves nothing.
    """
    even, odd = tl.split(tl.reshape(y, [BATCH, 8 * BN, 4, 2]))
    return tl.where((tl.arange(0, 8 * BN) % 2 == 0)[None, :, None], even, odd)


@triton.jit
def _multiplied(
    acc, words, s, v, kind: tl.constexpr, FORMAT: tl.constexpr, BATCH: tl.constexpr, BN: tl.constexpr,
    WARPS: tl.constexpr, PAIR: tl.constexpr, PER: tl.constexpr, ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`acc` and the product, `[WARPS, 8 BN, 4]`: see `_diagonal`."""
    value = tl.reshape(unpacked(words, kind, FORMAT, ASSEMBLY, NATIVE), [8, BATCH, BN, 1, 4, EACH])
    value = _operand(value, BATCH, 8 * BN, UNIT, EACH, PAIR, PER)
    part = _diagonal(tl.dot(value, v), BATCH, BN)
    part *= (s.to(tl.float32) * unpacked_factor(FORMAT, ASSEMBLY, NATIVE))[:, :, None]
    if BATCH > WARPS:
        part = tl.sum(tl.reshape(part, [BATCH // WARPS, WARPS, 8 * BN, 4]), 0)  # a thread's own
    return acc + part


@triton.jit
def _store(
    acc, shift, added, out, first, kind: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Sums of the diagonals, and what comes after the product, to `out` from `first` on."""
    outputs: tl.constexpr = BN // 2 if SWIGLU else BN
    diagonal = (tl.arange(0, 8 * BN) % 8 // 2)[None, :, None] == tl.arange(0, 4)[None, None, :]
    y = tl.sum(tl.sum(tl.where(diagonal, acc, 0.0), 2), 0)
    y = tl.sum(tl.reshape(y, [BN, 8]), 1)
    if HAS_BIAS:
        y += shift.to(tl.float32)
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, BN // 2]), [1, 0]))
        y = swiglu(gate, up, kind)
    n = first + tl.arange(0, outputs)
    if HAS_RESIDUAL:
        y = add_residual(y, added, kind)
    tl.store(out + n, y.to(out.dtype.element_ty))


@launched
@triton.jit
def lone(
    x, norm, w, scale, bias, residual, out, tail, tail_out, N, eps, K: tl.constexpr, WIDE: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr, WARPS: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, TAIL: tl.constexpr, EACH_TAIL: tl.constexpr,
    ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr, PAIR: tl.constexpr, FLIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one of them.

    Args:
        w: int32 words, four weights each.
        tail: `[TAIL, K]`, weights in the type of `x`, whose outputs go to `tail_out`: EACH_TAIL of them by
            each of the first programs.
        BN: rows of the weights a program reads; of a SWIGLU, half are gate's and half up's.
        BATCH: slices of 512 columns at once, at least as many as warps.
        PAIR: how many neighbours the compiler's operand layout keeps together.
        FLIP: in which order it gives the axes of a load to threads.
        PDL: the kernel starts while the one before it ends: see `compiler/launch.py`.
    """
    slices: tl.constexpr = (K // UNIT + 7) // 8
    last: tl.constexpr = (slices - 1) // BATCH * BATCH
    outputs: tl.constexpr = BN // 2 if SWIGLU else BN
    kind: tl.constexpr = x.dtype.element_ty
    per: tl.constexpr = 4  # weights of a word
    program = tl.program_id(0)
    if TAIL > 0:
        program -= TAIL // EACH_TAIL
        if program < 0:
            at = tl.program_id(0) * EACH_TAIL
            wide_rows(x, norm, tail, tail_out, at, eps, K, WIDE, EACH_TAIL, HAS_NORM, OFFSET, PDL)
            return
    # The last program goes back to where it has a whole tile: it computes some outputs again, the same.
    first = tl.minimum(program * outputs, N - outputs)
    r = tl.arange(0, BN).to(tl.int64)
    rows = first + r % outputs + r // outputs * N

    words, s = _stored(w, scale, rows, 0, K, GROUP, BATCH, BN, FORMAT, per, FLIP)
    gain = _numbers(norm, 0, K, BATCH, FLIP) if HAS_NORM else 1.0
    shift = tl.load(bias + rows) if HAS_BIAS else 0.0
    if PDL:
        gdc_wait()
    v = _numbers(x, 0, K, BATCH, FLIP)
    added = tl.load(residual + first + tl.arange(0, outputs)) if HAS_RESIDUAL else 0.0
    rstd = 1.0
    if HAS_NORM:
        rstd = rms_factor(x, eps, K, WIDE)
    acc = tl.zeros([WARPS, 8 * BN, 4], tl.float32)
    for at in tl.range(BATCH, last + BATCH, BATCH, num_stages=1):
        next_words, next_s = _stored(w, scale, rows, at, K, GROUP, BATCH, BN, FORMAT, per, FLIP)
        next_v = _numbers(x, at, K, BATCH, FLIP)
        next_gain = _numbers(norm, at, K, BATCH, FLIP) if HAS_NORM else gain
        v = _input(v, gain, rstd, BATCH, PAIR, per, HAS_NORM, OFFSET)
        acc = _multiplied(acc, words, s, v, kind, FORMAT, BATCH, BN, WARPS, PAIR, per, ASSEMBLY, NATIVE)
        words, s, v, gain = next_words, next_s, next_v, next_gain
    if PDL:
        gdc_launch_dependents()
    v = _input(v, gain, rstd, BATCH, PAIR, per, HAS_NORM, OFFSET)
    acc = _multiplied(acc, words, s, v, kind, FORMAT, BATCH, BN, WARPS, PAIR, per, ASSEMBLY, NATIVE)
    _store(acc, shift, added, out, first, kind, BN, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
