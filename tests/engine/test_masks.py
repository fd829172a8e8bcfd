"""Masks that take long: whoever waits for one waits alone."""

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from snugvl.core.sampling import SamplingParams
from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.engine.sampling.grammar import KEPT_OPENINGS, GrammarState, MadeMask, Openings
from snugvl.engine.sampling.masks import (
    PART_S,
    QUICK_S,
    Mask,
    MaskPace,
    MaskThreads,
    allowed_bits,
    mask_threads,
    settle,
    unpacked,
)
from snugvl.errors import EngineError
from tests.engine.toy import Toy, engine, prompt_of, run, tokens
from tests.masks import spend, tokens_of
from tests.patience import PATIENCE_S, until

MODEL = Toy()
LONG_S = 60.0  # until a test has failed


class Slow:
    """Allows everything; the mask after `at` tokens takes until `go`."""

    def __init__(self, at: int) -> None:
        self.at, self.go, self.reached = at, threading.Event(), threading.Event()

    def start(self) -> "SlowState":
        return SlowState(self)


class SlowState(GrammarState):
    error = None

    def __init__(self, owner: Slow) -> None:
        self.owner, self.seen = owner, 0

    def fill(self, bits: torch.Tensor) -> None:
        if self.seen == self.owner.at:
            self.owner.reached.set()
            assert self.owner.go.wait(LONG_S)
        spend(2 * QUICK_S)  # so that threads make them
        bits.fill_(-1)

    def accept(self, token: int) -> None:
        self.seen += 1

    def takes(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def copy(self) -> "SlowState":
        made = SlowState(self.owner)
        made.seen = self.seen
        return made


def request(name: str, *ids: int, grammar: Slow | None = None, count: int = 12) -> EngineRequest:
    return EngineRequest(name, prompt_of(*ids)[0], SamplingParams(max_tokens=count), grammar=grammar)


def test_others_go_on_while_a_mask_is_made() -> None:
    free = tokens(run(engine(MODEL), request("a", 3, 1, 4))["a"])
    here, slow = engine(MODEL), Slow(3)
    here.add(request("slow", 3, 1, 4, grammar=slow))
    here.add(request("other", 9, 2, count=40))
    outputs: dict[str, list[int | None]] = {"slow": [], "other": []}

    def step() -> None:
        for output in here.step():
            outputs[output.request_id].append(output.token_id)

    while len(outputs["other"]) < 40:
        step()
    assert slow.reached.is_set()
    assert len(outputs["slow"]) == 3, "it waits, alone"
    here.check_integrity()
    slow.go.set()
    while here.has_work:
        step()
    assert outputs["slow"] == free, "and goes on as if it had not waited"
    assert here.stats.free_blocks == here.stats.num_blocks


def test_an_engine_with_nothing_else_to_do_waits_in_pieces() -> None:
    here, slow = engine(MODEL), Slow(1)
    here.add(request("slow", 3, grammar=slow))
    while not slow.reached.is_set():
        here.step()
    for _ in range(3):
        assert here.step() == [], "between two of them jobs are done: an abort, a question"
    here.abort("slow")
    assert not here.has_work
    slow.go.set()


def test_requests_take_turns() -> None:
    threads, first, done = MaskThreads(1, 48), threading.Event(), threading.Event()
    order: list[str] = []
    threads.submit("greedy", lambda: first.wait(LONG_S))
    for _ in range(50):
        threads.submit("greedy", lambda: order.append("greedy"))
    threads.submit("other", lambda: order.append("other"))
    threads.submit("last", done.set)
    first.set()
    assert done.wait(LONG_S)
    assert order.index("other") <= 1


def test_a_mask_waits_for_its_share_and_no_longer() -> None:
    slow = Slow(1)
    mask = Mask(slow.start(), MaskThreads(1, 48), MaskPace(1.0))
    assert mask.ready
    mask.accept(1)
    assert mask.wait(PATIENCE_S) < PATIENCE_S / 2, "its share is a few milliseconds"
    assert not mask.ready
    assert mask.wait(PATIENCE_S) < PATIENCE_S / 2, "which is spent"
    slow.go.set()
    mask.wait()
    assert mask.ready
    assert tokens_of(mask) == [*range(64)]


def test_a_mask_that_nobody_needs_is_not_made() -> None:
    threads, go, done = MaskThreads(1, 48), threading.Event(), threading.Event()
    threads.submit("first", lambda: go.wait(LONG_S))
    slow = Slow(1)
    mask = Mask(slow.start(), threads, MaskPace(1.0))
    mask.accept(1)
    mask.drop()
    go.set()
    threads.submit("b", done.set)
    assert done.wait(LONG_S)
    assert not slow.reached.is_set()


def test_threads_by_processors() -> None:
    assert [mask_threads(cores) for cores in (1, 2, 4, 16, 128)] == [1, 1, 2, 8, 8]
    assert mask_threads() >= 1


class Quick(Slow):
    """Notes which threads make its masks, and how many at a time."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.makers: list[str] = []
        self.together: list[int] = []
        self.processors: list[int] = []
        self.wait_s = 0.0  # that a mask waits for somebody else

    def start(self) -> "QuickState":  # type: ignore[override]
        return QuickState(self)


class QuickState(SlowState):
    owner: Quick

    def fill(self, bits: torch.Tensor) -> None:
        self.owner.makers.append(threading.current_thread().name)
        time.sleep(self.owner.wait_s)
        bits.fill_(-1)

    @classmethod
    def fill_all(cls, states: Sequence["QuickState"], bits: torch.Tensor, processors: int = 1) -> None:
        assert len(states) == len(bits)
        states[0].owner.together.append(len(states))
        states[0].owner.processors.append(processors)
        super().fill_all(states, bits, processors)


def test_quick_masks_are_made_together_by_who_asks_within_a_steps_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick, threads, here = Quick(), MaskThreads(1, 48), threading.current_thread().name
    paces = [MaskPace() for _ in range(3)]
    masks = [Mask(quick.start(), threads, pace) for pace in paces]
    for mask in masks:
        mask.accept(0)
        mask.wait()
    assert set(quick.makers[3:]) == {"snugvl-masks"}, "nobody knows yet how long they take"
    share = QUICK_S / 2
    monkeypatch.setattr("snugvl.engine.sampling.masks.TOGETHER_S", 2.5 * share)
    for seconds, together in ((0.0, [3]), (share, [2, 1]), (QUICK_S, [1, 1, 1])):
        for pace in paces:
            pace.seconds = seconds  # whatever this machine took
        threads._doubtful = False
        quick.together.clear()
        quick.makers.clear()
        threads.begin()
        for mask in masks:
            mask.accept(0)
        settle([*masks, None], threads)
        for mask in masks:
            mask.wait()
        assert sorted(quick.together, reverse=True) == together
        assert quick.makers.count(here) == (0 if seconds == QUICK_S else together[0])


@pytest.mark.parametrize(("seconds", "processors"), [(0.0, 1), (PART_S / 5, 1), (PART_S / 2, 3), (PART_S, 4)])
def test_processors_are_woken_for_what_there_is_to_do(seconds: float, processors: int) -> None:
    quick, threads = Quick(), MaskThreads(4, 48)
    masks = [Mask(quick.start(), threads, MaskPace(seconds)) for _ in range(4)]
    for mask in masks:
        mask.accept(0)
    settle(masks, threads)
    assert quick.processors == [processors]


def makers_of(quick: Quick, masks: list[Mask], threads: MaskThreads) -> list[str]:
    """Which threads make the masks after a token of all."""
    quick.makers.clear()
    for mask in masks:
        mask.accept(0)
    settle(masks, threads)
    for mask in masks:
        mask.wait()
    return quick.makers


def test_when_masks_take_long_together_the_next_are_made_one_by_one() -> None:
    slow, quick, threads = Slow(-1), Quick(), MaskThreads(1, 48)
    here, paces = threading.current_thread().name, [MaskPace(0.0) for _ in range(4)]
    masks = [
        Mask(each.start(), threads, pace) for each, pace in zip((slow, *[quick] * 3), paces, strict=True)
    ]
    assert makers_of(quick, masks, threads) == 3 * [here]
    assert max(pace.seconds for pace in paces) < QUICK_S, "one of them is slow, and nobody knows which"
    assert makers_of(quick, masks, threads) == 3 * ["snugvl-masks"]
    assert paces[0].seconds >= QUICK_S, "which shows when each is made for itself"
    assert max(pace.seconds for pace in paces[1:]) < QUICK_S
    assert makers_of(quick, masks, threads) == 3 * [here], "the slow one is a thread's now"


def test_masks_that_were_kept_waiting_together_are_not_slow() -> None:
    quick, threads = Quick(), MaskThreads(1, 48)
    here, paces = threading.current_thread().name, [MaskPace(0.0) for _ in range(3)]
    masks = [Mask(quick.start(), threads, pace) for pace in paces]
    for kept_s, makers in ((2 * QUICK_S, here), (2 * QUICK_S, "snugvl-masks"), (0.0, here)):
        quick.wait_s = kept_s
        assert makers_of(quick, masks, threads) == 3 * [makers]
        assert max(pace.seconds for pace in paces) < QUICK_S, "they took next to nothing of a processor"


class Own(Quick):
    """Whose masks tell answers and tokens apart: the token before, and none where it forces the next."""

    def start(self) -> "OwnState":  # type: ignore[override]
        return OwnState(self)


class OwnState(QuickState):
    def accept(self, token: int) -> None:
        self.seen = token

    def fill(self, bits: torch.Tensor) -> None:
        bits.fill_(0)
        bits[self.seen // 32] = 1 << self.seen % 32 if self.seen % 2 else 3 << self.seen % 31


def test_masks_of_a_step_stand_in_the_order_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("FORCING_S", "QUICK_S"):  # however long this process waits for a processor
        monkeypatch.setattr(f"snugvl.engine.sampling.masks.{limit}", PATIENCE_S)
    threads = MaskThreads(1, 48)
    masks = [Mask(Own().start(), threads, MaskPace(0.0), {1}) for _ in range(3)]

    def step(*given: int) -> list[list[int]]:
        for mask, token in zip(masks, given, strict=True):
            mask.accept(token)
        settle(masks, threads)
        rows = unpacked(allowed_bits([masks[1], None, *masks], 48), 48)
        assert rows[1].all()
        found = [row.nonzero()[:, 0].tolist() for row in rows]
        assert found[0] == found[3]
        return [found[2], *found[3:]]

    assert step(2, 4, 6) == [[2, 3], [4, 5], [6, 7]]
    assert step(8, 1, 10) == [[8, 9], [1], [10, 11]]


def test_a_mask_that_waits_for_others_is_not_slow() -> None:
    quick, threads, pace = Quick(), MaskThreads(1, 48), MaskPace()
    mask = Mask(quick.start(), threads, pace)
    quick.wait_s = 2 * QUICK_S
    mask.accept(0)
    mask.wait()
    assert quick.makers[-1] == "snugvl-masks"
    assert pace.seconds < QUICK_S, "it took next to nothing of a processor"


class Known(SlowState):
    """Knows the masks after even tokens (7 after 8; 2 or 3 after the others); after odd ones all may come."""

    def __init__(self, owner: Slow) -> None:
        super().__init__(owner)
        self.taken: list[int] = []

    def accept(self, token: int) -> MadeMask | None:
        self.taken.append(token)
        return None if token % 2 else KNOWN[token == 8]


KNOWN = MadeMask((0b1100).to_bytes(8, "little"), None), MadeMask((1 << 7).to_bytes(8, "little"), 7)


def test_a_mask_that_is_known_is_made_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, pace = MaskThreads(1, 48), MaskPace(QUICK_S, True)
    state = Known(Slow(-1))
    mask = Mask(state, threads, pace, {9})
    monkeypatch.setattr(MaskThreads, "ask", None)
    mask.accept(4)
    assert mask.ready
    assert tokens_of(mask) == [2, 3]
    assert pace.seconds < QUICK_S, "it took no time"
    monkeypatch.undo()
    mask.accept(8)
    assert not mask.ready, "7 is forced, and behind that nobody knows"
    mask.wait()
    assert (list(mask.forced), state.taken) == ([7], [4, 8, 7])
    mask.accept(7)
    assert tokens_of(mask) == [*range(64)]
    ending = Mask(Known(Slow(-1)), threads, pace, {7})
    ending.accept(8)
    assert ending.ready
    assert ending.ends, "nobody asks for a mask behind its last token"


def test_what_was_dropped_is_not_made_with_the_others() -> None:
    quick, threads = Quick(), MaskThreads(1, 48)
    masks = [Mask(quick.start(), threads, MaskPace(0.0)) for _ in range(3)]
    for mask in masks:
        mask.accept(0)
    masks[1].drop()
    settle(masks[::2], threads)
    assert quick.together == [2]


class Fixed:
    """Begins with 3, then 7 or the end of an answer, then one of 4 and 5; notes how often it is filled in."""

    def __init__(self) -> None:
        self.openings = Openings()
        self.fills = 0
        self.broken = False


class FixedState(GrammarState):
    def __init__(self, owner: Fixed) -> None:
        self.owner, self.seen = owner, list[int]()

    @property
    def openings(self) -> Openings | None:
        return None if self.seen else self.owner.openings

    @property
    def error(self) -> str | None:
        return "it broke" if self.owner.broken and self.seen else None

    def fill(self, bits: torch.Tensor) -> None:
        self.owner.fills += 1
        allowed = () if self.error else ((3,), (7,), (4, 5))[len(self.seen)]
        bits.zero_()
        for token in allowed:
            bits[0] += 1 << token

    def accept(self, token: int) -> None:
        self.seen.append(token)

    def takes(self, tokens: Sequence[int]) -> int:
        return 0

    def copy(self) -> "FixedState":
        made = FixedState(self.owner)
        made.seen = [*self.seen]
        return made


def begun(owner: Fixed, threads: MaskThreads, ends: tuple[int, ...] = ()) -> Mask:
    mask = Mask(FixedState(owner), threads, MaskPace(), ends)
    until(lambda: mask.ready)
    return mask


def test_answers_that_begin_alike_make_their_first_masks_once() -> None:
    owner, threads = Fixed(), MaskThreads(2, 32)
    first = begun(owner, threads)
    assert (list(first.forced), owner.fills) == ([3, 7], 3)
    first.accept(3)  # what it does from now on is its own
    others = [begun(owner, threads) for _ in range(3)]
    assert owner.fills == 3
    for mask in others:
        assert list(mask.forced) == [3, 7]
        assert mask.pace.known
        assert mask.state.seen == [3, 7]  # type: ignore[attr-defined]
        for token in (3, 7):
            assert mask.forced[0] == token
            mask.accept(token)
        assert tokens_of(mask) == [4, 5]
    ended = begun(owner, threads, (7,))
    assert ended.ends
    assert list(ended.forced) == [3, 7]
    assert owner.fills == 5, "nobody asks for a mask behind its last token"
    assert set(owner.openings) == {frozenset(), frozenset({7})}


def test_a_beginning_that_breaks_is_nobody_elses() -> None:
    owner, threads = Fixed(), MaskThreads(2, 32)
    owner.broken = True
    assert begun(owner, threads).forced
    assert not owner.openings
    owner.broken = False
    assert list(begun(owner, threads).forced) == [3, 7]
    assert owner.openings


def test_a_beginning_without_forced_tokens_is_not_kept() -> None:
    """What comes behind a token that was chosen is no answer's beginning but its own."""

    class Free(FixedState):
        def fill(self, bits: torch.Tensor) -> None:
            bits[0] = (1 << 4) + (1 << 5) if not self.seen else 1 << 7

    owner, threads = Fixed(), MaskThreads(2, 32)
    mask = Mask(Free(owner), threads, MaskPace(), {7})
    assert mask.ready
    mask.accept(4)
    settle([mask], threads)
    until(lambda: mask.ready)
    assert list(mask.forced) == [7]
    assert not owner.openings


def test_a_state_that_took_a_token_begins_for_itself() -> None:
    owner, threads = Fixed(), MaskThreads(2, 32)
    begun(owner, threads)
    state = FixedState(owner)
    state.accept(3)
    mask = Mask(state, threads, MaskPace())
    until(lambda: mask.ready)
    assert list(mask.forced) == [7]
    assert list(owner.openings) == [frozenset()]


def test_of_how_answers_begin_only_as_many_kinds_are_kept_as_there_is_room() -> None:
    """What ends an answer is a client's choice: another one with every request."""
    owner, threads = Fixed(), MaskThreads(2, 32)
    for token in range(8, 8 + 3 * KEPT_OPENINGS):
        begun(owner, threads, (token,))
    last = 8 + 3 * KEPT_OPENINGS - 1
    assert list(owner.openings) == [frozenset({last - back}) for back in reversed(range(KEPT_OPENINGS))]


class Failing(Slow):
    """Allows everything; the mask after `at` tokens fails."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__(-1)
        self.fails_at, self.error = at, error

    def start(self) -> "FailingState":
        return FailingState(self)


class FailingState(SlowState):
    def fill(self, bits: torch.Tensor) -> None:
        assert isinstance(self.owner, Failing)
        if self.seen == self.owner.fails_at:
            raise self.owner.error
        super().fill(bits)

    def copy(self) -> "FailingState":
        made = FailingState(self.owner)
        made.seen = self.seen
        return made


class PanicError(BaseException):
    """As Rust's are: no `Exception`."""


@pytest.mark.parametrize("error", [MemoryError("no more"), PanicError("out of bounds"), SystemExit(1)])
def test_a_mask_that_fails_ends_its_request_and_nobody_elses(error: BaseException) -> None:
    """In a thread: the request waited for ever, and the thread was gone."""
    here = engine(MODEL)
    free = tokens(run(here, request("a", 3, 1, 4))["a"])
    here.add(request("fails", 3, 1, 4, grammar=Failing(2, error)))
    here.add(request("other", 3, 1, 4, grammar=Slow(-1)))
    outputs: dict[str, list[TokenOutput]] = {"fails": [], "other": []}

    def step() -> bool:
        for output in here.step():
            outputs[output.request_id].append(output)
        return not here.has_work

    until(step)
    last = outputs["fails"][-1]
    assert type(last.error) is EngineError
    assert type(error).__name__ in str(last.error)
    assert tokens(outputs["other"]) == free
    here.check_integrity()
    assert here.stats.free_blocks == here.stats.num_blocks
