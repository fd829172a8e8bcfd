"""int5 and int6 times one row of input, by fragments (`fragments.py`).

A unit is a group of columns: scales and zero points are a thread's own, and of neighbouring bytes, too. Codes
are put under an exponent and read as 128 more; that excess, and the zero point, is multiplied with the unit's
sum, which the matrix unit computes once.

The lower four bits of eight codes are a word, as int4 has them. What is above them is an element of a second
plane in the same order: its two halves are put 16 bits apart, as codes j and j + 4 of a word are, and then
go above the lower bits, two codes at a time.

Integer products, as int4 has them (`lone_codes.py`), made layers of int6 slower on an H200, and were not
measured for int5: it takes longer to put bits of two planes into bytes.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.fragments import (
    PAIRS,
    beside,
    beside_words,
    finish,
    four,
    gains_of,
    in_fours,
    inputs_of,
    loaded,
    mma,
    own_of,
    summed,
    takes,
)
from snugvl.layers.kernels.products.gemv import wide_rows
from snugvl.layers.kernels.products.lone_codes import apart, two_rows
from snugvl.layers.kernels.products.unpack import _assembly


def _steps(words: int, inputs: int) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Instructions: number, pair of words, place in them, the input's two registers."""
    for step in range(2 * words):
        pair, place = step // 4 * 2, step % 4
        first = inputs + 4 * pair + place
        yield step, pair, place, (first, first + 4)


def _product(words: int, bits: int) -> Iterator[str]:
    """Two rows, `words` of each and as many elements of the second plane: codes + 128.

    Of places j and j + 4 of a word at a time, which stand 16 bits apart already.
    """
    high, rows = bits - 4, 2 * words
    mask = 0x00100010 * (2**high - 1)
    yield "mov.f32 z, 0f00000000;"
    yield "mov.b32 t, 0;"
    for word in range(rows):  # the halves of an element, 16 bits apart
        source = f"${4 + rows + word}"
        if bits == 5:
            yield f"mad.lo.u32 h{word}, {source}, 4096, {source};"
        else:
            yield f"prmt.b32 h{word}, {source}, t, 0x4140;"
    for step, pair, place, inputs in _steps(words, 4 + 2 * rows):
        one, two = pair, words + pair
        for register, word in enumerate((one, two, one + 1, two + 1)):
            if place:
                yield f"shr.u32 t, ${4 + word}, {4 * place};"
            source = "t" if place else f"${4 + word}"
            yield f"lop3.b32 a{register}, {source}, 0x000f000f, 0x43004300, 0xea;"
            left = 4 - high * place
            yield f"{'shl.b32' if left >= 0 else 'shr.u32'} t, h{word}, {abs(left)};"
            yield f"lop3.b32 a{register}, t, 0x{mask:08x}, a{register}, 0xea;"
        yield mma("a0, a1, a2, a3", inputs, "$0, $1, $2, $3" if step else "z, z, z, z")


def _sum(words: int) -> Iterator[str]:
    """Ones times the input."""
    yield "mov.f32 z, 0f00000000;"
    yield from (f"mov.b32 a{register}, 0x3f803f80;" for register in range(4))
    for step, _, _, inputs in _steps(words, 4):
        yield mma("a0, a1, a2, a3", inputs, "$0, $1, $2, $3" if step else "z, z, z, z")


_INT5_2 = _assembly("a0, a1, a2, a3, t, h<4>", ".reg .f32 z;", *_product(2, 5))
_INT5_4 = _assembly("a0, a1, a2, a3, t, h<8>", ".reg .f32 z;", *_product(4, 5))
_INT6_2 = _assembly("a0, a1, a2, a3, t, h<4>", ".reg .f32 z;", *_product(2, 6))
_INT6_4 = _assembly("a0, a1, a2, a3, t, h<8>", ".reg .f32 z;", *_product(4, 6))
_SUM_2 = _assembly("a0, a1, a2, a3", ".reg .f32 z;", *_sum(2))
_SUM_4 = _assembly("a0, a1, a2, a3", ".reg .f32 z;", *_sum(4))
_TAKES_8, _TAKES_16, _TAKES_32 = takes(8), takes(16), takes(32)


@triton.jit
def _operand(v, T: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A thread's values `[T, WORDS, 8]` by word: places j and j + 4 as a register, four `[T, 1]` each."""
    if not ASSEMBLY:
        return v, v
    low, high = tl.split(tl.permute(tl.reshape(v, [T, WORDS, 2, 4]), [0, 1, 3, 2]))
    both = tl.inline_asm_elementwise(PAIRS, "=&r,=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=2)
    by_word = apart(tl.permute(both, [0, 2, 1]), T, 4, WORDS)  # [T, 4] each
    found = ()
    for word in tl.static_range(WORDS):
        a, b, c, d = four(tl.reshape(by_word[word], [T, 1, 4]), T, 1)
        found = found + (a, b, c, d)
    return found


@triton.jit
def _times(
    words, upper, x, odd, T: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Codes (with assembly plus 128) times the input, `[T, R]`; right where b is a / 2."""
    if not ASSEMBLY:
        place = tl.arange(0, 8)[None, None, None, :]
        codes = (words[:, :, :, None] >> (4 * place)) & 15
        above = (upper.to(tl.int32)[:, :, :, None] >> ((BITS - 4) * place)) & ((1 << (BITS - 4)) - 1)
        codes |= above << 4
        product = codes.to(tl.float32) * x[0].to(tl.float32)[:, None, :, :]
        return in_fours(tl.sum(tl.sum(product, 3), 2), T, R)
    given = two_rows(words, T, R, WORDS) + two_rows(upper.to(tl.int32), T, R, WORDS) + x
    two: tl.constexpr = _INT5_2 if BITS == 5 else _INT6_2
    long: tl.constexpr = _INT5_4 if BITS == 5 else _INT6_4
    text: tl.constexpr = long if WORDS == 4 else two
    taken: tl.constexpr = _TAKES_32 if WORDS == 4 else _TAKES_16
    a, b, c, d = tl.inline_asm_elementwise(text, taken, given, dtype=(tl.float32,) * 4, is_pure=True, pack=1)
    return own_of(a, b, c, d, odd, T, R // 2)


@triton.jit
def _total(x, odd, T: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The unit's sum, `[T, 1]`."""
    if not ASSEMBLY:
        return in_fours(tl.sum(tl.sum(x[0].to(tl.float32), 2), 1)[:, None], T, 1)
    text: tl.constexpr = _SUM_4 if WORDS == 4 else _SUM_2
    taken: tl.constexpr = _TAKES_16 if WORDS == 4 else _TAKES_8
    a, b, _, _ = tl.inline_asm_elementwise(text, taken, x, dtype=(tl.float32,) * 4, is_pure=True, pack=1)
    return tl.where(odd, b, a)


@triton.jit
def _slice(
    w, upper, scale, zero, row, thread, s: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """Words, and with them the second plane, `[T, R, UNIT / 32]`, scales and zero points `[T, R]`.

    Of rows `row` `[1, R]` in a warp's slice.
    """
    groups: tl.constexpr = K // UNIT
    masked: tl.constexpr = (s + 1) * 8 * W > groups
    place = s * (32 * W) + thread
    here = place // 4 < groups
    word = (place * (UNIT // 32))[:, None, None] + tl.arange(0, UNIT // 32)[None, None, :]
    word += row[:, :, None] * (K // 8)
    words = loaded(w, word, here, masked, "evict_first", FLIP)
    high = loaded(upper, word, here, masked, "evict_first", FLIP)
    at = row * groups + (place // 4)[:, None]
    scales, zeros = beside_words(scale, at, here, masked, FLIP), beside_words(zero, at, here, masked, FLIP)
    return words, high, scales, zeros


@triton.jit
def _rows(
    w, upper, scale, zero, first, N, thread, K: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, SWIGLU: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Words, second plane, scales and zero points of `R` rows, of each of a warp's slices."""
    groups: tl.constexpr = K // UNIT
    slices: tl.constexpr = (groups + 8 * W - 1) // (8 * W)
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    r = tl.arange(0, R)[None, :]
    row = r % outputs + r // outputs * N
    w += first.to(tl.int64) * (K // 8)
    upper += first.to(tl.int64) * (K // 8)
    scale += first.to(tl.int64) * groups
    zero += first.to(tl.int64) * groups
    found = ()
    for s in tl.static_range(slices):
        found = found + (_slice(w, upper, scale, zero, row, thread, s, K, UNIT, W, FLIP),)
    return found


@triton.jit
def _store(
    stored, inputs, odd, thread, bias, residual, out, first, N, kind: tl.constexpr, SLICES: tl.constexpr,
    UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The product of `R` rows, and what comes after it, to `out` from `first` on."""
    threads: tl.constexpr = 32 * W
    shift, added = beside(bias, residual, first, N, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
    acc = tl.zeros([threads, R], tl.float32)
    for s in tl.static_range(SLICES):
        words, upper, scale, zero = stored[s]
        x, total = inputs[s]
        part = _times(words, upper, x, odd, threads, R, UNIT // 32, BITS, ASSEMBLY)
        zero = zero.to(tl.float32) + (128.0 if ASSEMBLY else 0.0)
        acc += (part - zero * total) * scale.to(tl.float32)
    y = summed(acc, thread, threads, R, ASSEMBLY)
    finish(y, shift, added, out, first, kind, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)


@launched
@triton.jit
def lone_planes(
    x, norm, w, upper, scale, zero, bias, residual, out, tail, tail_out, N, eps, K: tl.constexpr,
    WIDE: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, TAIL: tl.constexpr, EACH_TAIL: tl.constexpr,
    ASSEMBLY: tl.constexpr, FLIP: tl.constexpr, SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one of them.

    Args:
        w: int32 words of eight weights' lower bits; 16 divides its address and those of `x` and `norm`.
        upper: as many elements of 8 or 16 bits.
        R: rows of the weights a program reads at a time, 4, 8 or 16; of a SWIGLU, half are gate's.
        tail, WIDE, UNIT, ROUNDS, FLIP, SOON, PDL: as `lone_codes` has them.
    """
    slices: tl.constexpr = (K // UNIT + 8 * W - 1) // (8 * W)
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
    odd = (thread // 4 % 2 == 1)[:, None]
    begin = program * outputs
    # The last rows are a whole tile: it computes some outputs again, the same.
    first = tl.minimum(begin, N - outputs)
    stored = _rows(w, upper, scale, zero, first, N, thread, K, UNIT, R, W, SWIGLU, FLIP)
    gains = gains_of(norm, thread, K, UNIT, W, HAS_NORM, FLIP)
    if PDL:
        if SOON:
            gdc_launch_dependents()
        gdc_wait()
    values = inputs_of(x, gains, thread, eps, K, UNIT, W, HAS_NORM, OFFSET, FLIP)
    inputs = ()
    for s in tl.static_range(slices):
        v = _operand(values[s], 32 * W, UNIT // 32, ASSEMBLY)
        inputs = inputs + ((v, _total(v, odd, 32 * W, UNIT // 32, ASSEMBLY)),)
    if PDL and not SOON:
        gdc_launch_dependents()
    if ROUNDS:
        for at in tl.range(begin, N, programs * outputs, num_stages=1):
            following = at + programs * outputs
            following = tl.minimum(tl.where(following < N, following, at), N - outputs)
            next_stored = _rows(w, upper, scale, zero, following, N, thread, K, UNIT, R, W, SWIGLU, FLIP)
            _store(
                stored, inputs, odd, thread, bias, residual, out, tl.minimum(at, N - outputs), N, kind,
                slices, UNIT, R, W, HAS_BIAS, HAS_RESIDUAL, SWIGLU, BITS, ASSEMBLY,
            )  # fmt: skip
            stored = next_stored
    else:
        _store(
            stored, inputs, odd, thread, bias, residual, out, first, N, kind, slices, UNIT, R, W, HAS_BIAS,
            HAS_RESIDUAL, SWIGLU, BITS, ASSEMBLY,
        )  # fmt: skip
