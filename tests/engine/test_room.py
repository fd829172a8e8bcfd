"""The workspace is claimed in one piece: what the plan has beside cache and graphs and isn't there yet."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from snugvl.config import EngineConfig
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.recordings import Recordings
from snugvl.engine.memory import room as room_module
from snugvl.engine.memory.pressure import DeviceMemory, Planned, Watch
from snugvl.engine.memory.room import SMALL_BYTES, STATES_SMALL_BYTES, Room
from tests.engine.test_pressure import BLOCK, CONFIG, Card, steps
from tests.engine.test_step_graphs import Again
from tests.engine.toy import Toy, oracle, request, tokens

MIB = 1 << 20
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "pooled_bytes", lambda: 0)


def room_of(held_mib: int) -> Room:
    memory = DeviceMemory(500 * MIB, held_mib * MIB)
    watch = Watch(lambda: memory, Planned(1000 * MIB, graph_bytes=44 * MIB))
    engine = Engine(Toy(), EngineConfig(num_blocks=8, max_model_len=64), watch)
    assert engine._room is not None
    return engine._room


def test_what_is_missing_is_taken_and_left_with_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    here, whole = room_of(800), room_of(950)
    with monkeypatch.context() as patch:
        patch.setattr(Toy, "device", GPU)
        patch.setattr(torch, "empty", lambda nbytes, **wanted: taken.append((nbytes, wanted)))
        here.claim()
        whole.claim()  # 6 MiB are missing, and small tensors need more
    wanted = {"dtype": torch.uint8, "device": GPU}
    assert taken == [((1000 - 800 - 44) * MIB - SMALL_BYTES, wanted)]


def test_graphs_that_are_there_are_not_to_come_and_states_leave_more_for_small_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    here = room_of(800)
    with monkeypatch.context() as patch:
        patch.setattr(Toy, "device", GPU)
        patch.setattr(torch, "empty", lambda nbytes, **_wanted: taken.append(nbytes))
        patch.setattr(room_module, "pooled_bytes", lambda: 32 * MIB)
        here.claim()
        patch.setattr(room_module, "pooled_bytes", lambda: 64 * MIB)
        here.claim()
        patch.setattr(here._runner.cache, "states", object())
        here.claim()
    few, all_of_them = (1000 - 800 - 12) * MIB - SMALL_BYTES, (1000 - 800) * MIB - SMALL_BYTES
    assert taken == [few, all_of_them, all_of_them - STATES_SMALL_BYTES]


def test_the_workspace_is_claimed_again_when_a_graph_needed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here, claims = room_of(800), [0]
    monkeypatch.setattr(here, "claim", lambda: claims.append(1))
    here._runner.graphs.released = True
    here.wanted(at_once=False)
    here.wanted(at_once=False)
    assert claims == [0, 1]


def test_cublas_comes_before_the_workspace_and_both_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    here = room_of(800)
    with monkeypatch.context() as patch:
        patch.setattr(Toy, "device", GPU)
        patch.setattr(torch, "ones", lambda *_shape, **_wanted: order.append("ones"))
        patch.setattr(torch, "mm", lambda _a, _b: order.append("product"))
        patch.setattr(torch, "empty", lambda _nbytes, **_wanted: order.append("claim"))
        here.begin()
    assert order == ["ones", "product", "claim"]


def test_a_workspace_that_is_not_there_is_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    here = room_of(800)

    def full(_nbytes: int, **_wanted: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 148.00 MiB.")

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "device", GPU)
        patch.setattr(torch, "empty", full)
        here.claim()


class Roomy(Card):
    """One with CUDA graphs of steps with prompts, which the plan had room for."""

    graphs = 200 * MIB

    def read(self) -> DeviceMemory:
        memory = super().read()
        recordings = None if self.engine is None else self.engine._runner.recordings
        held = self.graphs if recordings is None or recordings.on else 0
        return DeviceMemory(memory.free_bytes + self.graphs - held, memory.held_bytes + held)

    def watch(self) -> Watch:
        planned = Planned(64 * BLOCK + 512 * MIB + self.graphs, self.graphs)
        return Watch(self.read, planned, self.tell, lambda: self.now)


def test_graphs_of_prompts_go_before_the_cache_does_and_come_back_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = Roomy()
    here = Engine(Toy(), replace(CONFIG, step_graph_bytes=card.graphs), card.watch())
    assert here._room is not None
    here._room._watch._block_bytes = BLOCK
    card.engine = here
    made = Recordings(Again(), here.model, 1)
    here._runner.record(made)
    claims: list[int] = []
    watch = here._room._watch
    monkeypatch.setattr(here._room, "claim", lambda: claims.append(watch.missing_bytes(64)))

    def look(neighbour: int, seconds: float = 1.0) -> tuple[bool, int]:
        card.neighbour = neighbour * MIB
        card.pass_time(seconds)
        here.look()
        return made.on, here.stats.num_blocks

    for name in "abc":
        here.add(request(name, *range(20)))
        steps(here, card)
    assert made.made
    assert look(0) == (True, 64)
    assert look(100) == (False, 64), "the cache keeps all that it has"
    assert not made._replays
    assert claims[1:] == [0], "nothing is missing of what is still planned"
    assert "steps with prompts go without CUDA graphs" in caplog.text
    assert look(100) == (False, 64)
    assert look(300)[1] < 64
    assert look(100)[1] < 64
    assert look(100, 11) == (False, 64), "first the cache"
    for _ in range(12):
        assert look(100) == (False, 64), "there is no room for graphs"
    assert look(0) == (False, 64)
    assert look(0, 9) == (False, 64)
    assert look(0, 2) == (True, 64)
    here.add(request("d", *range(20)))
    assert tokens(steps(here, card)) == oracle(Toy(), request("d", *range(20)), 8)
