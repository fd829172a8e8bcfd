"""The filters top_k, top_p and min_p, applied in this order.

Nearly always the few best tokens decide. A row where they don't is sorted whole on a CPU, which takes 30
times as long for a vocabulary of 150,000; on a GPU a kernel searches its thresholds
(`layers/kernels/support.py`), so that the host needn't know which rows these are. Either way the row's own
scores and parameters decide alone.

Sources: Fan et al. 2018 (top-k, https://arxiv.org/abs/1805.04833), Holtzman et al. 2019 (top-p,
https://arxiv.org/abs/1904.09751), Nguyen et al. 2024 (min-p, https://arxiv.org/abs/2407.01082).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from snugvl.core.sampling import SamplingParams
from snugvl.layers.device import upload
from snugvl.layers.replaced import by_kernels

_FEW = 256  # tokens that decide most filters: beyond top_k of nearly everyone, and top_p of most answers


@dataclass(frozen=True, slots=True)
class _Columns:
    """The parameters of some rows, `[n, 1]` each: what is off lets everything pass."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> "_Columns":
        return cls(
            upload([[p.top_k] for p in params], torch.int64, device),
            # 2 for off: rounding may take the sum to 1 before the last token.
            upload([[p.top_p if p.top_p < 1.0 else 2.0] for p in params], torch.float64, device),
            upload([[p.min_p] for p in params], torch.float32, device),
        )

    def at(self, rows: torch.Tensor) -> "_Columns":
        """The parameters of some rows."""
        return _Columns(self.top_k[rows], self.top_p[rows], self.min_p[rows])


class Filters:
    """Filters (top-k, top-p, min-p) of a batch of choices, row by row."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        asking = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
        self._any, self._all = bool(asking), len(asking) == len(params)
        if asking:
            self._rows = upload(asking, torch.int64, device)
            self._columns = _Columns.of([params[i] for i in asking], device)

    def keep(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The tokens left of `scores` `[n, vocab]`, logits after temperature, as bool; None: all are left.

        Among equals the lowest ids stay, so that top_k leaves exactly k. top_p looks at what top_k left, and
        keeps the token that crosses the threshold.
        """
        if not self._any:
            return None
        if self._all:
            return _kept(scores, self._columns)
        keep = torch.ones_like(scores, dtype=torch.bool)
        return keep.index_copy_(0, self._rows, _kept(scores.index_select(0, self._rows), self._columns))


def support(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """Which of `scores` `[n, vocab]` the filters of each row leave: see `Filters.keep`."""
    return Filters(params, scores.device).keep(scores)


def _kept(scores: torch.Tensor, columns: _Columns) -> torch.Tensor:
    if scores.shape[-1] <= _FEW:
        return _support_of_all(scores, columns)
    kept, sure = _support_of_few(scores, columns)
    if by_kernels(scores, "search_support"):
        from snugvl.layers.kernels.support import search  # needs triton, which only GPUs bring

        search(scores, kept, sure, columns.top_k, columns.top_p.float(), columns.min_p)
        return kept
    rest = (~sure).nonzero()[:, 0]
    if len(rest):
        kept[rest] = _support_of_all(scores[rest], columns.at(rest))
    return kept


def _support_of_all(scores: torch.Tensor, columns: _Columns) -> torch.Tensor:
    """`[n, vocab]`: what the filters leave, by sorting everything."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    among = _among_top_k(ranked, columns)
    keep = among & _likely(ranked.masked_fill(~among, -torch.inf).softmax(-1), columns)
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _support_of_few(scores: torch.Tensor, columns: _Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that the filters keep, by the best `_FEW` alone, and `[n]`: whether these decide."""
    best, ids = scores.topk(_FEW, dim=-1)
    worst = best[:, -1:]
    # Equals of the worst of the few may have lower ids; equals of -inf have no probability anyway.
    tied = ((scores == worst).sum(-1) > (best == worst).sum(-1)) & (worst[:, 0] > -torch.inf)
    ids = ids.sort(dim=-1).values
    ranked, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    among = _among_top_k(ranked, columns)
    ranked = ranked.masked_fill(~among, -torch.inf)
    top_k = columns.top_k[:, 0]
    limited = (top_k > 0) & (top_k <= _FEW)
    total = torch.where(limited, ranked.logsumexp(-1), scores.logsumexp(-1))
    keep = among & _likely((ranked - total[:, None]).exp(), columns)
    # Of more than the few by top_k nothing is known: top_p and min_p would look at these only.
    sure = (limited | ~keep[:, -1]) & ~tied & (top_k <= _FEW)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids.gather(-1, order), keep), sure


def _among_top_k(ranked: torch.Tensor, columns: _Columns) -> torch.Tensor:
    ranks = torch.arange(ranked.shape[-1], device=ranked.device)
    return (ranks < columns.top_k) | (columns.top_k == 0)


def _likely(probabilities: torch.Tensor, columns: _Columns) -> torch.Tensor:
    """The tokens that top_p and min_p leave of `probabilities`, which fall from left to right."""
    before = probabilities.double().cumsum(-1) - probabilities
    keep = before < columns.top_p
    return keep & (probabilities >= columns.min_p.to(probabilities.dtype) * probabilities[:, :1])
