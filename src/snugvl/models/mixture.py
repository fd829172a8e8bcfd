"""A decoder layer's MLP, and a mixture of experts in its place.

    x ─ norm ┬─ router ──────┬─ experts ─────────┬─ Σ ─ + x
             ├───────────────┘                   │
             └─ shared expert ─ · sigmoid(gate) ─┘        in Qwen3.5's

Source: Hugging Face transformers, `models/qwen3_vl_moe`, `models/qwen3_5_moe` (Apache-2.0).
"""

import torch
from torch import nn

from snugvl.checkpoint.architecture import Mixture
from snugvl.layers.experts import Experts, added, chosen, scored
from snugvl.layers.linear import Linear
from snugvl.layers.norm import RMSNorm

Packed = dict[str, tuple[tuple[str, int], ...]]
"""By parameter of a module: the checkpoint's tensors that are its rows, with how many, in order."""


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden: int, inner: int, *, fused: bool = False) -> None:
        """`fused`: the checkpoint stores gate and up as one tensor."""
        super().__init__()
        self.packed: Packed = {} if fused else {"gate_up_proj": (("gate_proj", inner), ("up_proj", inner))}
        self.gate_up_proj = Linear(hidden, 2 * inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None, *, add: bool = True) -> torch.Tensor:
        """`x` `[tokens, hidden]` plus the MLP of its `norm`.

        Without `norm` the MLP is of `x` itself; without `add` it is returned alone.
        """
        inner = self.gate_up_proj(x, norm=norm, swiglu=True)
        result: torch.Tensor = self.down_proj(inner, residual=x if add else None)
        return result


class SparseMLP(nn.Module):
    """Router, experts and, where there is one, the expert that all tokens share."""

    def __init__(self, hidden: int, mixture: Mixture) -> None:
        super().__init__()
        self.count, self.used = mixture.count, mixture.used
        gate = (("shared_expert_gate", 1),) if mixture.shared else ()
        # It sees no quantisation: a few rows that decide what all else is computed with.
        self.scores = Linear(hidden, mixture.count + len(gate), quantises=False)
        self.packed: Packed = {"scores": (("gate", mixture.count), *gate)}
        self.experts = Experts(hidden, mixture.count, mixture.width)
        self.shared_expert = MLP(hidden, mixture.shared) if mixture.shared else None

    def forward(self, x: torch.Tensor, norm: RMSNorm | None, *, add: bool = True) -> torch.Tensor:
        """`x` `[tokens, hidden]` plus the mixture of its `norm`; see `MLP.forward`."""
        normed = x if norm is None else norm(x)
        scores = scored(normed, self.scores)
        ids, shares = chosen(scores, self.count, self.used, x.dtype)
        shared = None if self.shared_expert is None else self.shared_expert(normed, None, add=False)
        parts = self.experts(normed, ids, shares)
        return added(parts, shared, scores, x if add else None)
