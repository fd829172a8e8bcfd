"""What the engine knows of grammars: which tokens may come next. What they mean is others' business.

    TokenGrammar ──start()──→ GrammarState: fill ─ sample ─ accept ─ fill ─ sample ─ accept …

One state belongs to one choice. It sees exactly the tokens that were sampled for it, once each and in
order, so chunked prefill, preemption and strangers in the batch can't touch it.

A mask may take microseconds or a tenth of a second. Those of a request whose last ones were quick are made at
once. Others are made by threads (`MaskThreads`), as soon as the token before them is known, requests taking
turns; and each choice has a share of time for which a step waits:

    engine    sample ─ accept │ … next step │ wait 5 ms at most ─ whoever has its mask goes on ─ sample …
    threads                   └ token, mask ┘ one that is not ready is left out of this step
"""

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Protocol

import torch

from snugvl.errors import RequestError

MOST_THREADS = 4
WAIT_S = 0.005  # that a step waits for masks, in all
QUICK_S = 0.002  # that a mask may take to be made at once: handing it to a thread costs some tenths of that
AT_ONCE_S = 0.012  # of masks that are made at once, in a step
SHARE_S = 0.001  # of it that a choice gains with each token: one whose masks are slow soon waits alone


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
        self.changed = Condition()  # notified whenever a job is done
        self._threads = threads
        self._started = 0
        self._jobs: dict[Hashable, deque[Callable[[], object]]] = {}  # by owner; whose turn is next, first

    def begin(self) -> None:
        """A step begins."""
        self.left_s = AT_ONCE_S

    def submit(self, owner: Hashable, job: Callable[[], object]) -> None:
        """Run `job`, which must not raise, when it is its owner's turn."""
        with self.changed:
            self._jobs.setdefault(owner, deque()).append(job)
            if self._started < self._threads:
                self._started += 1
                Thread(target=self._run, name="snugvl-masks", daemon=True).start()
            self.changed.notify_all()

    def wait(self, most_s: float) -> None:
        """Let a job be done, or time pass."""
        with self.changed:
            self.changed.wait(most_s)

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self._jobs:
                    self.changed.wait()
                owner = next(iter(self._jobs))
                jobs = self._jobs.pop(owner)
                job = jobs.popleft()
                if jobs:
                    self._jobs[owner] = jobs  # behind all others
            job()
            with self.changed:
                self.changed.notify_all()


class Mask:
    """Which tokens one choice may take next, made ahead of the step that needs it.

    Attributes:
        bits: `[ceil(vocab / 32)]` int32 on the CPU, as `GrammarState.fill` writes it; whole once `ready`.
    """

    def __init__(self, state: GrammarState, threads: MaskThreads, pace: MaskPace) -> None:
        """`pace`: one for all choices of a request."""
        self.bits = torch.empty((threads.vocab + 31) // 32, dtype=torch.int32)
        self.ready = True
        self._state = state
        self._threads = threads
        self._pace = pace
        self._share_s = WAIT_S
        self._dropped = False
        state.fill(self.bits)

    @property
    def error(self) -> str | None:
        """Why the grammar can't go on, or None; ask when `ready`."""
        return self._state.error

    def accept(self, token: int) -> None:
        """Take the token that was sampled, and begin with the mask after it."""
        assert self.ready, "a token was sampled without a mask"
        self.ready = False
        self._share_s = min(self._share_s + SHARE_S, WAIT_S)
        if self._pace.seconds < min(QUICK_S, self._threads.left_s):
            self._threads.left_s -= self._make(token)
        else:
            self._threads.submit(self._pace, lambda: self._make(token))

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

    def _make(self, token: int) -> float:
        begun = time.monotonic()
        if not self._dropped:
            self._state.accept(token)
            if self._state.error is None:
                self._state.fill(self.bits)
        seconds = time.monotonic() - begun
        self._pace.note(seconds)
        self.ready = True
        return seconds


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


def fill_allowed(masks: list[Mask], vocab: int, device: torch.device) -> torch.Tensor:
    """Which tokens may come next, `[masks, vocab]` bool on `device`: one copy for all of them."""
    for mask in masks:
        mask.wait()
    bits = torch.stack([mask.bits for mask in masks])
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    unpacked = (bits.to(device)[:, :, None] >> shifts) & 1  # [masks, words, 32]
    return unpacked.flatten(1)[:, :vocab].bool()
