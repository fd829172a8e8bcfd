"""The engine's thread when the engine breaks its promise never to raise."""

import threading
from collections.abc import Iterator

import pytest

import snugvl
from snugvl.backends.native import NativeBackend
from snugvl.backends.protocol import Request, Text, user
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
