"""RMSNorm of rows."""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others


@launched
@triton.jit
def rms_norm(
    x, weight, out, eps, offset, SIZE: tl.constexpr, WIDE: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row of `x` `[rows, SIZE]`; rounded before the weight, or with an offset after it.

    Both as transformers does.
    """
    wait_for_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    mask = column < SIZE
    v = tl.load(x + row * SIZE + column, mask=mask, other=0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, 0) / SIZE + eps)
    w = tl.load(weight + column, mask=mask, other=0)
    if HAS_OFFSET:
        y = (v * rstd * (offset + w.to(tl.float32))).to(out.dtype.element_ty)
    else:
        y = (v * rstd).to(out.dtype.element_ty) * w
    tl.store(out + row * SIZE + column, y, mask=mask)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """`x` `[…, size]`, normalised, times `offset + weight`."""
    size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    wide = triton.next_power_of_2(size)
    rms_norm[(x.numel() // size,)](
        x,
        weight,
        out,
        eps,
        offset,
        SIZE=size,
        WIDE=wide,
        HAS_OFFSET=offset != 0,
        num_warps=max(1, min(8, wide // 512)),
        **pdl(x.device),
    )
    return out
