"""What the engine knows of grammars: which tokens may come next. What they mean is others' business.

    TokenGrammar ──start()──→ GrammarState: fill ─ sample ─ accept ─ fill ─ sample ─ accept …

One state belongs to one choice. It sees exactly the tokens of its answer, once each and in order, so chunked
prefill, preemption and strangers in the batch can't touch it.

A mask may take microseconds or a tenth of a second. Those of a request whose last ones were very quick are
made at once. Others are made by threads (`MaskThreads`), as soon as the token before them is known, requests
taking turns; and each choice has a share of time for which a step waits:

    engine    sample ─ accept │ … next step │ wait 5 ms at most ─ whoever has its mask goes on ─ sample …
    threads                   └ token, mask ┘ one that is not ready is left out of this step

Where a mask allows a single token, that one is forced, whatever the network thinks: the state takes it and
makes the mask after it, and so on. So a `Mask` may know several tokens ahead of those that were taken, and
the engine need not compute one to get the next (`Engine._skip_forced`):

    taken   {"              a mask of one token      forced: title   ":      bits: what may follow   ":

Guessed tokens (`speculation.py`) need a mask behind each. A copy of the state makes them, once the network
has started with the guesses that the grammar takes; those behind right guesses aren't made again.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from snugvl.errors import RequestError

MOST_THREADS = 8
WAIT_S = 0.005  # that a step waits for masks, in all
QUICK_S = 0.0003  # that a mask may take to be made at once: handing it to a thread costs a third of that
AT_ONCE_S = 0.002  # of masks that are made at once, in a step
SHARE_S = 0.001  # of it that a choice gains with each token: one whose masks are slow soon waits alone
MOST_FORCED = 64  # tokens that a mask knows ahead; with masks of long literals, fewer:
FORCING_S = 0.005  # after so long it looks no further


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


def mask_threads(cores: int | None = None) -> int:
    """Threads for masks, on so many processors, or on those of this machine."""
    return min(max((os.cpu_count() or 1 if cores is None else cores) // 2, 1), MOST_THREADS)


@dataclass(slots=True, eq=False)
class MaskPace:
    """How long the masks of one request take, lately at most; unknown at first, so not quick."""

    seconds: float = QUICK_S

    def note(self, seconds: float) -> None:
        """One took so long."""
        self.seconds = max(seconds, 0.75 * self.seconds)


class MaskThreads:
    """Threads that make masks over `vocab` tokens, from the first job on. Owners (requests) take turns.

    Attributes:
        left_s: seconds of this step in which the engine's own thread may make masks; only it uses that.
    """

    def __init__(self, threads: int, vocab: int) -> None:
        self.vocab = vocab
        self.left_s = AT_ONCE_S  # for masks that are made at once, in this step
        lock = Lock()
        self.changed = Condition(lock)  # notified whenever a job is done
        self._submitted = Condition(lock)
        self._threads = threads
        self._started = 0
        self._jobs: dict[Hashable, deque[Callable[[], object]]] = {}  # by owner; whose turn is next, first

    def begin(self) -> None:
        """A step begins."""
        self.left_s = AT_ONCE_S

    def submit(self, owner: Hashable, job: Callable[[], object]) -> None:
        """Run `job`, which must not raise, when it is its owner's turn."""
        with self._submitted:
            self._jobs.setdefault(owner, deque()).append(job)
            if self._started < self._threads:
                self._started += 1
                Thread(target=self._run, name="snugvl-masks", daemon=True).start()
            self._submitted.notify()

    def wait(self, most_s: float) -> None:
        """Let a job be done, or time pass."""
        with self.changed:
            self.changed.wait(most_s)

    def _run(self) -> None:
        while True:
            with self._submitted:
                self.changed.notify_all()
                while not self._jobs:
                    self._submitted.wait()
                owner = next(iter(self._jobs))
                jobs = self._jobs.pop(owner)
                job = jobs.popleft()
                if jobs:
                    self._jobs[owner] = jobs  # behind all others
            job()


class Foreseen:
    """Which tokens a choice may take behind some that are guessed."""

    def __init__(self, bits: NDArray[np.int32]) -> None:
        self.bits = bits

    def wait(self) -> float:
        """Like `Mask.wait`: it is made."""
        return 0.0

    def write(self, bits: torch.Tensor) -> None:
        """See `Mask.write`."""
        bits.numpy()[:] = self.bits


class Mask:
    """Which tokens one choice may take next, made ahead of the step that needs it.

    Attributes:
        forced: the next tokens, where there is no choice; `accept` takes them one by one. Whole once `ready`.
    """

    def __init__(
        self,
        state: GrammarState,
        threads: MaskThreads,
        pace: MaskPace,
        ends: Collection[int] = (),
    ) -> None:
        """
        Args:
            pace: one for all choices of a request.
            ends: tokens that end the choice: nobody asks for a mask after one.
        """
        self.ready = True
        self.forced: deque[int] = deque()
        self._bits = np.zeros((threads.vocab + 31) // 32, dtype=np.int32)  # of the token after `forced`
        self._foreseen: deque[tuple[int, Foreseen]] = deque()  # guesses after it, and what may follow each
        self._state = state
        self._threads = threads
        self._pace = pace
        self._ends = ends
        self._share_s = WAIT_S
        self._dropped = False
        state.fill(torch.from_numpy(self._bits))
        if _only(self._bits) is not None:  # the masks after it cost something
            self.ready = False
            threads.submit(pace, lambda: self._make(None))

    @property
    def error(self) -> str | None:
        """Why the grammar can't go on, or None; ask when `ready`."""
        return None if self.forced else self._state.error

    @property
    def ends(self) -> bool:
        """Whether the choice ends with what is forced."""
        return bool(self.forced) and self.forced[-1] in self._ends

    @property
    def seconds(self) -> float:
        """How long those of its request took, lately at most."""
        return self._pace.seconds

    @property
    def quick(self) -> bool:
        """Whether those of its request were made, lately, in a time for which a step may wait."""
        return self._pace.seconds < WAIT_S

    def write(self, bits: torch.Tensor) -> None:
        """Which tokens may come next to `bits` `[ceil(vocab / 32)]` int32, as `GrammarState.fill` does.

        None, if the grammar can't go on.
        """
        assert self.ready, "a mask is read before it is made"
        words = bits.numpy()
        if not self.forced and self._state.error is None:
            words[:] = self._bits
            return
        words[:] = 0
        if self.forced:
            words.view(np.uint32)[self.forced[0] // 32] = 1 << self.forced[0] % 32

    def accept(self, token: int) -> None:
        """Take the token that was sampled, and begin with the mask after it."""
        assert self.ready, "a token was sampled without a mask"
        if self.forced:
            known = self.forced.popleft()
            assert token == known, "another token than the one that is forced"
            return
        self._share_s = min(self._share_s + SHARE_S, WAIT_S)
        if self._foreseen and self._foreseen[0][0] == token:
            self._state.accept(token)
            self._bits = self._foreseen.popleft()[1].bits  # the token after it is chosen already
            return
        self._foreseen.clear()
        self.ready = False
        if self._pace.seconds < min(QUICK_S, self._threads.left_s):
            self._threads.left_s -= self._make(token)
        else:
            self._threads.submit(self._pace, lambda: self._make(token))

    def takes(self, drafts: Sequence[int]) -> int:
        """How many guesses may come next, one after the other."""
        assert self.ready, "guesses without a mask"
        known = [draft == token for draft, token in zip(drafts, self.forced, strict=False)]
        if not all(known):
            return known.index(False)
        return len(known) + self._state.takes(drafts[len(known) :])

    def foresee(self, drafts: Sequence[int]) -> list[Foreseen]:
        """What may follow each of some guesses that it `takes`."""
        masks = []
        for token in list(self.forced)[1 : len(drafts) + 1]:
            words = np.zeros_like(self._bits)
            words.view(np.uint32)[token // 32] = 1 << token % 32
            masks.append(Foreseen(words))
        if self.forced and len(masks) < len(drafts):
            masks.append(Foreseen(self._bits))
        self._foreseen.clear()
        state = self._state.copy()
        for token in drafts[len(masks) :]:
            state.accept(token)
            mask = Foreseen(np.zeros_like(self._bits))
            if state.error is None:
                state.fill(torch.from_numpy(mask.bits))
            self._foreseen.append((token, mask))
        return [*masks, *(mask for _, mask in self._foreseen)]

    def drop(self) -> None:
        """No mask is needed any more."""
        self._dropped = True

    def wait(self, most_s: float | None = None) -> float:
        """Wait until it is ready, or for its share of `most_s`; without that, as long as it takes.

        Returns the seconds that it took.
        """
        if self.ready:
            return 0.0
        begun, limit_s = time.monotonic(), None if most_s is None else min(most_s, self._share_s)
        with self._threads.changed:
            self._threads.changed.wait_for(lambda: self.ready, limit_s)
        took_s = time.monotonic() - begun
        self._share_s = max(self._share_s - took_s, 0.0)
        return took_s

    def _make(self, token: int | None) -> float:
        """Make the mask after a token, or look further than the first one."""
        begun = time.monotonic()
        if not self._dropped:
            if token is not None:
                self._take(token)
            self._look_ahead(begun + FORCING_S)
        seconds = time.monotonic() - begun
        self._pace.note(seconds / (1 + len(self.forced)))
        self.ready = True
        return seconds

    def _take(self, token: int) -> None:
        self._state.accept(token)
        if self._state.error is None:
            self._state.fill(torch.from_numpy(self._bits))

    def _look_ahead(self, until: float) -> None:
        """Take the tokens that masks prove to be forced, until it is late."""
        while self._state.error is None and (token := _only(self._bits)) is not None:
            if len(self.forced) == MOST_FORCED or time.monotonic() > until:
                return
            self.forced.append(token)
            if token in self._ends:
                return
            self._take(token)


def _only(bits: NDArray[np.int32]) -> int | None:
    """The token that is allowed, if it is the only one."""
    (words,) = bits.nonzero()
    if len(words) != 1:
        return None
    word = int(bits.view(np.uint32)[words[0]])
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1


def gave_up(mask: Mask, where: str) -> RequestError:
    """Why a request ends whose grammar can't go on: it became too large, which only shows on the way."""
    return RequestError(
        f"the grammar can't go on {where}: {mask.error}; make its counts and alternatives smaller",
        field="response_format",
    )


def settle(masks: Iterable[Mask | None], threads: MaskThreads) -> bool:
    """Wait for masks, each for its share and `WAIT_S` in all; whether one is not ready all the same."""
    threads.begin()
    left_s, late = WAIT_S, False
    for mask in masks:
        if mask is None:
            continue
        left_s -= mask.wait(max(left_s, 0.0))
        late = late or not mask.ready
    return late


def allowed_bits(masks: Sequence[Mask | Foreseen | None], vocab: int, device: torch.device) -> torch.Tensor:
    """What each row may take next, `[rows, ceil(vocab / 32)]` int32 on `device`; everything without a mask.

    Waits for masks that are not ready; not for the device.
    """
    shape = len(masks), (vocab + 31) // 32
    bits = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    for row, mask in zip(bits, masks, strict=True):
        if mask is None:
            row.fill_(-1)
        else:
            mask.wait()
            mask.write(row)
    return bits.to(device, non_blocking=True)


def fill_allowed(masks: Sequence[Mask | Foreseen | None], vocab: int, device: torch.device) -> torch.Tensor:
    """Which tokens each row may take next, `[rows, vocab]` bool on `device`; one copy for all of them."""
    return unpacked(allowed_bits(masks, vocab, device), vocab)


def unpacked(bits: torch.Tensor, vocab: int) -> torch.Tensor:
    """`bits` `[rows, ceil(vocab / 32)]` int32 as `[rows, vocab]` bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
