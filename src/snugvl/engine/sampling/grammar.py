"""What the engine knows of grammars: which tokens may come next. What they mean is others' business.

    TokenGrammar ──start()──→ GrammarState: fill ─ sample ─ accept ─ fill ─ sample ─ accept …

One state belongs to one choice. It sees exactly the tokens of its answer, once each and in order, so chunked
prefill, preemption and strangers in the batch can't touch it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from numpy.typing import NDArray

from snugvl.errors import RequestError


def gave_up(error: str | None, where: str) -> RequestError:
    """Why a request ends whose grammar can't go on: it became too large, which only shows on the way."""
    return RequestError(
        f"the grammar can't go on {where}: {error}; make its counts and alternatives smaller",
        field="response_format",
    )


class Opening(NamedTuple):
    """How all answers of a grammar begin.

    Attributes:
        forced: tokens.
        bits: `[ceil(vocab / 32)]` int32, the mask after them, which nobody writes to any more.
        seconds: that making the masks took, of each of them.
    """

    forced: tuple[int, ...]
    bits: NDArray[Any]
    seconds: float


class GrammarState(Protocol):
    """Where one choice is in its grammar."""

    @property
    def openings(self) -> dict[frozenset[int], Opening] | None:
        """What is known of how answers of its grammar begin, by the tokens that end them.

        None where nobody keeps that, or this state is not at the beginning.
        """
        return None

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

    @classmethod
    def fill_all(cls, states: Sequence[Self], bits: torch.Tensor, processors: int = 1) -> None:
        """Write the mask of each of several states to its row of `bits` `[states, ceil(vocab / 32)]`.

        As `fill` does for one. `processors`: that may share the work.
        """
        for state, row in zip(states, bits, strict=True):
            state.fill(row)

    def takes(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may come next, one after the other; it stays where it is."""
        ...

    def copy(self) -> "GrammarState":
        """One of its own, at the same place."""
        ...


class TokenGrammar(Protocol):
    """A checked grammar over one vocabulary."""

    def start(self) -> GrammarState:
        """A state of its own, at the beginning, whose first mask costs nothing."""
        ...
