"""An FP8 KV cache in kernels: bytes of float8 e4m3, whether or not the hardware knows them.

Products with cached values run in float16 (in float32 where queries are float32): every e4m3 is a float16,
and one instruction makes two of them on Ada and later. Making bfloat16 takes a slow conversion a value more.
Queries and weights lose nothing either: float16 has more bits than bfloat16, and both stay far below 65,504.
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.products.weights import e4m3_to_f16


@triton.jit
def operand(query):
    """Queries as products with cached values take them."""
    if query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        result = tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        result = query
    return result


@triton.jit
def cached(raw, kind: tl.constexpr, NATIVE: tl.constexpr):
    """Loaded keys or values as `kind`; e4m3 bytes times 1 / `e4m3_factor`."""
    if raw.dtype == tl.uint8:
        raw = e4m3_to_f16(raw, NATIVE)
    return raw.to(kind)


@triton.jit
def stored(values, kind: tl.constexpr):
    """Values as a cache of `kind` stores them; uint8 stands for e4m3.

    To e4m3: the nearest, ties to even; beyond ±448 that; NaN stays NaN. By arithmetic on the bits of float32,
    everywhere alike: a conversion in hardware needs Ada, and only new tokens are written.
    """
    if kind == tl.uint8:
        bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        bits = bits & 0x7FFFFFFF
        size = tl.minimum(bits, 0x43E00000)  # 448; as integers, floats above 0 are in order
        # Normal numbers: 3 of 23 mantissa bits stay, and the exponent's bias becomes 7 instead of 127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2⁻⁶ e4m3 counts in steps of 2⁻⁹, as float32 does from 2¹⁴ on.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(bits > 0x7F800000, 0x7F, code)
        result = (code | sign).to(tl.uint8)
    else:
        result = values.to(kind)
    return result
