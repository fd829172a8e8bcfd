"""int4 times one row of input, by integer products of the matrix unit.

Codes stay integers: those of a word are masked to bytes, which is less than half the work of making
floating-point numbers of them. The input becomes integers, too, of 15 bits: each unit of it times a power of
two that brings its largest number to 2¹³ or more. That loses at most a 2¹⁴th of the unit's largest number,
where bf16, in which the input comes, has lost up to a 2⁹th of each; sums are exact. Answers lose nothing by
it (`training/format_cost.py`: KL of a text to float32 0.054 with and without).

A unit is a group's columns, a slice four units. The instruction multiplies 16 rows of weights with
eight columns: the input's upper bytes in the slice's first unit, its lower bytes there, the upper ones in the
second unit, and so on. Weights of unit u are multiplied with all eight, and two of these products are wanted,
those with unit u's bytes. Lane 4 a + b of a warp

    loads         the b-th quarter of every unit of its rows a, a + 8, …, and of the input's unit a / 2
    is given      rows a and a + 8 times unit b, upper bytes and lower ones, once for every u; it keeps u = b
    adds up       those of its slices, times the group's scale; at the end lanes of a row are added, and warps

Sums begin at 1.5 · 2²³, as a float's bits count up by one there: they are read as floats without conversion.
Zero points are multiplied with the unit's sum.

Eight codes are a word.

The first axis of every tensor is the program's threads, and a program may go on to other rows, as in
`fragments.py`. Without such assembly (interpreted, float32) plain operations compute the same.

The instruction's layout: PTX ISA, "Matrix fragments for mma.m16n8k32".
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.epilogue import normalised
from snugvl.layers.kernels.products.fragments import (
    beside,
    beside_words,
    finish,
    four,
    halved,
    loaded,
    other,
)
from snugvl.layers.kernels.products.gemv import wide_rows
from snugvl.layers.kernels.products.unpack import _assembly

UNITS = tl.constexpr(4)  # of a slice
MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2²³, 0x4b400000
_FROM = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")
# One byte of each of four words, by number: 0x40 the lowest, 0x51 the next.
_BYTES = _assembly("t", "prmt.b32 t, $1, $2, $5;", "prmt.b32 $0, $3, $4, $5;", "prmt.b32 $0, t, $0, 0x5410;")


def _product(words: int) -> Iterator[str]:
    """Two rows times a quarter of a unit: `words` of each row, then the input's registers."""
    yield "mov.b32 z, 0x4b400000;"
    for step in range(words):
        for row in range(2):
            source = f"${4 + row * words + step}"
            yield f"and.b32 a{row}, {source}, 0x0f0f0f0f;"
            yield f"shr.u32 t, {source}, 4;"
            yield f"and.b32 a{row + 2}, t, 0x0f0f0f0f;"
        x = 4 + 2 * words + 2 * step
        yield (
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, "
            f"{{a0, a1, a2, a3}}, {{${x}, ${x + 1}}}, {{{'$0, $1, $2, $3' if step else 'z, z, z, z'}}};"
        )


_PRODUCT_2 = _assembly("a0, a1, a2, a3, t, z", *_product(2))
_PRODUCT_4 = _assembly("a0, a1, a2, a3, t, z", *_product(4))
_TAKES_8, _TAKES_16 = (tl.constexpr(",".join(["=&r"] * 4 + ["r"] * inputs)) for inputs in (8, 16))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _from(v, lane):
    """The value of another lane, by number."""
    return tl.inline_asm_elementwise(_FROM, "=f,f,r", [v, lane], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def apart(v, T: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr):
    """`[T, R, WORDS]` as so many `[T, R]`."""
    if WORDS == 8:
        first, second = tl.split(tl.permute(tl.reshape(v, [T, R, 2, 4]), [0, 1, 3, 2]))
        found = four(first, T, R) + four(second, T, R)
    elif WORDS == 4:
        found = four(v, T, R)
    else:
        found = tl.split(v)
    return found


@triton.jit
def _fixed(v, thread, T: tl.constexpr, UNIT: tl.constexpr):
    """A thread's quarter of a unit of the input `[T, UNIT / 32, 8]` as integers of 15 bits.

    Returns:
        registers of four bytes each, the upper ones for lanes whose column has those, `[T, 1]` each; the sum
        of unit b, and what a sum of its integers is to be multiplied with, `[T, 1]`.
    """
    wide = v.to(tl.float32)
    most = tl.reduce(tl.reduce(tl.abs(wide), 2, _larger), 1, _larger)
    most = _larger(most, other(most, 1))
    most = _larger(most, other(most, 2))
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 14)  # of zeros, too
    power = ((2 * 127 + 13 - exponent) << 23).to(tl.float32, bitcast=True)
    upper = thread // 4 % 2 == 0
    base = tl.where(upper, MAGIC + 128.0, MAGIC)  # so lower bytes have a sign, too
    codes = (wide * power[:, None, None] + base[:, None, None]).to(tl.int32, bitcast=True)
    total = tl.sum(tl.sum(codes, 2), 1) - UNIT // 4 * base.to(tl.int32, bitcast=True)
    total = total.to(tl.float32)
    total += other(total, 1)
    total += other(total, 2)
    inverse = tl.where(exponent == 255, 0x7FC00000, (exponent - 13) << 23).to(tl.float32, bitcast=True)
    byte = tl.where(upper, 0x51, 0x40)[:, None]
    even, odd = tl.split(tl.reshape(codes, [T, UNIT // 32, 4, 2]))
    a, b, c, d = four(even, T, UNIT // 32)
    e, f, g, h = four(odd, T, UNIT // 32)
    packed = tl.join(_packed(a, b, c, d, byte), _packed(e, f, g, h, byte))
    x = apart(tl.reshape(packed, [T, 1, UNIT // 16]), T, 1, UNIT // 16)
    mine = thread % 4 * 8  # a lane that has loaded unit b
    return x, _from(total, mine)[:, None], _from(inverse, mine)[:, None]


@triton.jit
def _packed(a, b, c, d, byte):
    """One byte of each."""
    return tl.inline_asm_elementwise(
        _BYTES, "=&r,r,r,r,r,r", [a, b, c, d, byte], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _plain(v, W: tl.constexpr, UNIT: tl.constexpr):
    """`_fixed` in floats: a thread's quarter of each unit `[32 W, 4, UNIT / 4]`, and no factor."""
    by_unit = tl.sum(tl.reshape(v.to(tl.float32), [W, 4, 2, 4, UNIT // 4]), 2) * 0.5
    by_quarter = tl.permute(by_unit, [0, 2, 1, 3])[:, None, :, :, :]
    x = tl.reshape(tl.broadcast_to(by_quarter, [W, 8, 4, 4, UNIT // 4]), [32 * W, 4, UNIT // 4])
    total = tl.sum(tl.sum(by_unit, 3), 2)[:, None, :]
    return (x,), tl.reshape(tl.broadcast_to(total, [W, 8, 4]), [32 * W, 1]), 1.0


@triton.jit
def two_rows(words, T: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr):
    """`[T, P, WORDS]`: those of each even row, then of each odd one, `[T, P / 2]` each."""
    one, two = tl.split(tl.permute(tl.reshape(words, [T, P // 2, 2, WORDS]), [0, 1, 3, 2]))
    return apart(one, T, P // 2, WORDS) + apart(two, T, P // 2, WORDS)


@triton.jit
def _times(
    words, x, thread, W: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Codes of a thread's rows times its unit's input, `[T, P]`; with assembly, MAGIC more."""
    if not ASSEMBLY:
        return _plain_times(words, x[0], W, P, WORDS)
    text: tl.constexpr = _PRODUCT_4 if WORDS == 4 else _PRODUCT_2
    takes: tl.constexpr = _TAKES_16 if WORDS == 4 else _TAKES_8
    quarter = (thread % 4)[:, None]
    a = tl.zeros([32 * W, P // 2], tl.int32)
    b, c, d = a, a, a
    for unit in tl.static_range(UNITS):
        given = two_rows(words[unit], 32 * W, P, WORDS) + x
        e, f, g, h = tl.inline_asm_elementwise(
            text, takes, given, dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        here = quarter == unit
        a, b = tl.where(here, e, a), tl.where(here, f, b)
        c, d = tl.where(here, g, c), tl.where(here, h, d)
    upper = tl.reshape(tl.join(a, c), [32 * W, P]).to(tl.float32, bitcast=True)
    lower = tl.reshape(tl.join(b, d), [32 * W, P]).to(tl.float32, bitcast=True)
    return (upper - MAGIC) * 256.0 + lower


@triton.jit
def _plain_times(words, x, W: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr):
    part = tl.zeros([32 * W, P, 4], tl.float32)
    number = tl.arange(0, 4)[None, None, :]
    for unit in tl.static_range(UNITS):
        place = tl.arange(0, 8)[None, None, None, :]
        codes = (words[unit][:, :, :, None] >> (4 * place)) & 15
        mine = tl.sum(tl.where(tl.arange(0, 4)[None, :, None] == unit, x, 0.0), 1)
        mine = tl.reshape(mine, [32 * W, 1, WORDS, 8])
        sums = tl.sum(tl.sum(codes.to(tl.float32) * mine, 3), 2)
        part = tl.where(number == unit, sums[:, :, None], part)
    by_unit = tl.sum(tl.reshape(part, [W, 8, 4, P, 4]), 2)  # of the four quarters
    return tl.reshape(tl.permute(by_unit, [0, 1, 3, 2]), [32 * W, P])


@triton.jit
def _slice(
    w, scale, zero, row, thread, s: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """A thread's words of rows `row` `[T, P]` in a warp's slice.

    Returns:
        words of each unit, `[T, P, UNIT / 32]`; scales and zero points of unit b, `[T, P]`.
    """
    units: tl.constexpr = K // UNIT
    words: tl.constexpr = UNIT // 32
    masked: tl.constexpr = (s + 1) * UNITS * W > units
    first = (s * W + thread // 32) * UNITS
    stored = ()
    for unit in tl.static_range(UNITS):
        here = first + unit < units
        at = (first + unit) * (UNIT // 8) + thread % 4 * words
        at = row[:, :, None] * (K // 8) + at[:, None, None] + tl.arange(0, words)[None, None, :]
        stored = stored + (loaded(w, at, here, masked, "evict_first", FLIP),)
    mine = first + thread % 4
    at = row * units + mine[:, None]
    scales = beside_words(scale, at, mine < units, masked, FLIP)
    zeros = beside_words(zero, at, mine < units, masked, FLIP)
    return stored, scales, zeros


@triton.jit
def _rows(
    w, scale, zero, first, N, thread, K: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    SWIGLU: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """`_slice` of `R` rows, for each of a warp's slices."""
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    r = tl.arange(0, R // 8)[None, :] * 8 + (thread % 32 // 4)[:, None]
    row = r % outputs + r // outputs * N
    w += first.to(tl.int64) * (K // 8)
    scale += first.to(tl.int64) * (K // UNIT)
    zero += first.to(tl.int64) * (K // UNIT)
    found = ()
    for s in tl.static_range((K + UNITS * UNIT * W - 1) // (UNITS * UNIT * W)):
        found = found + (_slice(w, scale, zero, row, thread, s, K, UNIT, W, FLIP),)
    return found


@triton.jit
def _columns(
    start, thread, s: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr
):
    """A thread's quarter of its unit of the input, or of the norm's weight, `[T, UNIT / 32, 8]`."""
    unit = (s * W + thread // 32) * UNITS + thread % 32 // 8
    first = unit * UNIT + thread % 4 * (UNIT // 4)
    at = first[:, None, None] + tl.arange(0, UNIT // 32)[None, :, None] * 8
    masked: tl.constexpr = (s + 1) * UNITS * W * UNIT > K
    return loaded(start, at + tl.arange(0, 8)[None, None, :], first < K, masked, "", FLIP)


@triton.jit
def _summed(acc, thread, W: tl.constexpr, P: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Sums of lanes and warps `[T, P]` by row, `[8 P]`."""
    if not ASSEMBLY:
        by_row = tl.permute(tl.reshape(acc, [W, 8, 4, P]), [0, 2, 3, 1])
        y = tl.sum(tl.reshape(by_row, [4 * W, 8 * P]), 0)
    elif P == 2:
        v = halved(acc, thread, 1, 32 * W, 2)
        v += other(v, 2)
        # Two lanes have each row. Warps are added first: Triton would let only half of the lanes write their
        # sums for other warps, the lower half, if these two were added up in the same step.
        by_row = tl.permute(tl.reshape(v, [W, 8, 2, 2]), [0, 2, 3, 1])
        y = tl.sum(tl.reshape(tl.sum(tl.reshape(by_row, [W, 32]), 0), [2, 16]), 0) * 0.5
    else:
        v = halved(halved(acc, thread, 1, 32 * W, 4), thread, 2, 32 * W, 2)
        by_row = tl.permute(tl.reshape(v, [W, 8, 2, 2]), [0, 3, 2, 1])
        y = tl.sum(tl.reshape(by_row, [W, 32]), 0)
    return y


@triton.jit
def _store(
    stored, inputs, thread, bias, residual, out, first, N, kind: tl.constexpr, SLICES: tl.constexpr,
    UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The product of `R` rows, and what comes after it, to `out` from `first` on."""
    shift, added = beside(bias, residual, first, N, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
    acc = tl.zeros([32 * W, R // 8], tl.float32)
    for s in tl.static_range(SLICES):
        words, scale, zero = stored[s]
        x, total, factor = inputs[s]
        part = _times(words, x, thread, W, R // 8, UNIT // 32, ASSEMBLY)
        excess = zero.to(tl.float32) * total + (MAGIC if ASSEMBLY else 0.0)
        acc += (part - excess) * (scale.to(tl.float32) * factor)
    y = _summed(acc, thread, W, R // 8, ASSEMBLY)
    finish(y, shift, added, out, first, kind, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)


@launched
@triton.jit
def lone_codes(
    x, norm, w, scale, zero, bias, residual, out, tail, tail_out, N, eps, K: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, TAIL: tl.constexpr, EACH_TAIL: tl.constexpr, ASSEMBLY: tl.constexpr,
    FLIP: tl.constexpr, SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one of them.

    Args:
        w: int32 words of eight weights; its address and those of `x` and `norm` are divided by 16, or the
            compiler would not give a thread what it must have.
        tail: `[TAIL, K]`, weights in the type of `x`, whose outputs go to `tail_out`: EACH_TAIL of them by
            each of the first programs.
        WIDE: a power of two that holds K.
        UNIT: columns of a group, 64 or 128.
        R: rows of the weights a program reads at a time, 16 or 32; of a SWIGLU, half are gate's.
        ROUNDS: there are fewer programs than R rows make, so each goes on.
        FLIP: in which order the compiler gives the axes of a load to threads.
        SOON: the next kernel may start before this one waits, not when it begins to end.
        PDL: the kernel starts while the one before it ends: see `compiler/launch.py`.
    """
    slices: tl.constexpr = (K + UNITS * UNIT * W - 1) // (UNITS * UNIT * W)
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    kind: tl.constexpr = x.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    if TAIL > 0:
        program -= TAIL // EACH_TAIL
        programs -= TAIL // EACH_TAIL
        if program < 0:
            at = tl.program_id(0) * EACH_TAIL
            wide_rows(x, norm, tail, tail_out, at, eps, K, WIDE, EACH_TAIL, HAS_NORM, OFFSET, PDL)
            return
    thread = tl.arange(0, 32 * W)
    begin = program * outputs
    # The last rows are a whole tile: it computes some outputs again, the same.
    first = tl.minimum(begin, N - outputs)
    stored = _rows(w, scale, zero, first, N, thread, K, UNIT, R, W, SWIGLU, FLIP)
    gains = ()
    for s in tl.static_range(slices if HAS_NORM else 0):  # never written, so asked for early
        gains = gains + (_columns(norm, thread, s, K, UNIT, W, FLIP),)
    if PDL:
        if SOON:
            gdc_launch_dependents()
        gdc_wait()
    values = ()
    square = tl.zeros([32 * W, UNIT // 32, 8], tl.float32)
    for s in tl.static_range(slices):
        values = values + (_columns(x, thread, s, K, UNIT, W, FLIP),)
        if HAS_NORM:
            wide = values[s].to(tl.float32)
            square += wide * wide
    rstd = 1.0
    if HAS_NORM:  # each column is two threads'
        rstd = tl.rsqrt(tl.sum(tl.reshape(square, [8 * W * UNIT]), 0) / (2 * K) + eps)
    inputs = ()
    for s in tl.static_range(slices):
        v = values[s]
        if HAS_NORM:
            v = normalised(v, gains[s], rstd, OFFSET)
        found = _fixed(v, thread, 32 * W, UNIT) if ASSEMBLY else _plain(v, W, UNIT)
        inputs = inputs + (found,)
    if PDL and not SOON:
        gdc_launch_dependents()
    if ROUNDS:
        for at in tl.range(begin, N, programs * outputs, num_stages=1):
            following = at + programs * outputs
            following = tl.minimum(tl.where(following < N, following, at), N - outputs)
            next_stored = _rows(w, scale, zero, following, N, thread, K, UNIT, R, W, SWIGLU, FLIP)
            _store(
                stored, inputs, thread, bias, residual, out, tl.minimum(at, N - outputs), N, kind, slices,
                UNIT, R, W, HAS_BIAS, HAS_RESIDUAL, SWIGLU, ASSEMBLY,
            )  # fmt: skip
            stored = next_stored
    else:
        _store(
            stored, inputs, thread, bias, residual, out, first, N, kind, slices, UNIT, R, W, HAS_BIAS,
            HAS_RESIDUAL, SWIGLU, ASSEMBLY,
        )  # fmt: skip
