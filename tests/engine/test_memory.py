"""The workspace is claimed in one piece: what the plan has beside cache and graphs and isn't there yet."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from snugvl.core.config import EngineConfig
from snugvl.engine import memory as memory_module
from snugvl.engine.engine import Engine
from snugvl.engine.memory import SMALL_BYTES, STATES_SMALL_BYTES, MemoryReclaimer
from snugvl.engine.pressure import DeviceMemory, PlannedBytes, PressureMonitor
from tests.engine.test_prefill_graphs import recorded
from tests.engine.test_pressure import BLOCK, CONFIG, Card, steps
from tests.engine.toy import Toy, oracle, request, tokens

MIB = 1 << 20
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "pooled_bytes", lambda: 0)


def room_of(held_mib: int) -> MemoryReclaimer:
    memory = DeviceMemory(500 * MIB, held_mib * MIB)
    watch = PressureMonitor(lambda: memory, PlannedBytes(1000 * MIB, graph_bytes=44 * MIB))
    engine = Engine(Toy(), EngineConfig(num_blocks=8, max_model_len=64), watch)
    assert engine._reclaimer is not None
    return engine._reclaimer


def test_what_is_missing_is_taken_and_left_with_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    here, whole = room_of(800), room_of(950)
    with monkeypatch.context() as patch:
        patch.setattr(Toy, "device", GPU)
        patch.setattr(torch, "empty", lambda nbytes, **wanted: taken.append((nbytes, wanted)))
        here.claim_workspace()
        whole.claim_workspace()  # 6 MiB are missing, and small tensors need more
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
        patch.setattr(memory_module, "pooled_bytes", lambda: 32 * MIB)
        here.claim_workspace()
        patch.setattr(memory_module, "pooled_bytes", lambda: 64 * MIB)
        here.claim_workspace()
        patch.setattr(here._runner.cache, "states", object())
        here.claim_workspace()
    few, all_of_them = (1000 - 800 - 12) * MIB - SMALL_BYTES, (1000 - 800) * MIB - SMALL_BYTES
    assert taken == [few, all_of_them, all_of_them - STATES_SMALL_BYTES]


def test_the_workspace_is_claimed_again_when_a_graph_needed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here, claims = room_of(800), [0]
    monkeypatch.setattr(here, "claim_workspace", lambda: claims.append(1))
    here._runner.graph_cache.released = True
    here.poll(at_once=False)
    here.poll(at_once=False)
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
        here.start()
    assert order == ["ones", "product", "claim"]


def test_a_workspace_that_is_not_there_is_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    here = room_of(800)

    def full(_nbytes: int, **_wanted: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 148.00 MiB.")

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "device", GPU)
        patch.setattr(torch, "empty", full)
        here.claim_workspace()


class Roomy(Card):
    """One with CUDA graphs of steps with prompts, which the plan had room for."""

    graphs = 200 * MIB

    def read(self) -> DeviceMemory:
        memory = super().read()
        held = self.graphs if self.engine is None or self.engine._runner.graph_cache.on else 0
        return DeviceMemory(memory.free_bytes + self.graphs - held, memory.held_bytes + held)

    def watch(self) -> PressureMonitor:
        planned = PlannedBytes(64 * BLOCK + 512 * MIB + self.graphs, self.graphs)
        return PressureMonitor(self.read, planned, self.tell, lambda: self.now)


def test_graphs_of_prompts_go_before_the_cache_does_and_come_back_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = Roomy()
    here = Engine(Toy(), replace(CONFIG, step_graph_bytes=card.graphs), card.watch())
    assert here._reclaimer is not None
    here._reclaimer._monitor._block_bytes = BLOCK
    card.engine = here
    made = recorded(here, nbytes=card.graphs)
    claims: list[int] = []
    watch = here._reclaimer._monitor
    monkeypatch.setattr(here._reclaimer, "claim_workspace", lambda: claims.append(watch.missing_bytes(64)))

    def look(neighbour: int, seconds: float = 1.0) -> tuple[bool, int]:
        card.neighbour = neighbour * MIB
        card.pass_time(seconds)
        here.poll_memory()
        return made.on, here.stats.num_blocks

    for name in "abc":
        here.add(request(name, *range(20)))
        steps(here, card)
    assert made.captures
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
