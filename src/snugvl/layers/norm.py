"""RMSNorm, in float32 inside whatever the weights are."""

import torch
from torch import nn

from snugvl.layers.replaced import by_kernels


class RMSNorm(nn.Module):
    """`x / rms(x) * (offset + weight)` over the last dimension (https://arxiv.org/abs/1910.07467).

    `offset` is 1 where a checkpoint stores how far the weights are from 1 (Qwen3.5), else 0.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, size]`."""
        if by_kernels(x, "rms_norm"):
            from snugvl.layers.kernels.rows import normed  # needs triton, which only GPUs bring

            return normed(x, self.weight, self.eps, self.offset)
        return plain_norm(x, self.weight, self.eps, self.offset)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """RMSNorm of `x` `[…, size]` in plain torch."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (offset + weight.float())).to(x.dtype)
    # Rounded before the weight, as transformers does: in bf16 the order decides the last bit.
    return weight * wide.to(x.dtype)
