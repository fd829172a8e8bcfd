"""Grammars as the engine sees them: which tokens may come next, not their meaning.

    TokenGrammar ──start()──→ GrammarState: fill ─ sample ─ accept ─ fill ─ sample ─ accept …

One state belongs to one choice. It sees exactly the tokens of its answer, once each and in order, so chunked
prefill, preemption and strangers in the batch can't touch it.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

import torch
from numpy.typing import NDArray

from snugvl.errors import RequestError, SnugvlError

KEPT_OPENINGS: Final = 4  # of a grammar; each holds a mask of all tokens
K = TypeVar("K")
V = TypeVar("V")


def gave_up(error: SnugvlError | str | None, where: str) -> SnugvlError:
    """The error of a request whose grammar can't go on: it became too large, which only shows on the way."""
    if isinstance(error, SnugvlError):
        return error
    return RequestError(
        f"the grammar can't go on {where}: {error}; make its counts and alternatives smaller",
        field="response_format",
    )


class Opening(NamedTuple):
    """The common beginning of all answers of a grammar.

    Attributes:
        forced: its tokens.
        bits: `[ceil(vocab / 32)]` int32, the mask after them, which is never written to any more.
        seconds: seconds that making each of the masks took.
    """

    forced: tuple[int, ...]
    bits: NDArray[Any]
    seconds: float


class KeptLast(dict[K, V]):
    """The values that were kept last, by key: `most` of them. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._lock = Lock()

    def keep(self, key: K, value: V) -> None:
        """Know a value from now on, and forget the oldest if there are too many."""
        with self._lock:
            self.pop(key, None)
            self[key] = value
            while len(self) > self._most:
                del self[next(iter(self))]


class Openings(KeptLast[frozenset[int], Opening]):
    """How answers of one grammar begin, by the tokens that end them: any number, as clients choose."""

    def __init__(self) -> None:
        super().__init__(KEPT_OPENINGS)


class GrammarState(Protocol):
    """The state of one choice in its grammar."""

    @property
    def openings(self) -> Openings | None:
        """Known beginnings of answers of its grammar, by the tokens that end them.

        None where none are kept, or this state is not at the beginning.
        """
        return None

    @property
    def error(self) -> str | None:
        """Why the grammar can't go on, or None. Once there is one, nothing may be sampled any more."""

    def fill(self, bits: torch.Tensor) -> None:
        """Write which tokens may come next into `bits` `[ceil(vocab / 32)]` int32 on the CPU.

        Token `t` is bit `t % 32` of word `t // 32`. When the grammar is complete only end-of-sequence
        tokens are left.
        """

    def accept(self, token: int) -> None:
        """Take the token that was sampled."""

    @classmethod
    def fill_all(cls, states: Sequence[Self], bits: torch.Tensor, processors: int = 1) -> None:
        """Write the mask of each of several states to its row of `bits` `[states, ceil(vocab / 32)]`.

        As `fill` does for one. `processors`: that may share the work.
        """
        for state, row in zip(states, bits, strict=True):
            state.fill(row)

    def takes(self, tokens: Sequence[int]) -> int:
        """Number of `tokens` that may come next, one after the other; the state doesn't change."""

    def copy(self) -> "GrammarState":
        """An independent copy of the state."""


class TokenGrammar(Protocol):
    """A checked grammar over one vocabulary."""

    def start(self) -> GrammarState:
        """A state of its own, at the beginning, whose first mask costs nothing."""
