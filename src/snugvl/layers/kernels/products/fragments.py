"""int4 times one row of input: the matrix unit's fragments said thread by thread.

The sums are `lone.py`'s: eight units of a group's columns stand as eight rows of the weights, the same eight
units of the input as its 8 columns, and the product of a unit with itself is what is wanted. But the compiler
is left no layout to choose, and so nothing to move in a loop: the first axis of every tensor is the program's
threads, and the instruction is assembly. Lane 4 a + b of a warp

    loads         of each row its share of unit a, 16 bytes where a group has 128 columns: a warp's load is
                  neighbouring bytes of one row, and of scales and zero points
    multiplies    two rows with unit a of the input, which it normalised before the first of them
    is given      the product of unit a with units 2 b and 2 b + 1; with itself where b is a / 2

    a program     R rows; its W warps have a slice of eight units each in turns, and their sums are added up
    in rounds     it goes on to other rows with the same input; the next ones' loads are under way meanwhile

Before anybody's input is there all loads of the first rows are under way: nobody writes weights. So a kernel
that is started SOON, before the one before it has begun to end, costs less than the time between two.

Without such assembly (interpreted, float32) plain operations compute the same.

The instruction's layout: PTX ISA, "Matrix fragments for mma.m16n8k16".
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products.epilogue import add_residual, normalised, swiglu
from snugvl.layers.kernels.products.gemv import wide_rows
from snugvl.layers.kernels.products.unpack import _assembly


def _multiply(step: int, first: int, second: int) -> str:
    """One instruction; registers of the input by number."""
    before = "$0, $1, $2, $3" if step else "z, z, z, z"
    return (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, "
        f"{{${first}, ${second}}}, {{{before}}};"
    )


def _steps(words: int, inputs: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each instruction: number, pair of words, place in them, the input's two registers."""
    for step in range(2 * words):
        pair, place = step // 4 * 2, step % 4
        first = inputs + 4 * pair + place
        yield step, pair, place, first, first + 4


def _product(words: int) -> Iterator[str]:
    """Two rows, `words` of each: codes + 128, of places j and j + 4 of a word, which stand so already."""
    yield "mov.f32 z, 0f00000000;"
    for step, pair, place, *inputs in _steps(words, 4 + 2 * words):
        one, two = 4 + pair, 4 + words + pair
        for register, word in enumerate((one, two, one + 1, two + 1)):
            if place:
                yield f"shr.u32 t, ${word}, {4 * place};"
            source = "t" if place else f"${word}"
            yield f"lop3.b32 a{register}, {source}, 0x000f000f, 0x43004300, 0xea;"
        yield _multiply(step, *inputs)


def _sum(words: int) -> Iterator[str]:
    """Ones times the input."""
    yield "mov.f32 z, 0f00000000;"
    yield from (f"mov.b32 a{register}, 0x3f803f80;" for register in range(4))
    for step, _, _, *inputs in _steps(words, 4):
        yield _multiply(step, *inputs)


def _takes(registers: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=&f"] * 4 + ["r"] * registers))


_PRODUCT_2 = _assembly("a0, a1, a2, a3, t", ".reg .f32 z;", *_product(2))
_PRODUCT_4 = _assembly("a0, a1, a2, a3, t", ".reg .f32 z;", *_product(4))
_SUM_2 = _assembly("a0, a1, a2, a3", ".reg .f32 z;", *_sum(2))
_SUM_4 = _assembly("a0, a1, a2, a3", ".reg .f32 z;", *_sum(4))
_TAKES_8, _TAKES_12, _TAKES_16, _TAKES_24 = _takes(8), _takes(12), _takes(16), _takes(24)
_PAIRS = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
_OTHER = tl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")


@triton.jit
def _four(v, T: tl.constexpr, R: tl.constexpr):
    """`[T, R, 4]` as four `[T, R]`."""
    even, odd = tl.split(tl.reshape(v, [T, R, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _words(v, T: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr):
    """`[T, R, WORDS]` as so many `[T, R]`."""
    if WORDS == 4:  # noqa: SIM108 (both sides of a ternary would need one type)
        found = _four(v, T, R)
    else:
        found = tl.split(v)
    return found


@triton.jit
def _operand(v, T: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A thread's values `[T, WORDS, 8]` by word: places j and j + 4 as a register, four `[T, 1]` each."""
    if not ASSEMBLY:
        return v, v
    low, high = tl.split(tl.permute(tl.reshape(v, [T, WORDS, 2, 4]), [0, 1, 3, 2]))
    both = tl.inline_asm_elementwise(_PAIRS, "=&r,=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=2)
    by_word = _words(tl.permute(both, [0, 2, 1]), T, 4, WORDS)  # [T, 4] each
    found = ()
    for word in tl.static_range(WORDS):
        a, b, c, d = _four(tl.reshape(by_word[word], [T, 1, 4]), T, 1)
        found = found + (a, b, c, d)
    return found


@triton.jit
def _own(a, b, c, d, odd, T: tl.constexpr, PAIRS: tl.constexpr):
    """Of both rows' products the one with unit a, where it is among them: `[T, 2 PAIRS]`."""
    both = tl.join(tl.where(odd, b, a), tl.where(odd, d, c))
    return tl.reshape(both, [T, 2 * PAIRS])


@triton.jit
def _in_fours(v, T: tl.constexpr, R: tl.constexpr):
    """Sums of four threads' `[T, R]`, for each of them."""
    total = tl.sum(tl.reshape(v, [T // 4, 4, R]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], [T // 4, 4, R]), [T, R])


@triton.jit
def _times(words, x, odd, T: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Codes (with assembly plus 128) times the input, `[T, R]`; right where b is a / 2."""
    if not ASSEMBLY:
        codes = (words[:, :, :, None] >> (4 * tl.arange(0, 8))[None, None, None, :]) & 15
        product = codes.to(tl.float32) * x[0].to(tl.float32)[:, None, :, :]
        return _in_fours(tl.sum(tl.sum(product, 3), 2), T, R)
    one, two = tl.split(tl.permute(tl.reshape(words, [T, R // 2, 2, WORDS]), [0, 1, 3, 2]))
    given = _words(one, T, R // 2, WORDS) + _words(two, T, R // 2, WORDS) + x
    if WORDS == 4:
        a, b, c, d = tl.inline_asm_elementwise(
            _PRODUCT_4, _TAKES_24, given, dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _PRODUCT_2, _TAKES_12, given, dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    return _own(a, b, c, d, odd, T, R // 2)


@triton.jit
def _total(x, odd, T: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The unit's sum, `[T, 1]`."""
    if not ASSEMBLY:
        return _in_fours(tl.sum(tl.sum(x[0].to(tl.float32), 2), 1)[:, None], T, 1)
    if WORDS == 4:
        a, b, _, _ = tl.inline_asm_elementwise(
            _SUM_4, _TAKES_16, x, dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    else:
        a, b, _, _ = tl.inline_asm_elementwise(
            _SUM_2, _TAKES_8, x, dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    return tl.where(odd, b, a)


@triton.jit
def _loaded(start, at, here, MASKED: tl.constexpr, EVICTION: tl.constexpr, FLIP: tl.constexpr):
    """`start[at]` `[T, n, side by side]`: threads go along the first axis, and FLIPped along the second."""
    if FLIP:
        at = tl.permute(at, [1, 0, 2])
        here = here[None, :, None]
    else:
        here = here[:, None, None]
    if MASKED:
        v = tl.load(start + at, mask=tl.broadcast_to(here, at.shape), other=0, eviction_policy=EVICTION)
    else:
        v = tl.load(start + at, eviction_policy=EVICTION)
    if FLIP:
        v = tl.permute(v, [1, 0, 2])
    return v


@triton.jit
def _columns(
    start, thread, s: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr
):
    """A thread's values of the input or of the norm's weight in a warp's slice, `[T, UNIT / 32, 8]`."""
    place = s * (32 * W) + thread
    at = (place * (UNIT // 4))[:, None, None] + tl.arange(0, UNIT // 32)[None, :, None] * 8
    masked: tl.constexpr = (s + 1) * 8 * W * UNIT > K
    return _loaded(start, at + tl.arange(0, 8)[None, None, :], place // 4 < K // UNIT, masked, "", FLIP)


@triton.jit
def _slice(
    w, scale, zero, row, thread, s: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """Words `[T, R, UNIT / 32]`, scales and zero points `[T, R]` of rows `row` `[1, R]` in a warp's slice."""
    groups: tl.constexpr = K // UNIT
    masked: tl.constexpr = (s + 1) * 8 * W > groups
    place = s * (32 * W) + thread
    here = place // 4 < groups
    word = (place * (UNIT // 32))[:, None, None] + tl.arange(0, UNIT // 32)[None, None, :]
    words = _loaded(w, row[:, :, None] * (K // 8) + word, here, masked, "evict_first", FLIP)
    at = row * groups + (place // 4)[:, None]
    if masked:
        both = tl.broadcast_to(here[:, None], at.shape)
        scales, zeros = tl.load(scale + at, mask=both, other=0), tl.load(zero + at, mask=both, other=0)
    else:
        scales, zeros = tl.load(scale + at), tl.load(zero + at)
    return words, scales, zeros


@triton.jit
def _rows(
    w, scale, zero, first, N, thread, K: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    SWIGLU: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Words, scales and zero points of `R` rows, of each of a warp's slices."""
    groups: tl.constexpr = K // UNIT
    slices: tl.constexpr = (groups + 8 * W - 1) // (8 * W)
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    r = tl.arange(0, R)[None, :]
    row = r % outputs + r // outputs * N
    w += first.to(tl.int64) * (K // 8)
    scale += first.to(tl.int64) * groups
    zero += first.to(tl.int64) * groups
    found = ()
    for s in tl.static_range(slices):
        found = found + (_slice(w, scale, zero, row, thread, s, K, UNIT, W, FLIP),)
    return found


@triton.jit
def _halved(v, thread, STEP: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """`[T, R]` as `[T, R / 2]`: of two lanes STEP apart one has the first half's sums, one the second's."""
    first, second = tl.split(tl.permute(tl.reshape(v, [T, 2, R // 2]), [0, 2, 1]))
    later = (thread // STEP % 2 == 1)[:, None]
    return tl.where(later, second, first) + _other(tl.where(later, first, second), STEP)


@triton.jit
def _other(v, STEP: tl.constexpr):
    """What the lane STEP away has."""
    return tl.inline_asm_elementwise(_OTHER, "=f,f,r", [v, STEP], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _summed(v, thread, T: tl.constexpr, R: tl.constexpr, ASSEMBLY: tl.constexpr):
    """`[T, R]` as `[R]`: the sums of all threads. A lane gives half of its rows away while it has several."""
    if not ASSEMBLY:
        y = tl.sum(v, 0)
    elif R == 4:
        v = _halved(_halved(v, thread, 1, T, 4), thread, 2, T, 2)
        v += _other(v, 4)
        v += _other(v, 8)
        v += _other(v, 16)
        # The lowest bit of a lane is the highest of its row.
        turned = tl.permute(tl.reshape(v, [T // 4, 2, 2]), [0, 2, 1])
        y = tl.sum(tl.reshape(turned, [T // 4, 4]), 0) * 0.125
    elif R == 8:
        v = _halved(_halved(_halved(v, thread, 1, T, 8), thread, 2, T, 4), thread, 4, T, 2)
        v += _other(v, 8)
        v += _other(v, 16)
        turned = tl.permute(tl.reshape(v, [T // 8, 2, 2, 2]), [0, 3, 2, 1])
        y = tl.sum(tl.reshape(turned, [T // 8, 8]), 0) * 0.25
    else:
        v = _halved(_halved(v, thread, 1, T, 16), thread, 2, T, 8)
        v = _halved(_halved(v, thread, 4, T, 4), thread, 8, T, 2)
        v += _other(v, 16)
        turned = tl.permute(tl.reshape(v, [T // 16, 2, 2, 2, 2]), [0, 4, 3, 2, 1])
        y = tl.sum(tl.reshape(turned, [T // 16, 16]), 0) * 0.5
    return y


@triton.jit
def _store(
    stored, inputs, odd, thread, bias, residual, out, first, N, kind: tl.constexpr, SLICES: tl.constexpr,
    UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The product of `R` rows, and what comes after it, to `out` from `first` on."""
    threads: tl.constexpr = 32 * W
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    r = tl.arange(0, R)
    n = first + tl.arange(0, outputs)
    shift = tl.load(bias + first + r % outputs + r // outputs * N).to(tl.float32) if HAS_BIAS else 0.0
    added = tl.load(residual + n) if HAS_RESIDUAL else 0.0
    acc = tl.zeros([threads, R], tl.float32)
    for s in tl.static_range(SLICES):
        words, scale, zero = stored[s]
        x, total = inputs[s]
        part = _times(words, x, odd, threads, R, UNIT // 32, ASSEMBLY)
        zero = zero.to(tl.float32) + (128.0 if ASSEMBLY else 0.0)
        acc += (part - zero * total) * scale.to(tl.float32)
    own = thread % 4 == thread // 8 % 4
    y = _summed(tl.where(own[:, None], acc, 0.0), thread, threads, R, ASSEMBLY)
    if HAS_BIAS:
        y += shift
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, R // 2]), [1, 0]))
        y = swiglu(gate, up, kind)
    if HAS_RESIDUAL:
        y = add_residual(y, added, kind)
    tl.store(out + n, y.to(out.dtype.element_ty))


@launched
@triton.jit
def lone_int4(
    x, norm, w, scale, zero, bias, residual, out, tail, tail_out, N, eps, K: tl.constexpr, WIDE: tl.constexpr,
    UNIT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr, HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    TAIL: tl.constexpr, EACH_TAIL: tl.constexpr, ASSEMBLY: tl.constexpr, FLIP: tl.constexpr,
    SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one of them.

    Args:
        w: int32 words of eight weights; its address and those of `x` and `norm` are divided by 16, or the
            compiler would not give a thread what it must have.
        tail: `[TAIL, K]`, weights in the type of `x`, whose outputs go to `tail_out`: EACH_TAIL of them by
            each of the first programs.
        WIDE: a power of two that holds K.
        UNIT: columns of a group, 64 or 128.
        R: rows of the weights a program reads at a time, 4, 8 or 16; of a SWIGLU, half are gate's.
        ROUNDS: there are fewer programs than R rows make, so each goes on.
        FLIP: in which order the compiler gives the axes of a load to threads.
        SOON: the next kernel may start before this one waits, not when it begins to end.
        PDL: the kernel starts while the one before it ends: see `compiler/launch.py`.
    """
    slices: tl.constexpr = (K // UNIT + 8 * W - 1) // (8 * W)
    each: tl.constexpr = UNIT // 4
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
    stored = _rows(w, scale, zero, first, N, thread, K, UNIT, R, W, SWIGLU, FLIP)
    gains = ()
    for s in tl.static_range(slices if HAS_NORM else 0):
        gains = gains + (_columns(norm, thread, s, K, UNIT, W, FLIP),)
    if PDL:
        if SOON:
            gdc_launch_dependents()
        gdc_wait()
    values = ()
    square = tl.zeros([32 * W, each // 8, 8], tl.float32)
    for s in tl.static_range(slices):
        values = values + (_columns(x, thread, s, K, UNIT, W, FLIP),)
        if HAS_NORM:
            wide = values[s].to(tl.float32)
            square += wide * wide
    rstd = 1.0
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(tl.reshape(square, [32 * W * each]), 0) / K + eps)
    inputs = ()
    for s in tl.static_range(slices):
        v = values[s]
        if HAS_NORM:
            v = normalised(v, gains[s], rstd, OFFSET)
        v = _operand(v, 32 * W, each // 8, ASSEMBLY)
        inputs = inputs + ((v, _total(v, odd, 32 * W, each // 8, ASSEMBLY)),)
    if PDL and not SOON:
        gdc_launch_dependents()
    if ROUNDS:
        for at in tl.range(begin, N, programs * outputs, num_stages=1):
            following = at + programs * outputs
            following = tl.minimum(tl.where(following < N, following, at), N - outputs)
            next_stored = _rows(w, scale, zero, following, N, thread, K, UNIT, R, W, SWIGLU, FLIP)
            _store(
                stored, inputs, odd, thread, bias, residual, out, tl.minimum(at, N - outputs), N, kind,
                slices, UNIT, R, W, HAS_BIAS, HAS_RESIDUAL, SWIGLU, ASSEMBLY,
            )  # fmt: skip
            stored = next_stored
    else:
        _store(
            stored, inputs, odd, thread, bias, residual, out, first, N, kind, slices, UNIT, R, W, HAS_BIAS,
            HAS_RESIDUAL, SWIGLU, ASSEMBLY,
        )  # fmt: skip
