"""The likeliest token of each row of logits, and tokens on their way to the host.

Everything else that choosing may be (penalties, temperature, filters, log-probabilities) is `sampler.py`'s.
"""

from typing import NamedTuple

import torch

from snugvl.engine.sampling.masks import unpacked
from snugvl.layers.device import HostCopy
from snugvl.layers.replaced import by_kernels

ROWS = 32  # chosen at a time: bounds the workspace for n = 128 choices, 128 × 150,000 × 40 bytes otherwise


class Sampled(NamedTuple):
    """A token and, if asked for, log-probabilities. `token_id` None: logits or grammar are broken."""

    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class PendingTokens:
    """Chosen tokens that may still be under way to the host. `tokens`: `[n]` int64 on the device; below 0
    where logits or grammar are broken."""

    def __init__(self, tokens: torch.Tensor, packed: torch.Tensor | None = None) -> None:
        """`packed`: what the host gets in place of the tokens."""
        self.tokens = tokens
        self._copy = HostCopy(tokens if packed is None else packed)

    def results(self) -> list[Sampled]:
        """A token for each row, waiting for them."""
        return [Sampled(token if token >= 0 else None) for token in self._copy.read().tolist()]


def begin_rows(logits: torch.Tensor) -> list[PendingTokens]:
    """Start choosing the likeliest token of each row of `logits` `[n, vocab]`, `ROWS` at a time."""
    return [begin_likeliest(logits[at : at + ROWS].float(), None) for at in range(0, len(logits), ROWS)]


def begin_likeliest(logits: torch.Tensor, bits: torch.Tensor | None) -> PendingTokens:
    """Start choosing the likeliest token of each row of `logits` `[n, vocab]` float32.

    What a `Sampler` gives where everybody is greedy and moves no score, in two launches.

    Args:
        bits: `[n, ceil(vocab / 32)]` int32 of the host, the tokens that are allowed; None: all are.
    """
    here = None if bits is None else bits.to(logits.device, non_blocking=True)
    return PendingTokens(likeliest(logits, here))


def likeliest(logits: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """The likeliest token of each row, `[n]` int64; −1 where there is none, or the logits are not finite.

    Args:
        logits: `[n, vocab]` float32.
        bits: `[n, ceil(vocab / 32)]` int32, the tokens that are allowed; None: all are.
    """
    if by_kernels(logits, "highest_parts", "take_highest"):
        from snugvl.layers.kernels import decode_step  # needs triton, which only GPUs bring

        return decode_step.choose_allowed(logits, bits)
    scores = logits if bits is None else logits.masked_fill(~unpacked(bits, logits.shape[1]), -torch.inf)
    highest, tokens = scores.max(-1)
    sound = (logits < torch.inf).all(-1)  # NaN is not lower, either
    return torch.where(sound & (highest > -torch.inf), tokens, -1)
