"""Operations between a vision tower's products, in one pass each: rotation, and a residual with its norm.

In plain torch a rotation is ten kernels over float32 copies. A tower has dozens of blocks, each over several
chunks of rows: the host could not start that many as fast as a large GPU finishes them.
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched


@launched
@triton.jit(do_not_specialize=["places"])
def rotate_patches(
    x, places, cosine, sine, stride, HEADS: tl.constexpr, HALF: tl.constexpr, PAD_HEADS: tl.constexpr,
    PAD_HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one patch, in place.

    Args:
        x: `[patches, HEADS, 2 · HALF]`, `stride` values from patch to patch.
        places: `[patches, 2]` int64, row and column.
        cosine, sine: `[side, HALF / 2]` float32. Half of the frequencies follow the row, half the column.
    """
    patch = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PAD_HEADS)[:, None]
    half = tl.arange(0, PAD_HALF)
    quarter: tl.constexpr = HALF // 2
    inside = half < HALF
    place = tl.load(places + patch * 2 + half // quarter, mask=inside, other=0)
    angle = place * quarter + half % quarter
    cos = tl.load(cosine + angle, mask=inside, other=0)[None, :]
    sin = tl.load(sine + angle, mask=inside, other=0)[None, :]
    at = x + patch * stride + head * (2 * HALF) + half[None, :]
    mask = (head < HEADS) & inside[None, :]
    first = tl.load(at, mask=mask, other=0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0).to(tl.float32)
    kind = x.dtype.element_ty
    tl.store(at, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(at + HALF, (second * cos + first * sin).to(kind), mask=mask)


@launched
@triton.jit
def add_layer_norm(x, delta, weight, bias, out, eps, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """One row: `x += delta`, and the LayerNorm of that to `out`; all `[rows, SIZE]`."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, WIDE)
    column = tl.arange(0, WIDE)
    mask = column < SIZE
    total = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    total += tl.load(delta + at, mask=mask, other=0).to(tl.float32)
    kept = total.to(x.dtype.element_ty)
    tl.store(x + at, kept, mask=mask)
    v = kept.to(tl.float32)
    centred = tl.where(mask, v - tl.sum(v, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    w = tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    b = tl.load(bias + column, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, (centred * scale * w + b).to(out.dtype.element_ty), mask=mask)


def rotate(x: torch.Tensor, places: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x` `[patches, heads, dim]` in place; its heads and their values must be contiguous."""
    patches, heads, dim = x.shape
    assert x.stride()[1:] == (dim, 1), "the heads of a patch lie side by side"
    rotate_patches[(patches,)](
        x,
        places.contiguous(),
        cos,
        sin,
        x.stride(0),
        HEADS=heads,
        HALF=dim // 2,
        PAD_HEADS=_power(heads),
        PAD_HALF=_power(dim // 2),
        num_warps=2,
    )


def add_normed(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """`x += delta`, both contiguous `[rows, size]`, and the LayerNorm of the sum."""
    assert x.is_contiguous(), "rows of the residual stream lie side by side"
    out, size = torch.empty_like(x), x.shape[1]
    wide = _power(size)
    add_layer_norm[(len(x),)](
        x,
        delta.contiguous(),
        weight,
        bias,
        out,
        eps,
        SIZE=size,
        WIDE=wide,
        num_warps=max(1, min(8, wide // 256)),
    )
    return out


def _power(count: int) -> int:
    """The next power of two; Triton's own takes a tenth of a launch."""
    return 1 << (count - 1).bit_length()
