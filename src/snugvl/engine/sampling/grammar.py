"""What the engine knows of grammars: which tokens may come next. What they mean is others' business.

    TokenGrammar ──start()──→ GrammarState: fill ─ sample ─ accept ─ fill ─ sample ─ accept …

One state belongs to one choice. It sees exactly the tokens that were sampled for it, once each and in
order, so chunked prefill, preemption and strangers in the batch can't touch it.
"""

from typing import Protocol

import torch


class GrammarState(Protocol):
    """Where one choice is in its grammar."""

    @property
    def error(self) -> str | None:
        """Why the grammar can't go on, or None. Once there is one, nothing may be sampled any more."""
        ...

    def fill(self, bits: torch.Tensor) -> None:
        """Write which tokens may come next into `bits` `[ceil(vocab / 32)]` int32 on the CPU.

        Token `t` is bit `t % 32` of word `t // 32`. When the grammar is complete only end-of-sequence
        tokens are left.
        """
        ...

    def accept(self, token: int) -> None:
        """Take the token that was sampled."""
        ...


class TokenGrammar(Protocol):
    """A checked grammar over one vocabulary."""

    def start(self) -> GrammarState:
        """A state of its own, at the beginning."""
        ...


def fill_allowed(states: list[GrammarState], vocab: int, device: torch.device) -> torch.Tensor:
    """Which tokens may come next, `[states, vocab]` bool on `device`: one copy for all of them."""
    bits = torch.empty(len(states), (vocab + 31) // 32, dtype=torch.int32)
    for row, state in zip(bits, states, strict=True):
        state.fill(row)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    unpacked = (bits.to(device)[:, :, None] >> shifts) & 1  # [states, words, 32]
    return unpacked.flatten(1)[:, :vocab].bool()
