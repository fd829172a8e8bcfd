"""A GGUF's blocks times one row of input, on the matrix unit (`fragments.py`) where that multiplies bf16.

A warp multiplies 256 columns of 16 rows at once. Lane 4 a + b loads, of rows a and a + 8, two groups of 32
columns as they are stored: groups b and 4 + b of the eight, of Q8_0 groups 2 b and 2 b + 1. So a load of a
warp is neighbouring bytes of each of eight rows.

The instruction adds up four lanes' columns; here they are of four groups, whose scales differ. So the input
stands in those lanes 4 n + b alone for which b is n / 2, and is 0 in the others: column 2 b of the product is
what lane b's first group gives, column 2 b + 1 what its second one does, and lane b is given both. Each group
is multiplied apart; what it makes of the other one's input is in the other column, which is not read. Q6_K
has a scale for 16 columns: columns 2 b and 2 b + 1 of the product are the halves of a group of 32.

Codes are put under an exponent and read as 128 more; what that is too much, and the addends, are multiplied
by the group's sum, which the matrix unit computes, too. int8 is read as its seven bits, then as its sign.

Input of another type, and GPUs before Ampere, have `few_rows` of `ggml.py` for one row, too.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.epilogue import normalised, rms_factor
from snugvl.layers.kernels.products.fragments import PAIRS, beside, finish, mma, takes
from snugvl.layers.kernels.products.ggml_blocks import Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, number
from snugvl.layers.kernels.products.unpack import _assembly

SLICES = tl.constexpr(4)  # of a warp up to which all of a row are loaded at once


def _high(kind: str, register: str, high: str, word: int, place: int) -> Iterator[str]:
    """The high bits of places `place` and `place + 4` of a word, above the low ones in `register`."""
    each = 1 if kind == "Q5_K" else 2
    if place == 0 and each == 1:  # bits of places 0 and 4 at 0 and 16, of the next at 1 and 17
        yield f"prmt.b32 y{register}, {high}, 0, 0x444{word};"
        yield f"mul.lo.u32 y{register}, y{register}, 4097;"
    elif place == 0:
        yield f"prmt.b32 y{register}, {high}, 0, 0x4{2 * word + 1}4{2 * word};"
    up = 4 - each * place
    yield f"{'shl.b32' if up >= 0 else 'shr.u32'} t, y{register}, {abs(up)};"
    mask = ((1 << each) - 1) << 4
    yield f"lop3.b32 a{register}, t, {mask << 16 | mask:#x}, a{register}, 0xea;"


def _nibbles(kind: str, words: int) -> Iterator[str]:
    """Two rows, `words` of each, then the words of high bits, times the input."""
    highs = 0 if kind == "Q4_K" else 1
    first = 4 + 2 * words + 2 * highs
    yield "mov.f32 z, 0f00000000;"
    for step in range(2 * words):
        pair, place = step // 4 * 2, step % 4
        for register, (row, word) in enumerate(((0, pair), (1, pair), (0, pair + 1), (1, pair + 1))):
            source = f"${4 + row * words + word}"
            if place:
                yield f"shr.u32 t, {source}, {4 * place};"
            yield f"lop3.b32 a{register}, {'t' if place else source}, 0x000f000f, 0x43004300, 0xea;"
            if highs:
                yield from _high(kind, str(register), f"${4 + 2 * words + row}", word, place)
        before = "$0, $1, $2, $3" if step else "z, z, z, z"
        yield mma("a0, a1, a2, a3", (first + 4 * pair + place, first + 4 * pair + place + 4), before)


def _bytes() -> Iterator[str]:
    """Two rows, eight words of each, times the input: 128 + seven bits, then −128 or, of negatives, −256."""
    yield "mov.f32 z, 0f00000000;"
    for word in range(8):
        sources = [f"${4 + word}", f"${12 + word}", "t", "u"]
        yield f"shr.u32 t, ${4 + word}, 8;"
        yield f"shr.u32 u, ${12 + word}, 8;"
        for mask, exponent in (("0x007f007f", "0x43004300"), ("0x00800080", "0xc300c300")):
            for register, source in enumerate(sources):
                yield f"lop3.b32 a{register}, {source}, {mask}, {exponent}, 0xea;"
            first = word == 0 and mask.startswith("0x007f")
            before = "z, z, z, z" if first else "$0, $1, $2, $3"
            yield mma("a0, a1, a2, a3", (20 + 2 * word, 21 + 2 * word), before)


def _sum(words: int) -> Iterator[str]:
    """Ones times the input."""
    yield "mov.f32 z, 0f00000000;"
    yield from (f"mov.b32 a{register}, 0x3f803f80;" for register in range(4))
    for step in range(2 * words):
        first = 4 + step // 4 * 8 + step % 4
        yield mma("a0, a1, a2, a3", (first, first + 4), "$0, $1, $2, $3" if step else "z, z, z, z")


def _text(lines: Iterator[str]) -> tl.constexpr:
    return _assembly("a0, a1, a2, a3, y0, y1, y2, y3, t, u", ".reg .f32 z;", *lines)


_PRODUCT_4, _PRODUCT_5, _PRODUCT_6 = (
    _text(_nibbles(*kind)) for kind in (("Q4_K", 4), ("Q5_K", 4), ("Q6_K", 2))
)
_PRODUCT_8, _SUM_4, _SUM_2 = _text(_bytes()), _text(_sum(4)), _text(_sum(2))
_TAKES_8, _TAKES_14, _TAKES_16, _TAKES_24, _TAKES_26, _TAKES_32 = map(takes, (8, 14, 16, 24, 26, 32))


@triton.jit
def _quarters(v, T: tl.constexpr):
    """`[T, 4]` as four `[T]`."""
    even, odd = tl.split(tl.reshape(v, [T, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _some(start, at, here, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """`start[at …]`, `[T, COUNT]`, or `[T]` of one: what is a thread's is loaded by it, at once."""
    if COUNT > 1:
        at = at[:, None] + tl.arange(0, COUNT)[None, :]
        here = here[:, None]
    if MASKED:
        return tl.load(start + at, mask=here, other=0, eviction_policy="evict_first")
    return tl.load(start + at, eviction_policy="evict_first")


@triton.jit
def _group(block, b, P: tl.constexpr, TYPE: tl.constexpr):
    """Which group of 32 columns is a lane's first or, with P, its second one."""
    return block * 8 + (2 * b + P if TYPE == Q8_0 else 4 * P + b)


@triton.jit
def _codes(w, count, row, group, K: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """A row's codes of one group for each thread, as they are stored: low bits, then high ones."""
    here = group < K // 32
    words = w.to(tl.pointer_type(tl.int32))
    if TYPE == Q8_0:
        at = row * (K // 4) + group * 8
        found = (_some(words, at, here, 4, MASKED), _some(words, at + 4, here, 4, MASKED))
    else:
        found = (_some(words, row * (K // 8) + group * 4, here, 4, MASKED),)
        upper = (w + count * (K // 2)).to(tl.pointer_type(tl.int32))
        if TYPE == Q5_K:
            found = found + (_some(upper, row * (K // 32) + group, here, 1, MASKED),)
        elif TYPE == Q6_K:
            found = found + (_some(upper, row * (K // 16) + group * 2, here, 2, MASKED),)
    return found


@triton.jit
def _scales(w, count, row, block, b, K: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """Stored scales of a thread's two groups, from which factors and addends are made."""
    one, two = _group(block, b, 0, TYPE), _group(block, b, 1, TYPE)
    here = block < K // 256
    if TYPE == Q4_K or TYPE == Q5_K:  # noqa: SIM109 (the compiler knows no `in`)
        plane = w + count * (K // 2 if TYPE == Q4_K else K // 8 * 5)
        at = row * (K // 256) + block
        halves = (plane + count * (K // 256 * 12)).to(tl.pointer_type(tl.float16))
        low = _some(plane, at * 12 + b, here, 1, MASKED)
        middle = _some(plane, at * 12 + 4 + b, here, 1, MASKED)
        rest = _some(plane, at * 12 + 8 + b, here, 1, MASKED)
        found = (low, middle, rest, _some(halves, at * 2, here, 2, MASKED))
    elif TYPE == Q6_K:
        plane = w + count * (K // 4 * 3)
        scale = plane.to(tl.pointer_type(tl.int8))
        halves = (plane + count * (K // 16)).to(tl.pointer_type(tl.float16))
        at = row * (K // 16)
        first, second = (
            _some(scale, at + 2 * one, here, 2, MASKED),
            _some(scale, at + 2 * two, here, 2, MASKED),
        )
        found = (first, second, _some(halves, row * (K // 256) + block, here, 1, MASKED))
    else:
        halves = (w + count * (K if TYPE == Q8_0 else K // 2)).to(tl.pointer_type(tl.float16))
        each: tl.constexpr = 2 if TYPE == Q4_1 else 1
        at = row * (K // 32)
        first = _some(halves, (at + one) * each, one < K // 32, each, MASKED)
        found = (first, _some(halves, (at + two) * each, two < K // 32, each, MASKED))
    return found


@triton.jit
def _factors(stored, P: tl.constexpr, TYPE: tl.constexpr):
    """Factor and addend of a thread's first or second group, `[T]` float32; of Q6_K both its factors."""
    if TYPE == Q4_K or TYPE == Q5_K:  # noqa: SIM109
        low, middle, rest = stored[0].to(tl.int32), stored[1].to(tl.int32), stored[2].to(tl.int32)
        d, least = tl.split(stored[3])
        if P == 0:
            scale, minimum = low & 63, middle & 63
        else:
            scale, minimum = (rest & 15) | ((low >> 2) & 48), (rest >> 4) | ((middle >> 2) & 48)
        a, b = d.to(tl.float32) * number(scale), -least.to(tl.float32) * number(minimum)
    elif TYPE == Q6_K:
        first, second = tl.split(stored[P])
        d = stored[2].to(tl.float32)
        a, b = d * first.to(tl.float32), d * second.to(tl.float32)
    elif TYPE == Q4_1:
        d, least = tl.split(stored[P])
        a, b = d.to(tl.float32), least.to(tl.float32)
    else:
        a = stored[P].to(tl.float32)
        b = a
    return a, b


@triton.jit
def _slice(
    w, count, first, N, slice_, thread, K: tl.constexpr, TYPE: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    SWIGLU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Codes of a thread's two groups in a slice of a warp, and their scales, of each of its `R / 8` rows."""
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    block, a, b = slice_ * W + thread // 32, thread // 4 % 8, thread % 4
    found = ()
    for k in tl.static_range(R // 8):
        row = a + (first + (8 * k % outputs) + (8 * k // outputs) * N)
        one = _codes(w, count, row, _group(block, b, 0, TYPE), K, TYPE, MASKED)
        two = _codes(w, count, row, _group(block, b, 1, TYPE), K, TYPE, MASKED)
        found = found + ((one, two, _scales(w, count, row, block, b, K, TYPE, MASKED)),)
    return found


@triton.jit
def _rows(
    w, count, first, N, thread, SLICES: tl.constexpr, K: tl.constexpr, TYPE: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """The first `SLICES` slices: see `_slice`."""
    found = ()
    for s in tl.static_range(SLICES):
        found = found + (_slice(w, count, first, N, s, thread, K, TYPE, R, W, SWIGLU, (s + 1) * 256 * W > K),)
    return found


@triton.jit
def _values(
    start, slice_, thread, K: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr
):
    """The input, or the norm's weight, of a slice: four `[T, 8]`."""
    block, n, b = slice_ * W + thread // 32, thread // 4 % 8, thread % 4
    found = ()
    for c in tl.static_range(4):
        if TYPE == Q6_K:
            column = _group(block, b, c // 2, TYPE) * 32 + n % 2 * 16 + c % 2 * 8
        else:
            column = (_group(block, b, 0, TYPE) + n % 2 * (1 if TYPE == Q8_0 else 4)) * 32 + c * 8
        mine = n // 2 == b
        if MASKED:
            mine = mine & (column < K)
        at = column[:, None] + tl.arange(0, 8)[None, :]
        found = found + (tl.load(start + at, mask=mine[:, None], other=0),)
    return found


@triton.jit
def _input(
    x, gains, rstd, slice_, thread, K: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The input of a slice, normalised, in 16 registers, and the sums of a thread's groups.

    A register has codes' places j and j + 4, of int8 j and j + 2.
    """
    threads: tl.constexpr = 32 * W
    values = _values(x, slice_, thread, K, TYPE, W, MASKED)
    found = ()
    for c in tl.static_range(4):
        v = values[c]
        if HAS_NORM:
            v = normalised(v, gains[c], rstd, OFFSET)
        if TYPE == Q8_0:
            low, high = tl.split(tl.permute(tl.reshape(v, [threads, 2, 2, 2]), [0, 1, 3, 2]))
        else:
            low, high = tl.split(tl.permute(tl.reshape(v, [threads, 2, 4]), [0, 2, 1]))
        both = tl.inline_asm_elementwise(
            PAIRS, "=&r,=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=2
        )
        found = found + _quarters(tl.reshape(both, [threads, 4]), threads)
    if TYPE == Q8_0:
        totals = ()  # it needs none
    elif TYPE == Q6_K:
        totals = _asm(_SUM_2, _TAKES_8, found[:8])[:2] + _asm(_SUM_2, _TAKES_8, found[8:])[:2]
    else:
        totals = _asm(_SUM_4, _TAKES_16, found)[:2]
    return found, totals


@triton.jit
def _asm(TEXT: tl.constexpr, TAKES: tl.constexpr, given):
    return tl.inline_asm_elementwise(TEXT, TAKES, given, dtype=(tl.float32,) * 4, is_pure=True, pack=1)


@triton.jit
def _times(one, two, x, P: tl.constexpr, T: tl.constexpr, TYPE: tl.constexpr):
    """Codes plus 128 of two rows' first or second groups times the input; of Q6_K halves of a group apart."""
    if TYPE == Q6_K:
        a, b = _quarters(one[0], T), _quarters(two[0], T)
        i, j = tl.split(one[1])
        k, m = tl.split(two[1])
        own: tl.constexpr = 8 * P
        c = _asm(_PRODUCT_6, _TAKES_14, a[:2] + b[:2] + (i, k) + x[own : own + 8])
        d = _asm(_PRODUCT_6, _TAKES_14, a[2:] + b[2:] + (j, m) + x[own : own + 8])
        first, second = (c[0], d[1]), (c[2], d[3])
    else:
        a, b = _quarters(one[0], T), _quarters(two[0], T)
        if TYPE == Q8_0:
            given = a + _quarters(one[1], T) + b + _quarters(two[1], T) + x
            c = _asm(_PRODUCT_8, _TAKES_32, given)
        elif TYPE == Q5_K:
            c = _asm(_PRODUCT_5, _TAKES_26, a + b + (one[1], two[1]) + x)
        else:
            c = _asm(_PRODUCT_4, _TAKES_24, a + b + x)
        first, second = (c[P],), (c[2 + P],)
    return first, second


@triton.jit
def _scaled(acc, parts, scales, totals, P: tl.constexpr, TYPE: tl.constexpr):
    """`acc` and the products of one row's first or second groups, scaled."""
    over: tl.constexpr = 160.0 if TYPE == Q6_K else 136.0 if TYPE == Q4_0 else 128.0
    a, b = _factors(scales, P, TYPE)
    if TYPE == Q6_K:
        acc += a * (parts[0] - over * totals[2 * P]) + b * (parts[1] - over * totals[2 * P + 1])
    elif TYPE == Q8_0:
        acc += a * parts[0]
    else:
        acc += a * (parts[0] - over * totals[P])
        if TYPE != Q4_0:
            acc += b * totals[P]
    return acc


@triton.jit
def _add(sums, stored, inputs, T: tl.constexpr, TYPE: tl.constexpr, R: tl.constexpr):
    """`sums`, `[T]` of each of a thread's rows, and what a slice adds."""
    x, totals = inputs
    found = ()
    for k in tl.static_range(0, R // 8, 2):
        one, two = sums[k], sums[k + 1]
        for p in tl.static_range(2):
            first, second = _times(stored[k][p], stored[k + 1][p], x, p, T, TYPE)
            one = _scaled(one, first, stored[k][2], totals, p, TYPE)
            two = _scaled(two, second, stored[k + 1][2], totals, p, TYPE)
        found = found + (one, two)
    return found


@triton.jit
def _zeros(T: tl.constexpr, R: tl.constexpr):
    found = ()
    for _ in tl.static_range(R // 8):
        found = found + (tl.zeros([T], tl.float32),)
    return found


@triton.jit
def _store(
    sums, bias, residual, out, first, N, kind: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """The sums of all threads, and what comes after the product, to `out` from `first` on."""
    shift, added = beside(bias, residual, first, N, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
    if R == 16:
        v = tl.join(sums[0], sums[1])
    else:
        v = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    v = tl.sum(tl.sum(tl.reshape(v, [W, 8, 4, R // 8]), 2), 0)
    y = tl.reshape(tl.permute(v, [1, 0]), [R])
    finish(y, shift, added, out, first, kind, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)


@launched
@triton.jit
def lone_ggml(
    x, norm, w, bias, residual, out, count, N, eps, K: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]` of `count` rows; with SWIGLU the first half are gates, and `N` counts one half.

    Args:
        w: the planes of the rows, bytes.
        WIDE: a power of two that holds K.
        R: rows of the weights of a program, 16 or 32; of a SWIGLU, half are gate's.
        W: warps, which have 256 columns each in turns.
        SOON, PDL: as `lone_codes` has them.
    """
    slices: tl.constexpr = (K + 256 * W - 1) // (256 * W)
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    threads: tl.constexpr = 32 * W
    kind: tl.constexpr = x.dtype.element_ty
    thread = tl.arange(0, threads)
    count = count.to(tl.int64)
    # The last rows are a whole tile: it computes some outputs again, the same.
    first = tl.minimum(tl.program_id(0) * outputs, N - outputs).to(tl.int64)
    at_once: tl.constexpr = 1 if slices > SLICES else slices
    stored = _rows(w, count, first, N, thread, at_once, K, TYPE, R, W, SWIGLU)
    gains = ()
    for s in tl.static_range(at_once):
        gains = gains + (_values(norm, s, thread, K, TYPE, W, s == slices - 1) if HAS_NORM else (),)
    if PDL:
        if SOON:
            gdc_launch_dependents()
        gdc_wait()
    rstd = rms_factor(x, eps, K, WIDE) if HAS_NORM else 1.0
    sums = _zeros(threads, R)
    if slices > SLICES:
        for s in tl.range(slices, num_stages=1):
            following = _slice(w, count, first, N, s + 1, thread, K, TYPE, R, W, SWIGLU, True)
            gain = _values(norm, s, thread, K, TYPE, W, True) if HAS_NORM else ()
            v = _input(x, gain, rstd, s, thread, K, TYPE, W, HAS_NORM, OFFSET, True)
            sums = _add(sums, stored[0], v, threads, TYPE, R)
            stored = (following,)
    else:
        inputs = ()
        for s in tl.static_range(slices):
            v = _input(x, gains[s], rstd, s, thread, K, TYPE, W, HAS_NORM, OFFSET, s == slices - 1)
            inputs = inputs + (v,)
    if PDL and not SOON:
        gdc_launch_dependents()
    if slices <= SLICES:
        for s in tl.static_range(slices):
            sums = _add(sums, stored[s], inputs[s], threads, TYPE, R)
    _store(sums, bias, residual, out, first, N, kind, R, W, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
