"""The engine's thread when the engine breaks its promise never to raise."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

import snugvl
from snugvl.backends.native.backend import NativeBackend
from snugvl.backends.native.worker import EngineWorker
from snugvl.core.messages import Request, Text, user
from snugvl.engine.request import TokenOutput
from snugvl.errors import EngineError
from tests.patience import PATIENCE_S


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

        def broken() -> None:
            raise AttributeError("a bug")

        monkeypatch.setattr(backend._engine, "step", broken)
        stream = backend.submit(Request((user(Text("hello")),)))
        with pytest.raises(EngineError, match="the engine's thread ended: AttributeError: a bug"):
            list(stream)
        backend._worker._thread.join(PATIENCE_S)
        assert [type(error) for error in noted] == [AttributeError]
        with pytest.raises(EngineError):
            backend.submit(Request((user(Text("hello")),)))


def test_nobody_waits_for_a_worker_that_closes() -> None:
    """Between the look whether it is open and the put, it may close: run often, as that is a race."""

    class Idle:
        has_work = False

        def step(self) -> list[TokenOutput]:
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
        has_work = False

        def step(self) -> list[TokenOutput]:
            return []

    def panics() -> None:
        raise PanicError("out of bounds")

    worker = EngineWorker(Idle(), lambda _: None)
    with pytest.raises(EngineError, match="PanicError: out of bounds"):
        worker.call(panics)
    assert worker.call(lambda: 5) == 5, "the engine goes on"
    worker.close()
