"""A model that is closed, or fails to load, leaves nothing in its process, without the garbage collector."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import snugvl
from snugvl.backends.native import loading
from snugvl.backends.native.backend import NativeBackend
from snugvl.core.messages import Request, Text, user
from snugvl.engine import claims
from snugvl.errors import DoesNotFit, EngineError
from snugvl.models.loader import load_model
from tests.patience import until

PICTURE = Path(__file__).parents[2] / "examples" / "images" / "shapes.png"
ROUNDS = """
import json, sys, threading, time, psutil, snugvl
this, rows = psutil.Process(), []
for _ in range(4):
    with snugvl.load("pocket", device="cpu", backend=sys.argv[2]) as model:
        model.ask(sys.argv[1], "How many shapes?", sampling=snugvl.SamplingParams(max_tokens=8))
        model.detect(sys.argv[1], sampling=snugvl.SamplingParams(max_tokens=24))
        held = this.memory_info().rss
    for _ in range(200):  # a thread that has done its work may be counted for a moment more
        if threading.active_count() == 1:
            break
        time.sleep(0.05)
    rows.append((this.memory_info().rss, held, threading.active_count(), this.num_fds()))
print(json.dumps(rows))
"""


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    yield
    if collects:
        gc.enable()


def watched(backend: Any) -> dict[str, "weakref.ref[Any]"]:
    engine = backend._engine
    held = (engine.model, next(engine.model.parameters()), engine._cache.storage, engine._runner)
    return {type(each).__name__: weakref.ref(each) for each in (*held, engine._scheduler, engine._encoder)}


def left(references: dict[str, "weakref.ref[Any]"]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.sample("ngram")
def test_what_is_closed_is_gone(speculation: Any) -> None:
    """Though somebody still has the model, and a picture and a prefix are cached."""
    with snugvl.load("pocket", device="cpu", speculation=speculation) as model:
        model.ask(PICTURE, "How many shapes?", sampling=snugvl.SamplingParams(max_tokens=4))
        model.detect(PICTURE, sampling=snugvl.SamplingParams(max_tokens=24))  # with a grammar
        held = watched(model.backend)
        assert len(left(held)) == len(held)
    assert not left(held)
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.memory()
    with pytest.raises(EngineError, match="closed"):
        model.ask(PICTURE, "hello")


def test_what_runs_is_told_and_gone() -> None:
    model = snugvl.load("pocket", device="cpu")
    streams = [model.backend.submit(Request((user(Text("Count to a hundred.")),))) for _ in range(3)]
    held = watched(model.backend)
    model.close()
    assert not left(held)
    for stream in streams:
        with pytest.raises(EngineError, match="closed while"):
            list(stream)


def test_a_block_that_raises_closes() -> None:
    held: dict[str, weakref.ref[Any]] = {}

    def use() -> None:
        with snugvl.load("pocket", device="cpu") as model:
            held.update(watched(model.backend))
            raise LookupError

    with pytest.raises(LookupError) as raised:
        use()
    assert raised.value.__traceback__ is not None
    assert not left(held)


def test_a_model_that_is_dropped_ends() -> None:
    model = snugvl.load("pocket", device="cpu")
    model.ask(PICTURE, "How many shapes?", sampling=snugvl.SamplingParams(max_tokens=4))
    backend = model.backend
    assert isinstance(backend, NativeBackend)
    held, thread = watched(backend), backend._worker._thread
    held["backend"] = weakref.ref(backend)
    del model, backend
    thread.join()
    assert not left(held)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_a_bug_has_ended_is_gone_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = snugvl.load("pocket", device="cpu")
    backend = model.backend
    assert isinstance(backend, NativeBackend)
    held = watched(backend)

    def broken(_: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    backend._engine.step = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineError, match="a bug"):
        model.ask(PICTURE, "hello")
    model.close()
    assert not left(held)


def no_room(*_: object) -> None:
    raise DoesNotFit("no room for the KV cache")


@pytest.mark.parametrize("where", ["weights", "after"])
def test_a_load_that_fails_leaves_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+C between two weights, and no room for the cache, while somebody looks at the error."""
    made: list[weakref.ref[Any]] = []
    before = set(threading.enumerate())

    def noted(*arguments: Any, **options: Any) -> Any:
        outlined = options.pop("outlined")

        def note(network: Any) -> None:
            made.append(weakref.ref(network))
            outlined(network)

        return load_model(*arguments, outlined=note, **options)

    def progress(_: str, done: float) -> None:
        if where == "weights" and done > 0.5:
            raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_model", noted)
    monkeypatch.setattr(claims, "_claims", weakref.WeakSet())
    if where == "after":
        monkeypatch.setattr(loading, "Engine", no_room)
    with pytest.raises(KeyboardInterrupt if where == "weights" else DoesNotFit) as raised:
        snugvl.load("pocket", device="cpu", progress=progress)
    assert raised.value.__traceback__ is not None
    assert made[0]() is None
    assert not claims._claims
    until(lambda: set(threading.enumerate()) <= before)


def test_transformers_gives_back_its_model() -> None:
    """Modules and hooks refer to each other there; the tensors go all the same."""
    with snugvl.load("pocket", device="cpu", backend="transformers") as model:
        model.ask(PICTURE, "How many shapes?", sampling=snugvl.SamplingParams(max_tokens=2))
        engine: Any = model.backend
        network = engine._engine.model
        assert sum(each.nbytes for each in network.parameters())
    assert not sum(each.nbytes for each in (*network.parameters(), *network.buffers()))
    watched = weakref.ref(network)
    del network
    gc.collect()
    assert watched() is None
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", pytest.param("transformers", marks=pytest.mark.extended)])
@pytest.mark.extended
def test_rounds_leave_no_more_than_two_do(backend: str) -> None:
    """Host memory, threads and open files of a process that only loads, asks and closes."""
    command = [sys.executable, "-c", ROUNDS, str(PICTURE), backend]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(run.stdout.splitlines()[-1])
    (second, held, threads, files), last = rows[1], rows[-1]
    # A quarter of what one engine holds; the C library's heap is never cut to the same byte.
    assert last[0] - second < max((held - second) / 4, 24 << 20), rows
    assert last[2:] == [threads, files], rows
    assert threads == 1


def test_torch_is_what_keeps_count() -> None:
    """What is called on a GPU is there in the torch that runs."""
    assert hasattr(torch.cuda, "get_per_process_memory_fraction")
    if torch.cuda.is_available():
        assert hasattr(torch._C, "_cuda_clearCublasWorkspaces")
        assert hasattr(torch._C, "_host_emptyCache")
