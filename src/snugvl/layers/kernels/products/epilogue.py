"""Operations before and after a product, computed by its kernel: a launch costs as much as a small one.

    [RMSNorm] ─ x · Wᵀ ─ [+ bias] ─ [SwiGLU of two halves] ─ [+ residual]

All of it is rounded where transformers rounds. The norm of a row is computed again by every program: the row
is in the L2 cache, a launch is not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Epilogue(NamedTuple):
    """Beside a product `[M, rows]` of `x` `[M, columns]`.

    Attributes:
        bias: `[rows]`, added in float32, before anything is rounded.
        norm: RMSNorm weight `[columns]` applied to `x` first, with `eps`, after `offset` was added to it.
        residual: added to the result, in its shape.
        swiglu: the first half of the rows is the gate, the second what it multiplies.
    """

    bias: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    residual: torch.Tensor | None = None
    swiglu: bool = False

    def outputs(self, rows: int) -> int:
        """Columns of the result of a product with so many rows of weights."""
        return rows // 2 if self.swiglu else rows

    def tensors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm, bias and residual for a launch; `x` in place of what there is none of, and is not read."""
        return (
            x if self.norm is None else self.norm,
            x if self.bias is None else self.bias,
            x if self.residual is None else self.residual,
        )


@triton.jit
def rms_factor(x, eps, K: tl.constexpr, WIDE: tl.constexpr):
    """1 / rms of the one row `x` `[K]`; `WIDE`: a power of two that holds it."""
    everything = tl.arange(0, WIDE)
    whole = tl.load(x + everything, mask=everything < K, other=0).to(tl.float32)
    return tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)


@triton.jit
def normalised(v, gain, rstd, OFFSET: tl.constexpr):
    """`v` over its rms, rounded before it is multiplied by `gain`; or with an offset of that, after it."""
    wide = v.to(tl.float32) * rstd
    if OFFSET != 0:
        return (wide * (OFFSET + gain.to(tl.float32))).to(v.dtype)
    return wide.to(v.dtype) * gain


@triton.jit
def swiglu(gate, up, kind: tl.constexpr):
    """`silu(gate) · up` of float32; products, activation and the result of both are rounded to `kind`."""
    gate = gate.to(kind).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    return gate * up.to(kind).to(tl.float32)


@triton.jit
def add_residual(y, residual, kind: tl.constexpr):
    """Float32 `y`, rounded to `kind`, and the residual."""
    return y.to(kind).to(tl.float32) + residual.to(tl.float32)
