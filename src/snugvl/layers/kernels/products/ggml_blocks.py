"""A GGUF's blocks as kernels read them, plane by plane (`layers/ggml.py`): codes, and factors and addends.

All types are codes of 2, 3, 4, 5, 6 or 8 bits with a factor and an addend for each group of 16 or 32 columns,
so one kernel serves all. A code becomes a float without a conversion, which runs at a fraction of the speed
of the rest: its bits under the exponent of 2²³, less 2²³. Where codes are numbers of a table, its sixteen
bytes are four constants.
"""

import triton
import triton.language as tl

Q4_0, Q4_1, Q8_0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
Q4_K, Q5_K, Q5_0, Q5_1 = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
IQ4_NL, IQ4_XS, MXFP4 = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)
Q6_K, Q2_K, Q3_K = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)  # from Q6_K on groups of 16


@triton.jit
def number(bits):
    """Whole numbers below 2²³ as float32."""
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _looked_up(code, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Byte `code` of the sixteen that the four words are, the first in the lowest bits, as float32."""
    low = tl.where(code < 4, A, B)
    high = tl.where(code < 12, C, D)
    word = tl.where(code < 8, low, high).to(tl.int32, bitcast=True)
    return ((word << (24 - 8 * (code & 3))) >> 24).to(tl.float32)


@triton.jit
def _code(words, high, PLACE: tl.constexpr, TYPE: tl.constexpr):
    bits: tl.constexpr = 2 if TYPE >= Q2_K else 4
    code = (words >> (bits * PLACE)) & ((1 << bits) - 1)
    if TYPE == Q5_K or TYPE == Q5_0 or TYPE == Q5_1:  # noqa: SIM109 (the compiler knows no `in`)
        code |= ((high >> PLACE) & 1) << 4
    elif TYPE == Q3_K:
        code |= ((high >> PLACE) & 1) << 2
    elif TYPE == Q6_K:
        code |= ((high >> (2 * PLACE)) & 3) << 4
    if TYPE == IQ4_NL or TYPE == IQ4_XS:  # noqa: SIM109
        result = _looked_up(code, 0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535)
    elif TYPE == MXFP4:
        result = _looked_up(code, 0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC)
    else:
        result = number(code)
    return result


@triton.jit
def _eight(words, high, TYPE: tl.constexpr):
    """`words` `[…, n]` int32, and as many high bits, as `[…, n, 2, 2, 2]` float32 in their order."""
    a = tl.join(_code(words, high, 0, TYPE), _code(words, high, 4, TYPE))
    b = tl.join(_code(words, high, 1, TYPE), _code(words, high, 5, TYPE))
    c = tl.join(_code(words, high, 2, TYPE), _code(words, high, 6, TYPE))
    d = tl.join(_code(words, high, 3, TYPE), _code(words, high, 7, TYPE))
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _byte(words, PLACE: tl.constexpr):
    return ((words << (24 - 8 * PLACE)) >> 24).to(tl.float32)


@triton.jit
def _four(words):
    """`words` `[…, n]` int32 as `[…, n, 2, 2]` float32: the int8 codes in their order."""
    a, b, c, d = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def loaded(at, mask, EVEN: tl.constexpr):
    """Values that are in place, else 0; `EVEN`: all of it is, and a mask would cost more than it saves."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0)


@triton.jit
def stored(w, rows, group, mask, K: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr):
    """Codes of groups of columns as they are stored, `[rows, groups, words]` int32: the low bits."""
    size: tl.constexpr = 16 if TYPE >= Q6_K else 32
    inner: tl.constexpr = size // 4 if TYPE == Q8_0 else size // 8
    at = rows.to(tl.int64)[:, None, None] * (K // size * inner)
    at += group[None, :, None] * inner + tl.arange(0, inner)[None, None, :]
    if TYPE >= Q2_K:
        result = loaded(w.to(tl.pointer_type(tl.uint16)) + at, mask[:, :, None], EVEN).to(tl.int32)
    else:
        result = loaded(w.to(tl.pointer_type(tl.int32)) + at, mask[:, :, None], EVEN)
    return result


@triton.jit
def high_bits(w, count, rows, group, mask, K: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr):
    """The high bits of eight codes, for each word of the low ones: int32."""
    words: tl.constexpr = 2 if TYPE >= Q6_K else 4
    at = rows.to(tl.int64)[:, None, None] * (K // 8)
    at += group[None, :, None] * words + tl.arange(0, words)[None, None, :]
    plane = w + count * (K // 4 if TYPE == Q3_K else K // 2)
    if TYPE == Q6_K:
        bits = loaded(plane.to(tl.pointer_type(tl.uint16)) + at, mask[:, :, None], EVEN)
    else:
        bits = loaded(plane + at, mask[:, :, None], EVEN)
    return bits.to(tl.int32)


@triton.jit
def codes_of(
    w, raw, count, rows, group, mask, K: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr,
    BG: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`raw` as numbers, `[rows, groups, columns of a group]` float32."""
    size: tl.constexpr = 16 if TYPE >= Q6_K else 32
    if TYPE == Q8_0:
        result = tl.reshape(_four(raw), [BN, BG, size])
    else:
        high = raw
        if (TYPE >= Q5_K and TYPE <= Q5_1) or TYPE == Q6_K or TYPE == Q3_K:  # noqa: SIM109
            high = high_bits(w, count, rows, group, mask, K, TYPE, EVEN)
        result = tl.reshape(_eight(raw, high, TYPE), [BN, BG, size])
        if TYPE == Q6_K:
            result -= 32.0
        elif TYPE == Q3_K:
            result -= 4.0
    return result


@triton.jit
def affine(w, count, rows, group, mask, K: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr):
    """Factor and addend of each group, `[rows, groups]` float32; codes of some types have theirs already."""
    row = rows.to(tl.int64)[:, None]
    g = group[None, :]
    codes: tl.constexpr = K // 8 * 5 if TYPE == Q5_0 or TYPE == Q5_1 else K // 2  # noqa: SIM109
    halves = (w + count * codes).to(tl.pointer_type(tl.float16))
    if TYPE == Q4_0 or TYPE == Q5_0:  # noqa: SIM109
        a = loaded(halves + row * (K // 32) + g, mask, EVEN).to(tl.float32)
        b = (-8.0 if TYPE == Q4_0 else -16.0) * a
    elif TYPE == Q4_1 or TYPE == Q5_1:  # noqa: SIM109
        at = halves + (row * (K // 32) + g) * 2
        a = loaded(at, mask, EVEN).to(tl.float32)
        b = loaded(at + 1, mask, EVEN).to(tl.float32)
    elif TYPE == IQ4_NL:
        a = loaded(halves + row * (K // 32) + g, mask, EVEN).to(tl.float32)
        b = a * 0.0
    elif TYPE == MXFP4:  # half of 2 to the exponent: below 2⁻¹²⁶ the bits are those of a subnormal number
        power = loaded(w + count * (K // 2) + row * (K // 32) + g, mask, EVEN).to(tl.int32)
        a = tl.where(power < 2, 0x00200000 << power, (power - 1) << 23).to(tl.float32, bitcast=True)
        b = a * 0.0
    elif TYPE == Q8_0:
        wide = (w + count * K).to(tl.pointer_type(tl.float16))
        a = loaded(wide + row * (K // 32) + g, mask, EVEN).to(tl.float32)
        b = a * 0.0
    elif TYPE >= Q6_K:
        a, b = _sixteens(w, count, row, g, mask, K, TYPE, EVEN)
    elif TYPE == IQ4_XS:
        plane = w + count * (K // 2)
        block = row * (K // 256) + g // 8
        low = loaded(plane + block * 4 + g % 8 // 2, mask, EVEN).to(tl.int32) >> (4 * (g % 2))
        plane += count * (K // 64)
        high = loaded(plane + block * 2 + g % 8 // 4, mask, EVEN).to(tl.int32) >> (2 * (g % 4))
        d = (plane + count * (K // 128)).to(tl.pointer_type(tl.float16)) + block
        a = loaded(d, mask, EVEN).to(tl.float32) * (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
        b = a * 0.0
    else:
        plane = w + count * (K // 2 if TYPE == Q4_K else K // 8 * 5)
        block = row * (K // 256) + g // 8
        at = plane + block * 12 + g % 4
        low = loaded(at, mask, EVEN).to(tl.int32)
        middle = loaded(at + 4, mask, EVEN).to(tl.int32)
        rest = loaded(at + 8, mask, EVEN).to(tl.int32)
        first = g % 8 < 4
        scale = tl.where(first, low & 63, (rest & 15) | ((low >> 6) << 4))
        least = tl.where(first, middle & 63, (rest >> 4) | ((middle >> 6) << 4))
        d = (plane + count * (K // 256 * 12)).to(tl.pointer_type(tl.float16)) + block * 2
        a = loaded(d, mask, EVEN).to(tl.float32) * number(scale)
        b = -loaded(d + 1, mask, EVEN).to(tl.float32) * number(least)
    return a, b


@triton.jit
def _sixteens(w, count, row, g, mask, K: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr):
    """`affine` of the types with groups of 16."""
    block = row * (K // 256) + g // 16
    if TYPE == Q6_K:
        plane = w + count * (K // 4 * 3)
        scale = loaded(plane.to(tl.pointer_type(tl.int8)) + row * (K // 16) + g, mask, EVEN)
        d = (plane + count * (K // 16)).to(tl.pointer_type(tl.float16)) + block
        a = loaded(d, mask, EVEN).to(tl.float32) * scale.to(tl.float32)
        b = a * 0.0
    elif TYPE == Q2_K:
        plane = w + count * (K // 4)
        both = loaded(plane + row * (K // 16) + g, mask, EVEN).to(tl.int32)
        d = (plane + count * (K // 16)).to(tl.pointer_type(tl.float16)) + block * 2
        a = loaded(d, mask, EVEN).to(tl.float32) * number(both & 15)
        b = -loaded(d + 1, mask, EVEN).to(tl.float32) * number(both >> 4)
    else:
        plane = w + count * (K // 8 * 3)
        at, k = plane + block * 12, g % 16
        low = loaded(at + k % 8, mask, EVEN).to(tl.int32) >> (4 * (k // 8))
        high = loaded(at + 8 + k % 4, mask, EVEN).to(tl.int32) >> (2 * (k // 4))
        d = (plane + count * (K // 256 * 12)).to(tl.pointer_type(tl.float16)) + block
        a = loaded(d, mask, EVEN).to(tl.float32) * (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
        b = a * 0.0
    return a, b
