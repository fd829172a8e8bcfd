"""The engine's thread when the engine breaks its promise never to raise."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

import snugvl
from snugvl.backends.engine_thread import EngineWorker, Receiver
from snugvl.backends.native.backend import NativeBackend
from snugvl.core.messages import Request, Text, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine.request import TokenOutput
from snugvl.errors import EngineError
from tests.patience import PATIENCE_S, until


@pytest.fixture
def noted() -> Iterator[list[BaseException | None]]:
    """What threads end with, instead of pytest's own hook."""
    seen: list[BaseException | None] = []
    before = threading.excepthook
    threading.excepthook = lambda event: seen.append(event.exc_value)
    yield seen
    threading.excepthook = before


def test_a_bug_in_the_engine_ends_what_runs_and_refuses_what_comes(
    monkeypatch: pytest.MonkeyPatch, noted: list[BaseException | None]
) -> None:
    with snugvl.load("pocket", device="cpu") as model:
        backend = model.backend
        assert isinstance(backend, NativeBackend)

        def broken(*_: object) -> None:
            raise AttributeError("a bug")

        monkeypatch.setattr(type(backend._engine), "step", broken)
        stream = backend.submit(Request((user(Text("hello")),)))
        with pytest.raises(EngineError, match="the engine's thread ended: AttributeError: a bug"):
            list(stream)
        backend._worker._thread.join(PATIENCE_S)
        assert [type(error) for error in noted] == [AttributeError]
        with pytest.raises(EngineError):
            backend.submit(Request((user(Text("hello")),)))


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError("a bug"), ImportError("a bug")])
@pytest.mark.sample("error1")
def test_a_fault_of_an_answers_text_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It ended the engine, and everybody's answers with it."""
    with snugvl.load("pocket", device="cpu") as model:
        backend = model.backend
        assert isinstance(backend, NativeBackend)
        expected = [delta.text for delta in backend.submit(Request((user(Text("hello")),)))]
        right, broken = Receiver.receive, list[Receiver]()

        def receive(self: Receiver, output: TokenOutput) -> bool:
            if not broken:
                broken.append(self)
            if self is broken[0]:
                raise error
            return right(self, output)

        monkeypatch.setattr(Receiver, "receive", receive)
        wrong = backend.submit(Request((user(Text("hello")),)))
        other = backend.submit(Request((user(Text("hello")),)))
        with pytest.raises(EngineError, match="a bug"):
            list(wrong)
        assert "".join(delta.text for delta in other) == "".join(expected)
        assert not backend._receivers
        backend._worker.call(backend._engine.check_integrity)


def test_who_is_interrupted_while_a_request_is_accepted_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+C: it ran to its end with nobody to read it."""
    with snugvl.load("pocket", device="cpu") as model:
        backend = model.backend
        assert isinstance(backend, NativeBackend)
        call = backend._worker.call

        def interrupted(function: Callable[[], object]) -> None:
            call(function)
            raise KeyboardInterrupt

        with monkeypatch.context() as pressed:
            pressed.setattr(backend._worker, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                backend.submit(Request((user(Text("hello")),), SamplingParams(max_tokens=3000)))
        assert backend.stats().running + backend.stats().waiting == 0
        assert not backend._receivers


def test_nobody_waits_for_a_worker_that_closes() -> None:
    """Between the look whether it is open and the put, it may close: run often, as that is a race."""

    class Idle:
        has_work = hurries = False

        def step(self, _: Callable[[], None]) -> list[TokenOutput]:
            return []

    for _ in range(50):
        worker, ended = EngineWorker(Idle(), lambda _: None), []

        def ask(worker: EngineWorker = worker, ended: list[int] = ended) -> None:
            with contextlib.suppress(EngineError):
                while True:
                    worker.call(lambda: None)
            ended.append(1)

        askers = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for asker in askers:
            asker.start()
        worker.close()
        for asker in askers:
            asker.join(PATIENCE_S)
        assert len(ended) == 4


def test_what_rust_panics_at_in_a_job_is_told_to_whoever_asked() -> None:
    class PanicError(BaseException):
        pass

    class Idle:
        has_work = hurries = False

        def step(self, _: Callable[[], None]) -> list[TokenOutput]:
            return []

    def panics() -> None:
        raise PanicError("out of bounds")

    worker = EngineWorker(Idle(), lambda _: None)
    with pytest.raises(EngineError, match="PanicError: out of bounds"):
        worker.call(panics)
    assert worker.call(lambda: 5) == 5, "the engine goes on"
    worker.close()


class Hurries:
    """An engine whose steps start before the outputs of the last one are delivered."""

    def __init__(self, steps: int) -> None:
        self.left, self.said = steps, list[object]()

    @property
    def has_work(self) -> bool:
        return self.left > 0

    @property
    def hurries(self) -> bool:
        return self.left % 3 != 0

    def step(self, meanwhile: Callable[[], None]) -> list[TokenOutput]:
        self.said.append("start")
        if self.left % 4:  # else there is nothing to wait for
            meanwhile()
        self.left -= 1
        return [TokenOutput(str(self.left), 0, 1)]


def test_outputs_are_delivered_in_their_order_once_the_next_step_has_begun() -> None:
    engine, ended = Hurries(7), threading.Event()

    def deliver(output: TokenOutput) -> None:
        engine.said.append(output.request_id)
        if output.request_id == "0":
            ended.set()

    worker = EngineWorker(engine, deliver)
    assert ended.wait(PATIENCE_S)
    worker.close()
    assert [each for each in engine.said if each != "start"] == list("6543210")
    assert engine.said == [
        "start", "6",  # six are left, a multiple of three: it doesn't hurry
        "start", "start", "5", "start", "4", "3", "start", "start", "2", "start", "1", "0",
    ]  # fmt: skip


def test_what_waits_is_delivered_before_a_job_and_before_the_end() -> None:
    seen: list[str] = []
    engine, go_on = Hurries(100), threading.Event()
    worker = EngineWorker(engine, lambda output: seen.append(output.request_id))
    told = worker.call(lambda: (go_on.set(), engine.left, seen[-1] if seen else "100"))
    assert told[2] == str(told[1]), "all of what was said before it"
    worker.close()
    assert seen == [str(number) for number in range(99, engine.left - 1, -1)]


class Endless:
    """An engine with work for ever, which does whatever comes next."""

    has_work, hurries = True, False

    def __init__(self) -> None:
        self.next: Callable[[], None] = lambda: None
        self.begun = threading.Event()

    def step(self, _: Callable[[], None]) -> list[TokenOutput]:
        self.begun.set()
        self.next()
        return []


class PanicError(BaseException):
    """As Rust's are: no `Exception`."""


@pytest.mark.parametrize("error", [PanicError("a bug"), SystemExit("a bug"), MemoryError("a bug")])
def test_whatever_ends_the_thread_is_told(noted: list[BaseException | None], error: BaseException) -> None:
    """And what is asked later is told why."""

    def broken() -> None:
        raise error

    engine, died = Endless(), list[EngineError]()
    worker = EngineWorker(engine, lambda _: None, died.append)
    engine.next = broken
    worker._thread.join(PATIENCE_S)
    assert noted == [error]
    assert "the engine's thread ended" in str(died[0])
    with pytest.raises(EngineError, match=r"the engine's thread ended: .*: a bug"):
        worker.call(lambda: None)
    worker.post(lambda: None)
    worker.close()


def test_what_comes_during_a_crash_is_refused(noted: list[BaseException | None]) -> None:
    """It was run when the engine was dead already: a request was accepted whose answer never came."""
    engine, ran = Endless(), list[int]()
    died, ends = list[EngineError](), list[BaseException]()
    worker = EngineWorker(engine, lambda _: None, died.append)

    def ask() -> None:
        try:
            worker.call(lambda: ran.append(1))
        except EngineError as error:
            ends.append(error)

    def breaks() -> None:
        asker.start()
        until(lambda: not worker._jobs.empty())
        raise ValueError("a bug")

    asker = threading.Thread(target=ask, daemon=True)
    engine.next = breaks
    until(lambda: ends)
    assert not ran
    assert "ValueError: a bug" in str(ends[0])


def test_a_bug_in_delivering_within_a_step_ends_the_engine(noted: list[BaseException | None]) -> None:
    died: list[EngineError] = []

    def deliver(_: TokenOutput) -> None:
        raise ValueError("a bug")

    worker = EngineWorker(Hurries(5), deliver, died.append)
    worker._thread.join(PATIENCE_S)
    assert [type(error) for error in noted] == [ValueError]
    assert "a bug" in str(died[0])
    with pytest.raises(EngineError):
        worker.call(lambda: None)
