"""A mixture's experts: which of them a token passes, and the product with their matrices.

    x ─ router ─ softmax ─ the `used` largest, normalised ─┐ ids, shares
    x ──────────────── gate and up of an expert ─ SwiGLU ─ down ─ · share ─ Σ over its experts

The matrices of all experts of a layer stand below one another in two `Linear`s, in any of its formats. The
pairs of a token and an expert that a step has are sorted by expert and cut into tiles of one expert each, so
that an expert's matrices are read once for all tokens that chose it (`kernels/products/grouped.py`). What a
token's row becomes depends on nothing but the row: each pair is a product of its own, a token's pairs are
added in the order of their shares.

Which memory the matrices of an expert are in is `ExpertPlaces`' matter: it is told the experts that a step
needs and answers in rounds, each with matrices, where in them each expert stands, and -1 for those that come
in another round. Pairs are written apart and added at the end, so the result doesn't depend on the rounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import linear, silu

from snugvl.layers.linear import Linear
from snugvl.layers.replaced import by_kernels
from snugvl.layers.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRound:
    """Experts whose matrices are at hand.

    Attributes:
        gate_up: `[slots · 2 · width, hidden]`; of each expert the rows of gate, then those of up.
        down: `[slots · hidden, width]`.
        slots: `[experts]` int32, where each expert stands in both, or -1; None: each at its own number.
    """

    gate_up: Weights
    down: Weights
    slots: torch.Tensor | None = None


class ExpertPlaces(Protocol):
    """Where the matrices of a layer's experts are. `device_slots`: slots that a GPU gives itself in steps of
    few tokens (`models/expert_cache.py`), or 0."""

    device_slots: int

    def rounds(self, ids: torch.Tensor) -> Iterator[ExpertRound]:
        """Yield rounds of experts at hand; each expert in `ids` `[tokens, used]` int32 is in exactly one."""


def scored(x: torch.Tensor, scores: Linear) -> torch.Tensor:
    """Scores `[tokens, rows]` float32 of `x` `[tokens, hidden]`."""
    if by_kernels(x, "gemm"):
        from snugvl.layers.kernels.products.grouped import score  # needs triton, which only GPUs bring

        return score(x, scores.weight)
    return linear(x.float(), scores.weight.float())


def chosen(
    scores: torch.Tensor, count: int, used: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their shares. `scores`: `[tokens, rows]` float32; the first `count` of a
    row are those of experts.

    Returns:
        `[tokens, used]` int32, the best first; their softmax, normalised and rounded to `dtype`, in float32.
    """
    if by_kernels(scores, "choose"):
        from snugvl.layers.kernels.products.grouped import choose_experts  # needs triton, as above

        return choose_experts(scores, count, used, dtype)
    best, ids = scores[:, :count].softmax(-1).topk(used, dim=-1)
    return ids.int(), (best / best.sum(-1, keepdim=True)).to(dtype).float()


class Experts(nn.Module):
    """The experts of a layer. `places`: where their matrices are; None: in `gate_up_proj` and `down_proj`,
    all of them."""

    def __init__(self, hidden: int, count: int, width: int) -> None:
        super().__init__()
        self.hidden, self.count, self.width = hidden, count, width
        self.gate_up_proj = Linear(hidden, count * 2 * width, unit=width)
        self.down_proj = Linear(width, count * hidden, unit=hidden)
        self.packed: dict[str, tuple[tuple[str, int], ...]] = {}
        self.store_apart()
        self.places: ExpertPlaces | None = None

    def store_apart(self, *, halves: bool = True) -> None:
        """Say what a checkpoint has of each expert: gate and up by themselves, or as one matrix."""
        parts = (("gate_proj", self.width), ("up_proj", self.width))
        first = parts if halves else (("gate_up_proj", 2 * self.width),)
        every = range(self.count)
        self.packed = {
            "gate_up_proj": tuple((f"{expert}.{name}", rows) for expert in every for name, rows in first),
            "down_proj": tuple((f"{expert}.down_proj", self.hidden) for expert in every),
        }

    def _rounds(self, ids: torch.Tensor) -> Iterator[ExpertRound]:
        if self.places is not None:
            yield from self.places.rounds(ids)
        else:
            yield ExpertRound(self.gate_up_proj.weights, self.down_proj.weights)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` through the experts `ids` `[tokens, used]` int32 of each token, times
        `shares` in float32: `[tokens, used, hidden]`, not yet added.
        """
        tokens, used = ids.shape
        out = torch.empty(tokens, used, self.hidden, dtype=x.dtype, device=x.device)
        if not tokens:
            return out
        form = "grouped_blocks" if self.gate_up_proj.format == "ggml" else "grouped"
        if by_kernels(x, "sort_pairs", form):
            from snugvl.layers.kernels.products.grouped import Groups  # needs triton, as above

            groups = Groups(ids, self.count)
            for part in self._rounds(ids):
                groups.multiply(x, part, shares, out)
            return out
        for part in self._rounds(ids):
            self._plain(x, part, ids, shares, out)
        return out

    def _plain(
        self, x: torch.Tensor, part: ExpertRound, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One expert after the other, each with the tokens that chose it."""
        for expert in sorted(set(ids.flatten().tolist())):
            slot = expert if part.slots is None else int(part.slots[expert])
            if slot < 0:
                continue
            tokens, places = torch.where(ids == expert)
            first, last = (
                weights.wide(x.dtype, slot * rows, (slot + 1) * rows)
                for weights, rows in ((part.gate_up, 2 * self.width), (part.down, self.hidden))
            )
            gate, up = linear(x[tokens], first).chunk(2, dim=-1)
            found = linear(silu(gate) * up, last)
            out[tokens, places] = (found.float() * shares[tokens, places, None]).to(x.dtype)


def added(
    parts: torch.Tensor, shared: torch.Tensor | None, scores: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """The sum over a token's experts `[tokens, used, hidden]`, the shared expert's `[tokens, hidden]` as far
    as the last of `scores` `[tokens, rows]` opens its gate, and the residual, which may be written over.
    """
    if by_kernels(parts, "add_pairs"):
        from snugvl.layers.kernels.products.grouped import add  # needs triton, as above

        return add(parts, shared, scores, residual)
    total = parts.float().sum(1).to(parts.dtype)
    if shared is not None:
        total = total + scores[:, -1:].sigmoid().to(parts.dtype) * shared
    return total if residual is None else residual + total
