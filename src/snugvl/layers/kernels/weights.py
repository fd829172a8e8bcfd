"""Storage formats of weights, as kernels read them.

    format   bytes of a row        scale            value
    bf16     2 K                   –                w
    fp8      K   (e4m3)            [N/128, K/128]   w · s
    int8     K                     [N, K/128]       w · s
    int4     K/2 (two a byte)      [N, K/group]     (w − z) · s

A byte of int4 holds element `k` of its group in the low and `k + group/2` in the high half, so that both
halves of a tile meet contiguous runs of the input.
"""

import triton
import triton.language as tl

BF16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)
INT4 = tl.constexpr(3)


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
    """What `e4m3_to_f16` must be multiplied with."""
    if NATIVE:
        return 1.0
    return 256.0


@triton.jit
def scale_offsets(rows, groups_of_columns, groups, FORMAT: tl.constexpr):
    """Offsets of the scales of `rows` and groups of columns."""
    if FORMAT == FP8:
        return (rows // 128) * groups + groups_of_columns
    return rows * groups + groups_of_columns
