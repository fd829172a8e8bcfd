"""Muon for the matrices of the blocks, AdamW for everything else, under one learning rate.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix (five Newton-Schulz steps), scaled
so that its root mean square equals AdamW's usual 0.2. Matrices of one shape are stepped together, stacked:
launching a hundred small products would cost more than computing them.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import nn


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Roughly U V^T of the singular value decomposition of each [..., rows, columns] matrix."""
    x = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Both optimizers; `step(rate)` applies the gradients of `model`."""

    def __init__(self, model: nn.Module, decay: float = 0.05) -> None:
        self.decay = decay
        self.matrices: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            blocked = any(part in name for part in ("blocks.", "layers.", "merger"))
            if p.ndim == 2 and blocked:
                self.matrices[tuple(p.shape)].append(p)
            else:
                rest.append(p)
        self.momentum = {
            shape: torch.zeros(len(ps), *shape, device=ps[0].device) for shape, ps in self.matrices.items()
        }
        fused = rest[0].is_cuda
        self.adam = torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at learning rate `rate`; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for shape, ps in self.matrices.items():
            grads = torch.stack([p.grad for p in ps if p.grad is not None])
            momentum = self.momentum[shape]
            momentum.lerp_(grads, 0.05)
            update = orthogonal(grads.lerp(momentum, 0.95)) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(ps, 1 - rate * self.decay)
            torch._foreach_add_(ps, list(update.unbind()), alpha=-rate)
        for p in (*self.adam.param_groups[0]["params"], *(p for ps in self.matrices.values() for p in ps)):
            p.grad = None

    def state(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {"adam": self.adam.state_dict(), "momentum": list(self.momentum.values())}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.momentum.values(), state["momentum"], strict=True):
            mine.copy_(saved)
