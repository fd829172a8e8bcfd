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

A mask that its grammar knows already (answers before this one stood at the same place) is made by nobody: the
token brings it along.

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

from snugvl.engine.sampling.grammar import GrammarState, MadeMask, Opening, Openings
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

    Only the engine's own thread asks for masks.
    """

    def __init__(self, threads: int, vocab: int) -> None:
        super().__init__(threads, "snugvl-masks")
        self.vocab = vocab
        self._left_s = TOGETHER_S  # for masks that are made together, in this step
        self._doubtful = False  # whether the last ones that were made together took too long
        self._together: list[Mask] = []  # those

    def begin(self) -> None:
        """Note that a step begins."""
        self._left_s = TOGETHER_S

    def ask(self, mask: "Mask") -> None:
        """Make a mask: with others that are quick, if that isn't too much for one step."""
        share_s = mask.seconds / self._threads
        if mask.seconds < QUICK_S and share_s < self._left_s:
            self._left_s -= share_s
            self._together.append(mask)
        else:
            self.submit(mask.pace, partial(make, [mask]))

    def make_together(self) -> None:
        """Make the quick masks that were asked for.

        Where the last ones took long, a thread makes one after the other: that shows which one did, or that
        none did. This thread may have been kept from its processor, or from Python's lock.
        """
        asked, self._together = self._together, []
        if self._doubtful and asked:
            self._doubtful = False
            self.submit(self, partial(self._one_by_one, sorted(asked, key=lambda mask: mask.seconds)))
        elif asked:
            whole_s = sum(mask.seconds for mask in asked)
            processors = min(self._threads, len(asked), 1 + int(whole_s / PART_S))
            took_s = make(asked, processors)
            self._doubtful = took_s >= max(QUICK_S, whole_s / processors)

    def _one_by_one(self, asked: "Sequence[Mask]") -> None:
        """Make masks, each for itself; those left when that takes too long take turns with others."""
        left_s = TOGETHER_S
        for mask in asked:
            if left_s > 0:
                left_s -= make([mask])
                with self.changed:
                    self.changed.notify_all()
            else:
                self.submit(mask.pace, partial(make, [mask]))

    def close(self) -> None:
        super().close()
        self._together = []

    def wait(self, most_s: float) -> None:
        """Wait until a job is done, or for `most_s` seconds."""
        with self.changed:
            self.changed.wait(most_s)


class Foreseen:
    """The tokens that a choice may take behind some drafts. `allowed`: their bits; see `Mask.allowed`."""

    def __init__(self, allowed: bytes) -> None:
        self.allowed = allowed


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
        self.words = (threads.vocab + 31) // 32  # of 32 bits
        self._bits = bytes(4 * self.words)  # what may come after `forced`
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
        bits = torch.zeros(self.words, dtype=torch.int32)
        state.fill(bits)
        if self.put(MadeMask.of(bits.numpy())):  # the masks after it cost something
            self.ready, self._openings = False, openings
            threads.submit(pace, partial(make, [self]))

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
        self._bits, self._fault = bytes(4 * self.words), engine_failed(error)
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
    def allowed(self) -> bytes:
        """The bits of the tokens that may come next, as `GrammarState.fill` writes them; none, if it can't go
        on."""
        assert self.ready, "a mask is read before it is made"
        return _one_bit(self.forced[0], self.words) if self.forced else self._bits

    def accept(self, token: int) -> None:
        """Take the token that was sampled, and ask for the mask after it."""
        assert self.ready, "a token was sampled without a mask"
        if self.forced:
            first = self.forced.popleft()
            assert token == first, "another token than the one that is forced"
            return
        if self._share_s < WAIT_S:
            self._share_s = min(self._share_s + SHARE_S, WAIT_S)
        if self._foreseen and self._foreseen[0][0] == token:
            self.state.accept(token)
            self._bits = self._foreseen.popleft()[1].allowed  # the token after it is chosen already
            return
        if self._foreseen:
            self._foreseen.clear()
        known = self.state.accept(token)
        if known is None or self.put(known):
            self.ready = False
            self._threads.ask(self)
        else:
            self.pace.note(0.0)

    def put(self, made: MadeMask, more: bool = True) -> bool:
        """Take a mask for what may come behind `forced`; whether another is to be made behind that.

        So it is where masks force tokens, the last of which isn't the answer's last, until one isn't known.
        `more`: whether `forced` may become longer.
        """
        known: MadeMask | None = made
        while known is not None:
            self._bits = known.bits
            if known.only is None or not more or len(self.forced) >= MOST_FORCED:
                return False
            self.forced.append(known.only)
            if known.only in self._ends:
                return False
            known = self.state.accept(known.only)
        return True

    def takes(self, drafts: Sequence[int]) -> int:
        """How many drafts may come next, one after the other."""
        assert self.ready, "drafts without a mask"
        known = [draft == token for draft, token in zip(drafts, self.forced, strict=False)]
        if not all(known):
            return known.index(False)
        return len(known) + self.state.takes(drafts[len(known) :])

    def foresee(self, drafts: Sequence[int]) -> list[Foreseen]:
        """Masks of the tokens that may follow each of the drafts that it `takes`."""
        forced = list(self.forced)[1 : len(drafts) + 1]
        masks = [Foreseen(_one_bit(token, self.words)) for token in forced]
        if self.forced and len(masks) < len(drafts):
            masks.append(Foreseen(self._bits))
        self._foreseen.clear()
        state = self.state.copy()
        for token in drafts[len(masks) :]:
            known = state.accept(token)
            if known is None:
                bits = torch.zeros(self.words, dtype=torch.int32)
                state.fill(bits)
                known = MadeMask(bits.numpy().tobytes(), None)
            self._foreseen.append((token, Foreseen(known.bits)))
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


def make(asked: Sequence[Mask], processors: int = 1) -> float:
    """Make several masks behind what they have taken, and behind what is forced there.

    `processors`: that share the work. Returns the seconds that it took. A failure is passed to each of the
    masks, so that none is waited for in vain.
    """
    begun, spent = time.monotonic(), time.thread_time()
    try:
        _make(asked, begun, processors)
    except BaseException as error:  # what Rust panics at is not an Exception
        logger.exception("masks of grammars can't be made")
        for mask in asked:
            mask.fail(error)
        return time.monotonic() - begun
    alone = len(asked) == 1  # a thread that waits for Python's lock would take its mask for a slow one
    took_s = time.thread_time() - spent if alone else time.monotonic() - begun
    for mask in asked:
        if alone or took_s < QUICK_S:  # else one of them took long, and it isn't known which
            mask.pace.note(took_s * processors / len(asked) / (1 + len(mask.forced)))
        mask.made()
    return took_s


def _make(asked: Sequence[Mask], begun: float, processors: int) -> None:
    """`make`, which began at `begun`, in monotonic seconds."""
    for kind in {type(mask.state) for mask in asked}:
        left = [mask for mask in asked if type(mask.state) is kind and not mask.dropped]
        while left:
            bits = torch.empty(len(left), left[0].words, dtype=torch.int32)
            kind.fill_all([mask.state for mask in left], bits, processors)
            more, lines = time.monotonic() < begun + FORCING_S, bits.numpy()
            narrow = np.count_nonzero(lines[:, :FIRST_WORDS], axis=1) <= 1  # of which few force a token
            rows = zip(left, lines, narrow.tolist(), strict=True)
            left = [
                mask
                for mask, row, may in rows
                if mask.put(MadeMask.of(row) if may else MadeMask(row.tobytes(), None), more)
            ]


def _one_bit(token: int, words: int) -> bytes:
    """The mask that allows one token alone."""
    return (1 << token).to_bytes(4 * words, "little")


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
    bits = torch.empty(len(masks), (vocab + 31) // 32, dtype=torch.int32, pin_memory=pinned)
    rows = memoryview(bits.numpy().data).cast("B")  # numpy would let go of Python's lock for each of them
    size = 4 * bits.shape[1]
    for start, mask in zip(count(0, size), masks, strict=False):
        if isinstance(mask, Mask) and not mask.ready:
            mask.wait()
        rows[start : start + size] = b"\xff" * size if mask is None else mask.allowed
    return bits


def fill_allowed(masks: Sequence[Mask | Foreseen | None], vocab: int, device: torch.device) -> torch.Tensor:
    """Which tokens each row may take next, `[rows, vocab]` bool on `device`; one copy for all of them."""
    bits = allowed_bits(masks, vocab, pinned=device.type == "cuda")
    return unpacked(bits.to(device, non_blocking=True), vocab)


def unpacked(bits: torch.Tensor, vocab: int) -> torch.Tensor:
    """`bits` `[rows, ceil(vocab / 32)]` int32 as `[rows, vocab]` bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
