"""RMSNorm of rows."""

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, out, eps, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """One row of `x` `[rows, SIZE]`; rounded before the weight, as transformers does."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    mask = column < SIZE
    v = tl.load(x + row * SIZE + column, mask=mask, other=0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, 0) / SIZE + eps)
    y = (v * rstd).to(out.dtype.element_ty) * tl.load(weight + column, mask=mask, other=0)
    tl.store(out + row * SIZE + column, y, mask=mask)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` `[…, size]`, normalised."""
    size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    wide = triton.next_power_of_2(size)
    rms_norm[(x.numel() // size,)](
        x, weight, out, eps, SIZE=size, WIDE=wide, num_warps=max(1, min(8, wide // 512))
    )
    return out
