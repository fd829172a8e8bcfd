"""Words of stored weights as operands of a matrix instruction: two weights at a time, in integer registers.

A conversion instruction costs as much as several others, so bits are moved instead: masked and put under an
exponent, a code reads as a number near 2ⁿ, and a subtraction leaves what it means. On two numbers of a
register at once this takes one to two instructions a weight. The two are the same places of two neighbouring
words, as that takes the fewest. Where there is no such assembly (interpreted, float32, before Ampere) plain
operations compute the same.
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.products.weights import FP8, INT4, e4m3_factor, e4m3_to_f16

# int4 to bf16: (w >> 4j) & 15 under 2⁷ (its ulp is 1), minus 136 = 128 + 8.
_INT4_BF16 = tl.constexpr(
    """
    {
    .reg .b32 a, b, t, one, bias;
    mov.b32 one, 0x3f803f80;
    mov.b32 bias, 0xc308c308;
    prmt.b32 a, $8, $9, 0x5410;
    prmt.b32 b, $8, $9, 0x7632;
    lop3.b32 t, a, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, t, one, bias;
    lop3.b32 t, b, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $4, t, one, bias;
    shr.u32 t, a, 4;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, t, one, bias;
    shr.u32 t, b, 4;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $5, t, one, bias;
    shr.u32 t, a, 8;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $2, t, one, bias;
    shr.u32 t, b, 8;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $6, t, one, bias;
    shr.u32 t, a, 12;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $3, t, one, bias;
    shr.u32 t, b, 12;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $7, t, one, bias;
    }
    """
)
# int4 to bf16 in half as many: 128 is not subtracted, and a pair is places j and j + 4 of one word, which
# stand so already.
_INT4_SWAPPED = tl.constexpr(
    """
    {
    .reg .b32 t;
    lop3.b32 $0, $8, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $8, 4;
    lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $8, 8;
    lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $8, 12;
    lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $4, $9, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $9, 4;
    lop3.b32 $5, t, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $9, 8;
    lop3.b32 $6, t, 0x000f000f, 0x43004300, 0xea;
    shr.u32 t, $9, 12;
    lop3.b32 $7, t, 0x000f000f, 0x43004300, 0xea;
    }
    """
)
# e4m3 to bf16, times 2⁻¹²⁰: the same exponent bits under a bias of 127, not 7.
_E4M3_BF16 = tl.constexpr(
    """
    {
    .reg .b32 a, s;
    prmt.b32 a, $4, $5, 0x4000;
    shr.u32 s, a, 4;
    and.b32 a, a, 0x80008000;
    lop3.b32 $0, s, 0x07f007f0, a, 0xea;
    prmt.b32 a, $4, $5, 0x5010;
    shr.u32 s, a, 4;
    and.b32 a, a, 0x80008000;
    lop3.b32 $1, s, 0x07f007f0, a, 0xea;
    prmt.b32 a, $4, $5, 0x6020;
    shr.u32 s, a, 4;
    and.b32 a, a, 0x80008000;
    lop3.b32 $2, s, 0x07f007f0, a, 0xea;
    prmt.b32 a, $4, $5, 0x7030;
    shr.u32 s, a, 4;
    and.b32 a, a, 0x80008000;
    lop3.b32 $3, s, 0x07f007f0, a, 0xea;
    }
    """
)
# int8 to bf16, whose ulp is 1 below 256: (128 + low seven bits) − (128, or 256 where the sign is set).
_INT8_BF16 = tl.constexpr(
    """
    {
    .reg .b32 a, s, one;
    mov.b32 one, 0x3f803f80;
    prmt.b32 a, $4, $5, 0x0400;
    lop3.b32 s, a, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, a, one, s;
    prmt.b32 a, $4, $5, 0x0501;
    lop3.b32 s, a, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, a, one, s;
    prmt.b32 a, $4, $5, 0x0602;
    lop3.b32 s, a, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $2, a, one, s;
    prmt.b32 a, $4, $5, 0x0703;
    lop3.b32 s, a, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $3, a, one, s;
    }
    """
)


@triton.jit
def _nibble(words, POSITION: tl.constexpr, kind: tl.constexpr):
    return (((words >> (4 * POSITION)) & 15) - 8).to(kind)


@triton.jit
def _byte(words, POSITION: tl.constexpr, kind: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    if FORMAT == FP8:
        result = e4m3_to_f16(((words >> (8 * POSITION)) & 255).to(tl.uint8), NATIVE).to(kind)
    else:
        result = ((words << (24 - 8 * POSITION)) >> 24).to(kind)
    return result


@triton.jit
def unpacked(words, kind: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr):
    """`words` `[…, n]` int32 as numbers, in their order: `[…, n, 2, 2]`, of int4 `[…, n, 2, 2, 2]`.

    int4: codes − 8; int8: codes; fp8: what `unpacked_factor` puts right.
    """
    if FORMAT == INT4:  # noqa: SIM108 (both sides of a ternary would need one type)
        result = _eight(words, kind, ASSEMBLY)
    else:
        result = _four(words, kind, FORMAT, ASSEMBLY, NATIVE)
    return result


@triton.jit
def _four(words, kind: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr):
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            _E4M3_BF16 if FORMAT == FP8 else _INT8_BF16,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=2,
        )
    else:
        a, b = _byte(words, 0, kind, FORMAT, NATIVE), _byte(words, 1, kind, FORMAT, NATIVE)
        c, d = _byte(words, 2, kind, FORMAT, NATIVE), _byte(words, 3, kind, FORMAT, NATIVE)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _eight(words, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    if ASSEMBLY:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4_BF16,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        a, b = _nibble(words, 0, kind), _nibble(words, 1, kind)
        c, d = _nibble(words, 2, kind), _nibble(words, 3, kind)
        e, f = _nibble(words, 4, kind), _nibble(words, 5, kind)
        g, h = _nibble(words, 6, kind), _nibble(words, 7, kind)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd)


@triton.jit
def swapped_codes(words):
    """int4 codes + 128 of `words` `[…, n]`, by assembly, in another order: `[…, n, 2, 2, 2]`.

    Of two neighbours, which a thread must hold one after the other, it changes places which of the two words
    it is and which half of a word: word i's place 4 h + j has word h's code 4 i + j.
    """
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        _INT4_SWAPPED,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=r,r,r",
        [words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd)


@triton.jit
def unpacked_factor(FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr):
    """What `unpacked` numbers must be multiplied with."""
    if FORMAT != FP8:
        return 1.0
    if ASSEMBLY:
        return 1.329227995784916e36  # 2¹²⁰
    return e4m3_factor(NATIVE)
