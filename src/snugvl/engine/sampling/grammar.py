"""Grammars as the engine sees them: which tokens may come next, not their meaning.

    TokenGrammar ──start()──→ GrammarState: fill ─ sample ─ accept ─ fill ─ sample ─ accept …
                                                              └─ mask known ─┘

One state belongs to one choice. It sees exactly the tokens of its answer, once each and in order, so chunked
prefill, preemption and strangers in the batch can't touch it.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple, Protocol, Self, TypeVar

import numpy as np
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


class MadeMask(NamedTuple):
    """The tokens that may come next.

    Attributes:
        bits: `ceil(vocab / 32)` words of 32 bits, as `GrammarState.fill` writes them.
        only: the token that they allow, if it is the only one.
    """

    bits: bytes
    only: int | None

    @classmethod
    def of(cls, words: NDArray[np.int32]) -> Self:
        """The mask of `words` `[ceil(vocab / 32)]`, which may change afterwards."""
        return cls(words.tobytes(), _only(words))


def _only(words: NDArray[np.int32]) -> int | None:
    """The token that is allowed, if it is the only one."""
    if np.count_nonzero(words) != 1:
        return None
    (places,) = words.nonzero()  # sixty times as slow as counting
    word = int(words.view(np.uint32)[places[0]])
    return None if word & (word - 1) else 32 * int(places[0]) + word.bit_length() - 1


class Opening(NamedTuple):
    """The common beginning of all answers of a grammar.

    Attributes:
        forced: its tokens.
        bits: the mask after them (`MadeMask`).
        seconds: seconds that making each of the masks took.
    """

    forced: tuple[int, ...]
    bits: bytes
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
        tokens are left; when it can't go on, none.
        """

    def accept(self, token: int) -> MadeMask | None:
        """Take the token that was sampled, which costs next to nothing; `fill` does the work.

        Returns the mask after it where that is known already: then it need not be filled in.
        """

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
