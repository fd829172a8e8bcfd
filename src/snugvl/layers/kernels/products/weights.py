"""Storage formats of weights, as kernels read them.

    format   bytes of a row        scale            value
    bf16     2 K                   –                w
    fp8      K   (e4m3)            [N/128, K/128]   w · s
    int8     K                     [N, K/128]       w · s
    int4     K/2 (eight a word)    [N, K/group]     (w − z) · s
    int5     K/2 and K/8           [N, K/group]     (w − z) · s
    int6     K/2 and K/4           [N, K/group]     (w − z) · s

A word of int4 holds eight neighbours, the first in its lowest bits. int5 and int6 have their lower four bits
so, and the others in a second plane (`planes_of`), which the kernels of `planes.py` and `dequantize.py` read.
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.weights import Weights

BF16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)
INT4 = tl.constexpr(3)
STORED_AS = {"bf16": BF16, "fp8": FP8, "int8": INT8, "int4": INT4}


def operands(weights: Weights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scales and zero points for a launch; others in place of those that a format has not."""
    data = weights.data.view(torch.uint8) if weights.format == "fp8" else weights.data
    scale = weights.scale if weights.scale is not None else data
    return data, scale, weights.zero if weights.zero is not None else scale


def planes_of(weights: Weights) -> tuple[torch.Tensor, ...]:
    """Both planes of weights of 5 and 6 bits, their scales and zero points, for a launch."""
    assert weights.upper is not None
    assert weights.scale is not None
    assert weights.zero is not None
    return weights.data, weights.upper, weights.scale, weights.zero


@triton.jit
def e4m3_to_f16(raw, NATIVE: tl.constexpr):
    """float8 e4m3 bytes as float16, times 2⁻⁸ where the hardware can't convert (before Ada).

    float16's exponent bias is 15, e4m3's is 7, so bits shifted into float16's fields read as the value times
    2⁻⁸, exactly, subnormal numbers included. `e4m3_factor` puts it right, once a group.
    """
    if NATIVE:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = raw.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_factor(NATIVE: tl.constexpr):
    """Factor that the result of `e4m3_to_f16` must be multiplied with."""
    if NATIVE:
        return 1.0
    return 256.0


@triton.jit
def scale_offsets(rows, groups_of_columns, groups, FORMAT: tl.constexpr):
    """Offsets of the scales of `rows` and groups of columns."""
    if FORMAT == FP8:
        return (rows // 128) * groups + groups_of_columns
    return rows * groups + groups_of_columns


# An int4 code becomes a float without a conversion, which runs at a quarter of the speed of the rest: masked
# in place, its bits are the mantissa of a tiny (subnormal) float32, code · 2^(first bit − 149). What it is
# multiplied with anyway takes the power of two. Codes beyond the mantissa's 23 bits are shifted down by 12.


@triton.jit
def _tiny(words, POSITION: tl.constexpr):
    shift: tl.constexpr = 12 if POSITION >= 5 else 0
    mask: tl.constexpr = 15 << (4 * POSITION - shift)
    return ((words >> shift) & mask).to(tl.float32, bitcast=True)


@triton.jit
def tiny_codes(words):
    """`words` `[…, n]` int32 as `[…, n, 2, 2, 2]` float32: each code · 2^(its first bit − 149)."""
    a = tl.join(_tiny(words, 0), _tiny(words, 4))
    b = tl.join(_tiny(words, 1), _tiny(words, 5))
    c = tl.join(_tiny(words, 2), _tiny(words, 6))
    d = tl.join(_tiny(words, 3), _tiny(words, 7))
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def power_for(k, TOTAL: tl.constexpr):
    """2^(`TOTAL` − first bit of element `k`) in float32."""
    position = k % 8
    bit = 4 * position - tl.where(position >= 5, 12, 0)
    return ((127 + TOTAL - bit) << 23).to(tl.float32, bitcast=True)
