"""The distance of two networks' distributions over the vocabulary, token by token, in little memory.

    states of the reference  [tokens, hidden]  ─ its head ─┐
    states of the variant    [tokens, hidden]  ─ its head ─┴► logits of a slice of the vocabulary at a time

Both heads pass by slice by slice, and sums in float64 go along: for logits a of the reference and b of the
variant, with S = Σ e^a over the whole vocabulary and T = Σ e^b,

    KL = Σ e^a / S · (a − b) − ln S + ln T          nats

each sum relative to its largest term so far, as in an online softmax (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867). Nothing is left out, and no table of 150,000 values a token is kept.
Products with the head are made in float32, whatever the networks compute in: a bf16 logit is rounded by up to
0.06 at 20, on both sides, and would hide what a fine format costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from snugvl.engine.sampling.grammar import TokenGrammar
from snugvl.models.layered import LayeredNetwork

SLICE_BYTES: Final = 64 << 20  # of a head in float32
ROWS: Final = 256  # tokens whose logits are made at once


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The comparison of two distributions at each token.

    Attributes:
        kl: `[tokens]` float64, nats, from the reference's distribution to the variant's; None without one.
        same: `[tokens]` bool, whether both have the same likeliest token; None without a variant.
        best: `[tokens]` int64, the reference's likeliest token that its mask allows.
    """

    kl: torch.Tensor | None
    same: torch.Tensor | None
    best: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of the comparison: a network with its last hidden states `[tokens, hidden]`, on the host."""

    network: LayeredNetwork
    states: torch.Tensor


def slice_rows(hidden: int, vocab: int) -> int:
    """Number of a head's rows whose logits are computed at a time."""
    return min(vocab, max(32, SLICE_BYTES // (4 * hidden)))


def workspace_bytes(hidden: int, vocab: int) -> int:
    """Most bytes that `judge` takes on the device: slices of both heads, stored and wide; states; logits."""
    slice_ = slice_rows(hidden, vocab)
    return 2 * slice_ * hidden * 8 + 2 * ROWS * hidden * 4 + ROWS * slice_ * (2 * 4 + 5 * 8)


@torch.inference_mode()
def judge(reference: Side, variant: Side | None = None, masks: torch.Tensor | None = None) -> Judged:
    """Compare two sides at the same tokens, or find the reference's likeliest ones alone.

    Args:
        masks: `[tokens, ceil(vocab / 32)]` int32 on the host, tokens that a grammar allows, as
            `GrammarState.fill` writes them; None: all.
    """
    count, vocab = len(reference.states), reference.network.vocab_size
    ours, theirs = _Sums(count), None if variant is None else _Sums(count)
    crossed = torch.zeros(count, dtype=torch.float64)  # Σ e^(a − largest a) · (a − b)
    best, found = torch.full((count,), -torch.inf), torch.zeros(count, dtype=torch.int64)
    step = slice_rows(reference.states.shape[-1], vocab)
    for first in range(0, vocab, step):
        last = min(first + step, vocab)
        head = reference.network.head_rows(first, last)
        other = None if variant is None else variant.network.head_rows(first, last)
        for start in range(0, count, ROWS):
            rows = slice(start, min(start + ROWS, count))
            a = _logits(reference, rows, head)
            b = None if variant is None or other is None else _logits(variant, rows, other)
            if b is not None and theirs is not None:
                before = ours.largest[rows].clone()
                terms = ours.add(rows, a, first)
                theirs.add(rows, b, first)
                crossed[rows] *= (before - ours.largest[rows]).exp()
                crossed[rows] += (terms * (a.double() - b.double())).sum(-1).cpu()
            allowed = (
                a
                if masks is None
                else a.masked_fill(~_allowed(masks[rows], first, last, a.device), -torch.inf)
            )
            values, places = (part.cpu() for part in allowed.max(-1))
            higher = values > best[rows]  # of equals the lowest id
            best[rows] = torch.where(higher, values, best[rows])
            found[rows] = torch.where(higher, places + first, found[rows])
    if theirs is None:
        return Judged(None, None, found)
    kl = crossed / ours.total - ours.logsumexp + theirs.logsumexp
    return Judged(kl.clamp(min=0), ours.likeliest == theirs.likeliest, found)


class _Sums:
    """Sums of one side's exponentials over slices, on the host in float64, and its likeliest tokens."""

    def __init__(self, count: int) -> None:
        self.largest = torch.full((count,), -torch.inf, dtype=torch.float64)
        self.total = torch.zeros(count, dtype=torch.float64)
        self.likeliest = torch.zeros(count, dtype=torch.int64)

    def add(self, rows: slice, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Take a slice in that begins at token `first`; e^(logit − largest so far), `[rows, slice]`."""
        values, places = (part.cpu() for part in logits.max(-1))
        before = self.largest[rows].clone()
        higher = values > before
        self.likeliest[rows] = torch.where(higher, places + first, self.likeliest[rows])
        self.largest[rows] = torch.maximum(before, values.double())
        terms = (logits.double() - self.largest[rows].to(logits.device)[:, None]).exp()
        self.total[rows] *= (before - self.largest[rows]).exp()
        self.total[rows] += terms.sum(-1).cpu()
        return terms

    @property
    def logsumexp(self) -> torch.Tensor:
        return self.largest + self.total.log()


def _logits(side: Side, rows: slice, head: torch.Tensor) -> torch.Tensor:
    """Logits of a slice of the vocabulary, `[rows, slice]` float32."""
    return side.states[rows].to(head.device).float() @ head.T


def _allowed(masks: torch.Tensor, first: int, last: int, device: torch.device) -> torch.Tensor:
    """The bits of tokens `first … last - 1`, `[rows, last - first]` bool."""
    tokens = torch.arange(first, last)
    bits = masks[:, tokens // 32] >> (tokens % 32).to(torch.int32)
    return (bits & 1).bool().to(device)


def masks_of(grammar: TokenGrammar, tokens: Sequence[int], vocab: int) -> torch.Tensor:
    """Bits of tokens that a grammar allows in place of each token, int32 `[tokens, ceil(vocab / 32)]`."""
    masks = torch.zeros(len(tokens), -(-vocab // 32), dtype=torch.int32)
    state = grammar.start()
    for row, token in zip(masks, tokens, strict=True):
        state.fill(row)
        state.accept(token)
    return masks
