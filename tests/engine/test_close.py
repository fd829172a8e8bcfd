"""An engine lets go of all that it holds when it is closed, without the garbage collector."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from snugvl.core.config import EngineConfig
from snugvl.engine import claims
from snugvl.engine.claims import DeviceClaim, loading_onto
from snugvl.engine.engine import Engine
from snugvl.engine.sampling.masks import MaskPace, MaskThreads
from snugvl.layers.device import capturing, shared
from snugvl.models.loader import load_model
from tests import hybrid
from tests.engine.test_network import requests
from tests.engine.test_prefill_graphs import recorded
from tests.engine.test_speculation_states import asked
from tests.engine.toy import engine, picture, request, run
from tests.models.test_weight_stream import streamed
from tests.patience import until

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    yield
    if collects:
        gc.enable()


def left(watched: dict[str, "weakref.ref[Any]"]) -> list[str]:
    return [name for name, reference in watched.items() if reference() is not None]


def parts(here: Engine) -> dict[str, "weakref.ref[Any]"]:
    held = {
        "network": here.model,
        "weights": next(iter(here.model.parameters()), here.model),  # type: ignore[attr-defined]
        "cache": here._cache.storage,
        "runner": here._runner,
        "scheduler": here._scheduler,
        "encoder": here._encoder,
        "graphs": here._runner.graph_cache,
        "drafter": here._runner.drafter or here._runner.graphs,
        "states": here._cache.states or here._cache,
    }
    return {name: weakref.ref(value) for name, value in held.items()}


def test_a_whole_engine_ends(tmp_path: Path) -> None:
    """With recurrent states, a predictor, and graphs of steps and of pictures."""
    folder = hybrid.write(tmp_path, hybrid.Options(predictor=True))
    model = load_model(folder, dtype=torch.float32, device=CPU, predictor=True)
    sizes = EngineConfig(
        num_blocks=80, block_size=8, max_model_len=160, max_batched_tokens=40, speculation="mtp"
    )
    here = Engine(model, sizes)
    recorded(here)
    for _ in range(2):
        run(here, *asked())
        run(here, *requests())
    watched = parts(here)
    del model
    assert not set(watched) - set(left(watched)), "they are there until then"
    here.close()
    assert not left(watched)
    here.close()


def test_what_runs_ends_too() -> None:
    """In the middle of pictures, prompts and answers; whoever has the network goes on with it."""
    here = engine(num_blocks=20, max_batched_tokens=8)
    for index in range(6):
        here.add(request(str(index), *range(1, 12), picture(index), max_tokens=20))
    for _ in range(5):
        here.step()
    model, watched = here.model, parts(here)
    here.close()
    assert set(left(watched)) <= {"network", "weights"}
    del model
    assert not left(watched)


def test_a_streamed_tower_ends(tiny_untied: Path) -> None:
    """A pass refers to the stream whose last pass it is."""
    model = load_model(tiny_untied, dtype=torch.float32, device=CPU)
    stream = weakref.ref(streamed(model.tower))
    here = Engine(model, EngineConfig(num_blocks=40, block_size=8, max_model_len=96, max_num_seqs=4))
    run(here, *requests())
    assert here._encoder.items_encoded
    del model
    here.close()
    assert stream() is None


def test_the_threads_of_masks_end() -> None:
    threads, done, before = MaskThreads(2, 32), threading.Event(), set(threading.enumerate())
    for _ in range(2):
        threads.submit(MaskPace(), done.wait)
    assert len(set(threading.enumerate()) - before) == 2
    begun: list[int] = []
    threads.submit(MaskPace(), lambda: begun.append(1))
    threads.close()
    done.set()
    until(lambda: set(threading.enumerate()) <= before)
    assert not begun


class Cuda:
    """What is asked of torch on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[object] = []
        self.share = 0.9
        for name, value in {
            "is_initialized": lambda: True,
            "empty_cache": lambda: self.said.append("free blocks"),
            "get_per_process_memory_fraction": lambda _: self.share,
            "set_per_process_memory_fraction": lambda share, _: setattr(self, "share", share),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
            monkeypatch.setattr(torch._C, name, lambda name=name: self.said.append(name), raising=False)
        monkeypatch.setattr(claims, "_claims", weakref.WeakSet())
        monkeypatch.setattr(claims, "_limits", {})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_the_last_model_gives_back_what_all_share(cuda: Cuda) -> None:
    """While another is there, its graphs read it: only free blocks go then, and it is told of them."""
    made: list[int] = []
    table = shared(lambda: made.append(1))
    first, second = DeviceClaim(GPU), DeviceClaim(GPU)
    cuda.share = 0.25  # both were capped
    first.use(lambda: cuda.said.append("disturbed"), lambda: cuda.said.append("graphs"))
    second.use(lambda: cuda.said.append("never"), lambda: cuda.said.append("second's graphs"))
    table()
    second.release()
    assert cuda.said == ["second's graphs", "free blocks", "_host_emptyCache", "disturbed"]
    table()
    assert cuda.share == 0.25
    assert len(made) == 1
    cuda.said.clear()
    first.release()
    assert cuda.said == ["graphs", "_cuda_clearCublasWorkspaces", "free blocks", "_host_emptyCache"]
    assert cuda.share == 0.9
    table()
    assert len(made) == 2
    first.release()
    assert cuda.said.count("graphs") == 1
    assert cuda.share == 0.9


def test_nothing_is_given_back_while_a_graph_is_captured(cuda: Cuda) -> None:
    """In another thread: torch would end the capture."""
    claim, other = DeviceClaim(GPU), threading.Event()

    def release() -> None:
        other.set()
        claim.release()

    thread = threading.Thread(target=release)
    with capturing:
        thread.start()
        other.wait()
        thread.join(0.1)
        assert "free blocks" not in cuda.said
    thread.join()
    assert "free blocks" in cuda.said


def test_a_claim_that_is_dropped_counts_no_more(cuda: Cuda) -> None:
    kept, dropped = DeviceClaim(GPU), DeviceClaim(GPU)
    del dropped
    kept.release()
    assert "_cuda_clearCublasWorkspaces" in cuda.said


def test_before_there_is_a_context_nothing_makes_one(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", None)
    DeviceClaim(GPU).release()
    assert not cuda.said


def test_a_part_that_cannot_be_closed_keeps_nothing_else_open(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    claim = DeviceClaim(GPU)
    claim.use(lambda: None, broken, lambda: cuda.said.append("graphs"))
    claim.release()
    assert cuda.said[0] == "graphs"
    assert "illegal memory access" in caplog.text


class Weights:
    """Something large."""


def fails(with_what: type[BaseException], seen: list["weakref.ref[Any]"], *, caught: bool) -> None:
    weights = Weights()
    seen.append(weakref.ref(weights))
    try:
        raise with_what("half way")
    except BaseException as error:
        if caught:
            raise ValueError("said for people") from error
        raise


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_keeps_no_weights(cuda: Cuda, error: type[BaseException], caught: bool) -> None:
    seen: list[weakref.ref[Any]] = []
    mine = Weights()

    def load() -> None:
        with loading_onto(GPU) as claim:
            claim.use(lambda: None, lambda: cuda.said.append(seen[0]()))
            fails(error, seen, caught=caught)

    with pytest.raises(ValueError if caught else error) as raised:
        load()
    assert raised.value.__traceback__ is not None
    assert cuda.said[0] is None, "they are gone before torch is asked for free blocks"
    assert not claims._claims
    assert mine is not None


def test_what_somebody_was_handling_before_stays_whole(cuda: Cuda) -> None:
    seen: list[weakref.ref[Any]] = []
    try:
        fails(LookupError, seen, caught=False)
    except LookupError:
        with pytest.raises(MemoryError), loading_onto(GPU):
            raise MemoryError from None
        assert seen[0]() is not None
