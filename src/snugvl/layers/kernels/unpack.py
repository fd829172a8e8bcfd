"""Stored weights as operands of a matrix instruction: two at a time, in integer registers.

A conversion instruction costs as much as several others, so bits are moved instead: masked and put under an
exponent, a code reads as a number near 2ⁿ, and a subtraction leaves what it means. On two numbers of a
register at once this takes one to two instructions a weight. Where there is no such assembly (interpreted,
float32, before Ampere) plain operations compute the same.
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.weights import e4m3_factor, e4m3_to_f16

# int4 to bf16: (w >> 4j) & 15 under 2⁷ (its ulp is 1), minus 136 = 128 + 8. Two words share a register.
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
# e4m3 to bf16, times 2⁻¹²⁰: the same exponent bits under a bias of 127, not 7.
_E4M3_BF16 = tl.constexpr(
    """
    {
    .reg .b32 a, s;
    prmt.b32 a, $2, 0, 0x1404;
    shr.u32 s, a, 4;
    and.b32 a, a, 0x80008000;
    lop3.b32 $0, s, 0x07f007f0, a, 0xea;
    prmt.b32 a, $2, 0, 0x3424;
    shr.u32 s, a, 4;
    and.b32 a, a, 0x80008000;
    lop3.b32 $1, s, 0x07f007f0, a, 0xea;
    }
    """
)
# int8 to bf16, whose ulp is 1 below 256: (128 + low seven bits) − (128, or 256 where the sign is set).
_INT8_BF16 = tl.constexpr(
    """
    {
    .reg .b32 a, s, one;
    mov.b32 one, 0x3f803f80;
    prmt.b32 a, $2, 0, 0x4140;
    lop3.b32 s, a, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, a, one, s;
    prmt.b32 a, $2, 0, 0x4342;
    lop3.b32 s, a, 0x00800080, 0xc300c300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, a, one, s;
    }
    """
)


@triton.jit
def _nibble(words, POSITION: tl.constexpr, kind: tl.constexpr):
    return (((words >> (4 * POSITION)) & 15) - 8).to(kind)


@triton.jit
def int4_values(words, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """`words` `[…, n]` int32 as `[…, n, 2, 2, 2]`: codes − 8, in their order when reshaped to `[…, 8 n]`."""
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
def e4m3_values(raw, kind: tl.constexpr, ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 bytes as numbers of type `kind`; `e4m3_values_factor` puts their powers of two right."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _E4M3_BF16, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return e4m3_to_f16(raw, NATIVE).to(kind)


@triton.jit
def e4m3_values_factor(ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr):
    """What `e4m3_values` must be multiplied with."""
    if ASSEMBLY:
        return 1.329227995784916e36  # 2¹²⁰
    return e4m3_factor(NATIVE)


@triton.jit
def int8_values(raw, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """int8 codes as numbers of type `kind`."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _INT8_BF16, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return raw.to(kind)
