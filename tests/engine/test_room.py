"""The workspace is claimed in one piece: what the plan has beside cache and graphs and isn't there yet."""

from typing import Any

import pytest
import torch

from snugvl.config import EngineConfig
from snugvl.engine.engine import Engine
from snugvl.engine.pressure import DeviceMemory, Planned, Watch
from snugvl.engine.room import SMALL_BYTES, Room
from tests.engine.toy import Toy

MIB = 1 << 20
GPU = torch.device("cuda", 0)


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
