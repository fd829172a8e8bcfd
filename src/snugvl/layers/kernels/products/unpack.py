"""Words of stored weights as operands of a matrix instruction: two weights at a time, in integer registers.

A conversion instruction costs as much as several others, so bits are moved instead: masked and put under an
exponent, a code reads as a number near 2ⁿ, and a subtraction leaves what it means. On two numbers of a
register at once this takes one to two instructions a weight. The two are the same places of two neighbouring
words, as that takes the fewest. Where there is no such assembly (interpreted, float32, before Ampere) plain
operations compute the same.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from snugvl.layers.kernels.products.weights import FP8, INT4, e4m3_factor, e4m3_to_f16


def _assembly(registers: str, *lines: str) -> tl.constexpr:
    """A block of PTX with registers of its own."""
    return tl.constexpr("\n".join(["{", f".reg .b32 {registers};", *lines, "}"]))


def _int4_bf16() -> Iterator[str]:
    """(w >> 4j) & 15 under 2⁷ (its ulp is 1), minus 136 = 128 + 8."""
    yield "mov.b32 one, 0x3f803f80;"
    yield "mov.b32 bias, 0xc308c308;"
    yield "prmt.b32 a, $8, $9, 0x5410;"
    yield "prmt.b32 b, $8, $9, 0x7632;"
    for place in range(4):
        for word, out in (("a", place), ("b", 4 + place)):
            if place:
                yield f"shr.u32 t, {word}, {4 * place};"
            yield f"lop3.b32 t, {'t' if place else word}, 0x000f000f, 0x43004300, 0xea;"
            yield f"fma.rn.bf16x2 ${out}, t, one, bias;"


def _e4m3_bf16() -> Iterator[str]:
    """Times 2⁻¹²⁰: the same exponent bits under a bias of 127, not 7."""
    for out in range(4):
        yield f"prmt.b32 a, $4, $5, 0x{4 + out}0{out}0;"
        yield "shr.u32 s, a, 4;"
        yield "and.b32 a, a, 0x80008000;"
        yield f"lop3.b32 ${out}, s, 0x07f007f0, a, 0xea;"


def _int8_bf16() -> Iterator[str]:
    """bf16's ulp is 1 below 256: (128 + low seven bits) − (128, or 256 where the sign is set)."""
    yield "mov.b32 one, 0x3f803f80;"
    for out in range(4):
        yield f"prmt.b32 a, $4, $5, 0x0{4 + out}0{out};"
        yield "lop3.b32 s, a, 0x00800080, 0xc300c300, 0xea;"
        yield "lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;"
        yield f"fma.rn.bf16x2 ${out}, a, one, s;"


_INT4_BF16 = _assembly("a, b, t, one, bias", *_int4_bf16())
_E4M3_BF16 = _assembly("a, s", *_e4m3_bf16())
_INT8_BF16 = _assembly("a, s, one", *_int8_bf16())


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
def unpacked_factor(FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr, NATIVE: tl.constexpr):
    """Factor that `unpacked` numbers must be multiplied with."""
    if FORMAT != FP8:
        return 1.0
    if ASSEMBLY:
        return 1.329227995784916e36  # 2¹²⁰
    return e4m3_factor(NATIVE)
