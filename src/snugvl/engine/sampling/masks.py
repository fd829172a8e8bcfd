"""Masks of grammars (`grammar.py`), the tokens that may come next, made while the network runs.

A mask may take microseconds or a tenth of a second. Those of requests whose last ones were quick are made
together before the next choice, on as many processors as they keep busy, and without Python's lock: with a
thread for each of them threads wait for that lock and not for masks. Others are made by threads
(`MaskThreads`), as soon as the token before them is known, requests taking turns; and each choice has a share
of time for which a step waits:

    engine    sample ─ accept │ … next step │ quick masks ─ wait 5 ms at most ─ those with a mask go on …
    threads                   └ token, mask ┘ one that is not ready is left out of this step

Where a mask allows a single token, that one is forced, whatever the network thinks: the state takes it and
makes the mask after it, and so on. So a `Mask` may know several tokens ahead of those that were taken, and
the engine need not compute one to get the next (`choosing.forced_tokens`):

    taken   {"              a mask of one token      forced: title   ":      bits: what may follow   ":

Drafted tokens (`speculation.py`) need a mask behind each. A copy of the state makes them, once the network
has started with the drafts that the grammar takes; those behind accepted drafts aren't made again.
"""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Condition, Thread

import numpy as np
import torch
from numpy.typing import NDArray

from snugvl.engine.sampling.grammar import GrammarState, Opening, Openings
from snugvl.errors import EngineError, SnugvlError, engine_failed

Job = Callable[[], object]
logger = logging.getLogger(__name__)

MOST_THREADS = 8
WAIT_S = 0.005  # that a step waits for masks, in all
QUICK_S = 0.004  # that a mask may take to be made together with others
TOGETHER_S = 0.008  # that all of them may take in a step
SHARE_S = 0.001  # of it that a choice gains with each token: one whose masks are slow soon waits alone
MOST_FORCED = 64  # tokens that a mask knows ahead; with masks of long literals, fewer:
FIRST_WORDS = 64  # of a mask, which say of most that they allow more than one token
FORCING_S = 0.005  # after so long it looks no further
PART_S = 0.0005  # of masks that are made together, for which another processor is woken


class Turns:
    """Threads for jobs whose owners take turns: of however many jobs one has, another waits for a single one.

    As many threads as are needed, up to a number. They hold what is to be done, and never who submits it:
    when that is dropped, they end. Safe to use from several threads.

    Attributes:
        changed: notified whenever a job is done.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.changed = Condition()
        self._threads, self._name = threads, name
        self._started = 0
        self._jobs: dict[Hashable, deque[Job]] = {}  # by owner; whose turn is next, first
        # One for each job, or None for each thread that is to end. A `SimpleQueue`, and no condition: what
        # the garbage collector calls, in any thread and anywhere, may put something there.
        self._told: SimpleQueue[bool | None] = SimpleQueue()
        self._finish = weakref.finalize(self, _end, self._told, threads)

    def submit(self, owner: Hashable, job: Job) -> None:
        """Run `job`, which must not raise, when it is its owner's turn."""
        with self.changed:
            if self._started < self._threads:
                try:
                    shared = self._told, self._jobs, self.changed
                    Thread(target=_run, args=shared, name=self._name, daemon=True).start()
                    self._started += 1
                except RuntimeError:  # the system gives no more threads: those that there are will do
                    if not self._started:
                        raise
            self._jobs.setdefault(owner, deque()).append(job)
        self._told.put(True)

    def close(self) -> None:
        """End the threads, each after the job that it does. What has not begun is not done."""
        with self.changed:
            self._threads = 0
            self._jobs.clear()
        self._finish()


def _end(queue: "SimpleQueue[bool | None]", threads: int) -> None:
    for _ in range(threads):
        queue.put(None)


def _run(queue: "SimpleQueue[bool | None]", jobs: dict[Hashable, deque[Job]], changed: Condition) -> None:
    while queue.get():
        with changed:
            if not jobs:  # it was closed meanwhile
                continue
            owner = next(iter(jobs))
            own = jobs.pop(owner)
            job = own.popleft()
            if own:
                jobs[owner] = own  # behind all others
        job()
        del owner, own, job  # which may hold the object that submitted it
        with changed:
            changed.notify_all()


def mask_threads(cores: int | None = None) -> int:
    """Number of threads for masks: half of `cores` (by default this machine's), at most `MOST_THREADS`."""
    return min(max((os.cpu_count() or 1 if cores is None else cores) // 2, 1), MOST_THREADS)


@dataclass(slots=True, eq=False)
class MaskPace:
    """Seconds that a request's mask takes: the most of late, less with time; unknown at first: not quick."""

    seconds: float = QUICK_S
    known: bool = False

    def note(self, seconds: float) -> None:
        """Note the seconds that a mask took."""
        self.seconds = max(seconds, 0.75 * self.seconds) if self.known else seconds
        self.known = True


class MaskThreads(Turns):
    """Makes masks over `vocab` tokens: threads, where owners (requests) take turns, or who asks for them.

    Only the engine's own thread asks for masks. `pinned`: those that are made together are on their way to a
    GPU.
    """

    def __init__(self, threads: int, vocab: int, *, pinned: bool = False) -> None:
        super().__init__(threads, "snugvl-masks")
        self.vocab = vocab
        self._pinned = pinned
        self._left_s = TOGETHER_S  # for masks that are made together, in this step
        self._doubtful = False  # whether the last ones that were made together took too long
        self._together: list[tuple[Mask, int]] = []  # those, and the tokens before them

    def begin(self) -> None:
        """Note that a step begins."""
        self._left_s = TOGETHER_S

    def ask(self, mask: "Mask", token: int, pace: MaskPace) -> None:
        """Make the mask after a token: with others that are quick, if that isn't too much for one step."""
        share_s = pace.seconds / self._threads
        if pace.seconds < QUICK_S and share_s < self._left_s:
            self._left_s -= share_s
            self._together.append((mask, token))
        else:
            self.submit(pace, lambda: make([(mask, token)]))

    def make_together(self) -> None:
        """Make the quick masks that were asked for.

        Where the last ones took long, a thread makes one after the other: that shows which one did, or that
        none did. This thread may have been kept from its processor, or from Python's lock.
        """
        asked, self._together = self._together, []
        if self._doubtful and asked:
            self._doubtful = False
            self.submit(self, partial(self._one_by_one, sorted(asked, key=lambda pair: pair[0].seconds)))
        elif asked:
            whole_s = sum(mask.seconds for mask, _ in asked)
            processors = min(self._threads, len(asked), 1 + int(whole_s / PART_S))
            took_s = make(asked, processors, pinned=self._pinned)
            self._doubtful = took_s >= max(QUICK_S, whole_s / processors)

    def _one_by_one(self, asked: "Sequence[tuple[Mask, int]]") -> None:
        """Make masks, each for itself; those left when that takes too long take turns with others."""
        left_s = TOGETHER_S
        for pair in asked:
            if left_s > 0:
                left_s -= make([pair])
                with self.changed:
                    self.changed.notify_all()
            else:
                self.submit(pair[0].pace, partial(make, [pair]))

    def close(self) -> None:
        super().close()
        self._together = []

    def wait(self, most_s: float) -> None:
        """Wait until a job is done, or for `most_s` seconds."""
        with self.changed:
            self.changed.wait(most_s)


class Foreseen:
    """Which tokens a choice may take behind some drafts."""

    together = None  # see `Mask.together`

    def __init__(self, bits: NDArray[np.int32]) -> None:
        self.bits = bits

    def wait(self) -> float:
        """See `Mask.wait`; it is always ready."""
        return 0.0

    def write(self, bits: NDArray[np.int32]) -> None:
        """See `Mask.write`."""
        bits[:] = self.bits


class Mask:
    """Which tokens one choice may take next, made ahead of the step that needs it.

    Attributes:
        forced: the next tokens, where there is no choice; `accept` takes them one by one. Whole once `ready`.
    """

    def __init__(
        self, state: GrammarState, threads: MaskThreads, pace: MaskPace, ends: Collection[int] = ()
    ) -> None:
        """
        Args:
            pace: one for all choices of a request.
            ends: tokens that end the choice: no mask is wanted after one.
        """
        self.ready, self.dropped = True, False
        self.forced: deque[int] = deque()
        self.state, self.pace = state, pace
        self._bits: NDArray[np.int32] = np.zeros((threads.vocab + 31) // 32, dtype=np.int32)  # after `forced`
        self._home: tuple[torch.Tensor, int] | None = None  # masks of which `_bits` are a row
        self._foreseen: deque[tuple[int, Foreseen]] = deque()  # drafts after it, and what may follow each
        self._threads = threads
        self._ends = frozenset(ends)
        self._share_s = WAIT_S
        self._openings: Openings | None = None  # to which it adds how it begins
        self._fault: EngineError | None = None  # that kept it from being made
        openings = state.openings
        known = None if openings is None else openings.get(self._ends)
        if known is not None:
            self._open(known)
            return
        state.fill(torch.from_numpy(self._bits))
        if state.error is None and self.put(self._bits):  # the masks after it cost something
            self.ready, self._openings = False, openings
            threads.submit(pace, lambda: make([(self, self.forced[-1])]))

    def _open(self, known: Opening) -> None:
        """Begin as an answer before this one did, whose masks needn't be made again."""
        for token in known.forced:
            self.state.accept(token)
        self.forced, self._bits = deque(known.forced), known.bits
        self.pace.note(known.seconds)

    def made(self) -> None:
        """Note that it is ready; an answer that begins like this one needn't make its first masks again."""
        if self._openings is not None and self.state.error is None:
            self._openings.keep(self._ends, Opening(tuple(self.forced), self._bits, self.pace.seconds))
        self._openings, self.ready = None, True

    def fail(self, error: BaseException) -> None:
        """Note that making it failed, through no fault of the grammar: its choice ends with that."""
        self.forced.clear()
        self._fault = engine_failed(error)
        self._openings, self.ready = None, True

    @property
    def error(self) -> SnugvlError | str | None:
        """Why the choice can't go on (what is wrong with its grammar), or None; read it when `ready`."""
        return None if self.forced else self._fault or self.state.error

    @property
    def ends(self) -> bool:
        """Whether the choice ends with what is forced."""
        return bool(self.forced) and self.forced[-1] in self._ends

    @property
    def seconds(self) -> float:
        """Seconds that a mask of its request takes, the most of late (`MaskPace`)."""
        return self.pace.seconds

    @property
    def quick(self) -> bool:
        """Whether masks of its request are, of late, made in a time for which a step may wait."""
        return self.pace.seconds < WAIT_S

    @property
    def together(self) -> tuple[torch.Tensor, int] | None:
        """(masks that were made together, this one's row among them), or None."""
        return None if self.forced or self.error is not None else self._home

    def write(self, bits: NDArray[np.int32]) -> None:
        """Which tokens may come next to `bits` `[ceil(vocab / 32)]`, as `GrammarState.fill` does.

        None, if the grammar can't go on.
        """
        assert self.ready, "a mask is read before it is made"
        if not self.forced and self.error is None:
            bits[:] = self._bits
            return
        bits[:] = 0
        if self.forced:
            bits.view(np.uint32)[self.forced[0] // 32] = 1 << self.forced[0] % 32

    def accept(self, token: int) -> None:
        """Take the token that was sampled, and ask for the mask after it."""
        assert self.ready, "a token was sampled without a mask"
        if self.forced:
            known = self.forced.popleft()
            assert token == known, "another token than the one that is forced"
            return
        self._share_s = min(self._share_s + SHARE_S, WAIT_S)
        if self._foreseen and self._foreseen[0][0] == token:
            self.state.accept(token)
            self._bits = self._foreseen.popleft()[1].bits  # the token after it is chosen already
            self._home = None
            return
        self._foreseen.clear()
        self.ready = False
        self._threads.ask(self, token, self.pace)

    @property
    def words(self) -> int:
        """Length of its bits, in 32-bit words."""
        return len(self._bits)

    def put(
        self, bits: NDArray[np.int32], more: bool = True, home: tuple[torch.Tensor, int] | None = None
    ) -> bool:
        """Take `bits` for what may come behind `forced`; whether they force a token that isn't the last.

        `more`: whether it may become longer, if that is what they say. `home`: masks of which they are a row.
        """
        self._bits, self._home = bits, home
        token = _only(bits) if more and len(self.forced) < MOST_FORCED else None
        if token is not None:
            self.forced.append(token)
        return token is not None and token not in self._ends

    def takes(self, drafts: Sequence[int]) -> int:
        """How many drafts may come next, one after the other."""
        assert self.ready, "drafts without a mask"
        known = [draft == token for draft, token in zip(drafts, self.forced, strict=False)]
        if not all(known):
            return known.index(False)
        return len(known) + self.state.takes(drafts[len(known) :])

    def foresee(self, drafts: Sequence[int]) -> list[Foreseen]:
        """Masks of the tokens that may follow each of the drafts that it `takes`."""
        masks = []
        for token in list(self.forced)[1 : len(drafts) + 1]:
            words = np.zeros_like(self._bits)
            words.view(np.uint32)[token // 32] = 1 << token % 32
            masks.append(Foreseen(words))
        if self.forced and len(masks) < len(drafts):
            masks.append(Foreseen(self._bits))
        self._foreseen.clear()
        state = self.state.copy()
        for token in drafts[len(masks) :]:
            state.accept(token)
            mask = Foreseen(np.zeros_like(self._bits))
            if state.error is None:
                state.fill(torch.from_numpy(mask.bits))
            self._foreseen.append((token, mask))
        return [*masks, *(mask for _, mask in self._foreseen)]

    def drop(self) -> None:
        """Note that no mask is needed any more."""
        self.dropped = True

    def wait(self, most_s: float | None = None) -> float:
        """Wait until it is ready, or for its share of `most_s`; without that, as long as it takes.

        Returns the seconds that it took.
        """
        if self.ready:
            return 0.0
        self._threads.make_together()
        begun, limit_s = time.monotonic(), None if most_s is None else min(most_s, self._share_s)
        with self._threads.changed:
            self._threads.changed.wait_for(lambda: self.ready, limit_s)
        took_s = time.monotonic() - begun
        self._share_s = max(self._share_s - took_s, 0.0)
        return took_s


def make(asked: Sequence[tuple[Mask, int]], processors: int = 1, *, pinned: bool = False) -> float:
    """Take a token for each of several masks, and make the mask after it, and what is forced behind it.

    `processors`: that share the work; `pinned`: in memory that a GPU reads. Returns the seconds that it took.
    A failure is passed to each of the masks, so that none is waited for in vain.
    """
    begun, spent = time.monotonic(), time.thread_time()
    try:
        _make(asked, begun, processors, pinned=pinned)
    except BaseException as error:  # what Rust panics at is not an Exception
        logger.exception("masks of grammars can't be made")
        for mask, _ in asked:
            mask.fail(error)
        return time.monotonic() - begun
    alone = len(asked) == 1  # a thread that waits for Python's lock would take its mask for a slow one
    took_s = time.thread_time() - spent if alone else time.monotonic() - begun
    for mask, _ in asked:
        if alone or took_s < QUICK_S:  # else one of them took long, and it isn't known which
            mask.pace.note(took_s * processors / len(asked) / (1 + len(mask.forced)))
        mask.made()
    return took_s


def _make(asked: Sequence[tuple[Mask, int]], begun: float, processors: int, *, pinned: bool) -> None:
    """`make`, which began at `begun`, in monotonic seconds."""
    for kind in {type(mask.state) for mask, _ in asked}:
        left = [pair for pair in asked if type(pair[0].state) is kind and not pair[0].dropped]
        while left:
            for mask, token in left:
                mask.state.accept(token)
            sound = [mask for mask, _ in left if mask.state.error is None]
            if not sound:
                break
            bits = torch.empty(len(sound), asked[0][0].words, dtype=torch.int32, pin_memory=pinned)
            kind.fill_all([mask.state for mask in sound], bits, processors)
            more, lines = time.monotonic() < begun + FORCING_S, bits.numpy()
            narrow = np.count_nonzero(lines[:, :FIRST_WORDS], axis=1) <= 1  # of which few force a token
            rows = zip(count(), sound, lines, narrow.tolist(), strict=False)
            left = [
                (mask, mask.forced[-1])
                for i, mask, row, may in rows
                if mask.put(row, may and more, (bits, i))
            ]


def _only(bits: NDArray[np.int32]) -> int | None:
    """The token that is allowed, if it is the only one."""
    if np.count_nonzero(bits) != 1:
        return None
    (places,) = bits.nonzero()  # sixty times as slow as counting
    word = int(bits.view(np.uint32)[places[0]])
    return None if word & (word - 1) else 32 * int(places[0]) + word.bit_length() - 1


def settle(masks: Iterable[Mask | None], threads: MaskThreads) -> bool:
    """Wait for masks, each for its share and `WAIT_S` in all; whether one is not ready all the same."""
    threads.make_together()
    threads.begin()
    left_s, late = WAIT_S, False
    for mask in masks:
        if mask is None or mask.ready:
            continue
        left_s -= mask.wait(max(left_s, 0.0))
        late = late or not mask.ready
    return late


def allowed_bits(
    masks: Sequence[Mask | Foreseen | None], vocab: int, *, pinned: bool = False
) -> torch.Tensor:
    """Bits of the tokens each row may take next, `[rows, ceil(vocab / 32)]` int32 of the host; all without a
    mask.

    Waits for masks that are not ready. `pinned`: in page-locked memory, from where a copy doesn't block.
    """
    for mask in masks:
        if mask is not None:
            mask.wait()
    bits = _made_together(masks)
    if bits is None:
        bits = torch.empty(len(masks), (vocab + 31) // 32, dtype=torch.int32, pin_memory=pinned)
        for row, mask in zip(bits.numpy(), masks, strict=True):
            if mask is None:
                row.fill(-1)
            else:
                mask.write(row)
    return bits


def _made_together(masks: Sequence[Mask | Foreseen | None]) -> torch.Tensor | None:
    """The rows of all masks where they were made, if they stand there in this order and alone."""
    places = [None if mask is None else mask.together for mask in masks]
    if places[0] is None:
        return None
    bits = places[0][0]
    if len(bits) == len(places) and all(
        place is not None and place[0] is bits and place[1] == row for row, place in enumerate(places)
    ):
        return bits
    return None


def fill_allowed(masks: Sequence[Mask | Foreseen | None], vocab: int, device: torch.device) -> torch.Tensor:
    """Which tokens each row may take next, `[rows, vocab]` bool on `device`; one copy for all of them."""
    bits = allowed_bits(masks, vocab, pinned=device.type == "cuda")
    return unpacked(bits.to(device, non_blocking=True), vocab)


def unpacked(bits: torch.Tensor, vocab: int) -> torch.Tensor:
    """`bits` `[rows, ceil(vocab / 32)]` int32 as `[rows, vocab]` bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
