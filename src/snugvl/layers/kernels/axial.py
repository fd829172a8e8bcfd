"""The rotary embedding over two axes (`models/patches.py` is the definition), in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def rotate(
    x, places, cos, sin, x_row, HEADS: tl.constexpr, HALF: tl.constexpr, WIDE_HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One row of `x` `[rows, HEADS, 2 · HALF]`; its row and column number are in `places`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    quarter: tl.constexpr = HALF // 2  # frequencies of each axis
    axis = column // quarter
    place = tl.load(places + 2 * row + axis, mask=column < HALF, other=0)
    angle = place * quarter + column % quarter
    c = tl.load(cos + angle, mask=column < HALF, other=0)[None, :]
    s = tl.load(sin + angle, mask=column < HALF, other=0)[None, :]
    head = tl.arange(0, WIDE_HEADS)
    mask = (head < HEADS)[:, None] & (column < HALF)[None, :]
    values = x + row * x_row + head[:, None] * (2 * HALF) + column[None, :]
    first = tl.load(values, mask=mask, other=0).to(tl.float32)
    second = tl.load(values + HALF, mask=mask, other=0).to(tl.float32)
    tl.store(values, (first * c - second * s).to(x.dtype.element_ty), mask=mask)
    tl.store(values + HALF, (second * c + first * s).to(x.dtype.element_ty), mask=mask)


def rotate_in_place(x: torch.Tensor, places: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x` `[rows, heads, head_dim]`, whose rows may be apart.

    Args:
        places: `[rows, 2]` int64, row and column of each patch.
        cos: `[side, head_dim / 4]` float32, as is `sin`: of each row or column number.
    """
    rows, heads, dim = x.shape
    assert x.stride()[1:] == (dim, 1)
    assert places.is_contiguous()
    wide_heads, wide = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
    rotate[(rows,)](
        x, places, cos, sin, x.stride(0), HEADS=heads, HALF=dim // 2, WIDE_HEADS=wide_heads, WIDE=wide
    )
