"""FP8 and int8 times one row of input, by fragments (`fragments.py`).

A unit is 64 columns: a thread's share of it is 16 bytes of each row, one load.

    FP8     bits are moved to where bf16 has them, which reads as the weight times 2⁻¹²⁰
    int8    codes + 128 are put into a float16's mantissa, which reads as 1152 more than the code; that excess
            is multiplied with the unit's sum, which the matrix unit computes once

float16 has fewer exponents than the bf16 that the input is in, so each unit of the input is multiplied by a
power of two that brings its largest number to 2⁸, and its products are divided by that again. What it loses
lies 2³² below the largest.
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
    other,
    own_of,
    summed,
    takes,
)
from snugvl.layers.kernels.products.gemv import wide_rows
from snugvl.layers.kernels.products.unpack import _assembly
from snugvl.layers.kernels.products.weights import FP8, e4m3_to_f16

UNIT = tl.constexpr(64)  # columns
EACH = tl.constexpr(16)  # of them a thread's
TAIL_ROWS = 2  # of a program


def _half_mma(rows: str, inputs: tuple[int, int], before: str) -> str:
    return mma(rows, inputs, before).replace("bf16.bf16", "f16.f16")


def _fp8_product() -> Iterator[str]:
    """`$4 … $7`, `$8 … $11`: two rows; `$12 … $19`: the input, bytes 0 and 2 of a word, then 1 and 3."""
    yield "mov.f32 z, 0f00000000;"
    for word in range(4):
        for register in range(4):  # a byte beside eight copies of its sign, then shifted, then only its bits
            source = (4, 8)[register % 2] + word
            yield f"prmt.b32 a{register}, ${source}, ${source}, {('0xa280', '0xb391')[register // 2]};"
            yield f"shl.b32 a{register}, a{register}, 4;"
            yield f"and.b32 a{register}, a{register}, 0x87f087f0;"
        inputs = 12 + 2 * word, 13 + 2 * word
        yield mma("a0, a1, a2, a3", inputs, "$0, $1, $2, $3" if word else "z, z, z, z")


def _int8_product() -> Iterator[str]:
    """Two rows of codes + 1152 times the input, in the registers of `_fp8_product`."""
    yield "mov.f32 z, 0f00000000;"
    yield "mov.b32 h, 0x64646464;"
    for word in range(4):
        for row in range(2):
            yield f"xor.b32 t, ${(4, 8)[row] + word}, 0x80808080;"
            yield f"prmt.b32 a{row}, t, h, 0x4240;"
            yield f"prmt.b32 a{row + 2}, t, h, 0x4341;"
        inputs = 12 + 2 * word, 13 + 2 * word
        yield _half_mma("a0, a1, a2, a3", inputs, "$0, $1, $2, $3" if word else "z, z, z, z")


def _int8_sum() -> Iterator[str]:
    """Ones times the input, `$4 … $11`."""
    yield "mov.f32 z, 0f00000000;"
    yield from (f"mov.b32 a{register}, 0x3c003c00;" for register in range(4))
    for word in range(4):
        inputs = 4 + 2 * word, 5 + 2 * word
        yield _half_mma("a0, a1, a2, a3", inputs, "$0, $1, $2, $3" if word else "z, z, z, z")


_FP8_PRODUCT = _assembly("a0, a1, a2, a3", ".reg .f32 z;", *_fp8_product())
_INT8_PRODUCT = _assembly("a0, a1, a2, a3, t, h", ".reg .f32 z;", *_int8_product())
_INT8_SUM = _assembly("a0, a1, a2, a3", ".reg .f32 z;", *_int8_sum())
_TAKES_8, _TAKES_16 = takes(8), takes(16)


@triton.jit
def _powers(v, T: tl.constexpr):
    """Powers of two `[T, 1]` that bring the largest number of a unit of the input to 2⁸, and their inverses.

    `v`: a thread's values `[T, 2, 8]`; four neighbours have a unit.
    """
    most = tl.max(tl.max(tl.abs(v.to(tl.float32)), 2), 1)
    most = tl.maximum(most, other(most, 1))
    most = tl.maximum(most, other(most, 2))
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 16)[:, None]  # of zeros, too
    power = ((2 * 127 + 8 - exponent) << 23).to(tl.float32, bitcast=True)
    return power, ((exponent - 8) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _operand(v, T: tl.constexpr):
    """A thread's values `[T, 2, 8]`: of each word of four weights 0 with 2 and 1 with 3, eight `[T, 1]`."""
    low, high = tl.split(tl.permute(tl.reshape(v, [T, 4, 2, 2]), [0, 1, 3, 2]))
    both = tl.inline_asm_elementwise(PAIRS, "=&r,=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=2)
    by_word = four(tl.permute(both, [0, 2, 1]), T, 2)  # [T, 2] each
    found = ()
    for word in tl.static_range(4):
        even, odd = tl.split(tl.reshape(by_word[word], [T, 1, 2]))
        found = found + (even, odd)
    return found


@triton.jit
def _input(v, odd, T: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A slice of the input: its operand, the excess of its products, and their factor, `[T, 1]`."""
    if not ASSEMBLY:
        found = (v,), 0.0, 256.0 if FORMAT == FP8 else 1.0
    elif FORMAT == FP8:
        found = _operand(v, T), 0.0, 1.329227995784916e36  # 2¹²⁰
    else:
        power, inverse = _powers(v, T)
        x = _operand((v.to(tl.float32) * power[:, :, None]).to(tl.float16), T)
        a, b, _, _ = tl.inline_asm_elementwise(
            _INT8_SUM, _TAKES_8, x, dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
        found = x, 1152.0 * tl.where(odd, b, a), inverse
    return found


@triton.jit
def _times(words, x, odd, T: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Products of each thread's unit with rows' `words` `[T, R, 4]`, as `_input` says: `[T, R]`."""
    if not ASSEMBLY:
        raw = (words[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]) & 255
        if FORMAT == FP8:
            value = e4m3_to_f16(raw.to(tl.uint8), False).to(tl.float32)
        else:
            value = ((raw << 24) >> 24).to(tl.float32)
        product = value * tl.reshape(x[0], [T, 4, 4]).to(tl.float32)[:, None, :, :]
        return in_fours(tl.sum(tl.sum(product, 3), 2), T, R)
    one, two = tl.split(tl.permute(tl.reshape(words, [T, R // 2, 2, 4]), [0, 1, 3, 2]))
    given = four(one, T, R // 2) + four(two, T, R // 2) + x
    text: tl.constexpr = _FP8_PRODUCT if FORMAT == FP8 else _INT8_PRODUCT
    a, b, c, d = tl.inline_asm_elementwise(
        text, _TAKES_16, given, dtype=(tl.float32,) * 4, is_pure=True, pack=1
    )
    return own_of(a, b, c, d, odd, T, R // 2)


@triton.jit
def _slice(
    w, scale, row, line, thread, s: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """Words `[T, R, 4]` of rows `row` `[1, R]`, and scales of the lines `line`, in a warp's slice."""
    place = s * (32 * W) + thread
    here = place < K // EACH
    masked: tl.constexpr = (s + 1) * 32 * W > K // EACH
    word = (place * 4)[:, None, None] + tl.arange(0, 4)[None, None, :]
    words = loaded(w, row[:, :, None] * (K // 4) + word, here, masked, "evict_first", FLIP)
    at = line * (K // GROUP) + (place * EACH // GROUP)[:, None]
    return words, beside_words(scale, at, here, masked, FLIP)


@triton.jit
def _rows(
    w, scale, first, N, thread, K: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    SWIGLU: tl.constexpr, BLOCKS: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Words `[T, R, 4]` of `R` rows and scales `[T, 1]`, `[T, 2]` or `[T, R]`, of each of a warp's slices."""
    slices: tl.constexpr = (K + 8 * UNIT * W - 1) // (8 * UNIT * W)
    outputs: tl.constexpr = R // 2 if SWIGLU else R
    r = tl.arange(0, R)[None, :]
    row = r % outputs + r // outputs * N
    if BLOCKS == 1:  # FP8, a tile's rows share a scale, gate's one and up's another
        line = (first + tl.arange(0, R // outputs)[None, :] * N) // 128
    elif BLOCKS > 1:
        line = (first + row) // 128
    else:
        line = (first + row).to(tl.int64)
    w += first.to(tl.int64) * (K // 4)
    found = ()
    for s in tl.static_range(slices):
        found = found + (_slice(w, scale, row, line, thread, s, K, GROUP, W, FLIP),)
    return found


@triton.jit
def _store(
    stored, inputs, odd, thread, bias, residual, out, first, N, kind: tl.constexpr, SLICES: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, FORMAT: tl.constexpr, BLOCKS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The product of `R` rows, and what comes after it, to `out` from `first` on."""
    threads: tl.constexpr = 32 * W
    shift, added = beside(bias, residual, first, N, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)
    acc = tl.zeros([threads, R], tl.float32)
    for s in tl.static_range(SLICES):
        words, scale = stored[s]
        x, excess, factor = inputs[s]
        scale = scale.to(tl.float32) * factor
        if BLOCKS == 1 and SWIGLU:
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [threads, 2, R // 2]), [threads, R])
        acc += (_times(words, x, odd, threads, R, FORMAT, ASSEMBLY) - excess) * scale
    y = summed(acc, thread, threads, R, ASSEMBLY)
    finish(y, shift, added, out, first, kind, R, HAS_BIAS, HAS_RESIDUAL, SWIGLU)


@launched
@triton.jit
def lone_byte(
    x, norm, w, scale, bias, residual, out, tail, tail_out, N, eps, K: tl.constexpr, WIDE: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, TAIL: tl.constexpr, EACH_TAIL: tl.constexpr,
    ASSEMBLY: tl.constexpr, FLIP: tl.constexpr, SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[n] = x · W[n]`; with SWIGLU, `W` has the rows of gate, then of up, and `N` counts one of them.

    Args:
        w: int32 words of four weights; 16 divides its address and those of `x` and `norm`.
        BLOCKS: what a scale is of. 0: one row (int8); 1: a block of 128 rows (FP8) that holds all of a
            tile's, or all of its gate's or up's; 2: a block that ends within a tile.
        tail, WIDE, R, ROUNDS, FLIP, SOON, PDL: as `lone_codes` has them.
    """
    slices: tl.constexpr = (K + 8 * UNIT * W - 1) // (8 * UNIT * W)
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
    stored = _rows(w, scale, first, N, thread, K, GROUP, R, W, SWIGLU, BLOCKS, FLIP)
    gains = gains_of(norm, thread, K, UNIT, W, HAS_NORM, FLIP)
    if PDL:
        if SOON:
            gdc_launch_dependents()
        gdc_wait()
    values = inputs_of(x, gains, thread, eps, K, UNIT, W, HAS_NORM, OFFSET, FLIP)
    inputs = ()
    for s in tl.static_range(slices):
        inputs = inputs + (_input(values[s], odd, 32 * W, FORMAT, ASSEMBLY),)
    if PDL and not SOON:
        gdc_launch_dependents()
    if ROUNDS:
        for at in tl.range(begin, N, programs * outputs, num_stages=1):
            following = at + programs * outputs
            following = tl.minimum(tl.where(following < N, following, at), N - outputs)
            next_stored = _rows(w, scale, following, N, thread, K, GROUP, R, W, SWIGLU, BLOCKS, FLIP)
            _store(
                stored, inputs, odd, thread, bias, residual, out, tl.minimum(at, N - outputs), N, kind,
                slices, R, W, HAS_BIAS, HAS_RESIDUAL, SWIGLU, FORMAT, BLOCKS, ASSEMBLY,
            )  # fmt: skip
            stored = next_stored
    else:
        _store(
            stored, inputs, odd, thread, bias, residual, out, first, N, kind, slices, R, W, HAS_BIAS,
            HAS_RESIDUAL, SWIGLU, FORMAT, BLOCKS, ASSEMBLY,
        )  # fmt: skip
