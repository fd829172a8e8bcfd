"""The workspace is claimed in one piece: as large as the plan says, less what is there or comes elsewhere."""

from typing import Any

import pytest
import torch

from snugvl import loading
from snugvl.backends.measure import CONTEXT, GRAPHS
from snugvl.place import Place, claim

MIB = 1 << 20
GPU = Place(torch.device("cuda", 0), "a GPU", 7 << 30, compute_capability=(9, 0))


def test_what_is_left_of_the_plan_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 3010 * MIB)
    planned = {
        "text weights": 2000 * MIB,
        "KV cache": 1000 * MIB,
        "workspace": 300 * MIB,
        "encoder outputs": 20 * MIB,
    }
    planned |= {CONTEXT: 700 * MIB, GRAPHS: 44 * MIB}
    # cuBLAS takes 32 MiB of it when it first runs; loading left 10 MiB that can't be given back.
    assert loading._workspace(planned, GPU) == (300 + 20 - 32 - 10) * MIB


def test_it_is_taken_at_once_and_left_with_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Any, ...]] = []

    def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> None:
        taken.append((nbytes, dtype, device))

    monkeypatch.setattr(torch, "empty", empty)
    claim(GPU, 278 * MIB)
    claim(GPU, 0)
    claim(GPU, -MIB)
    claim(Place(torch.device("cpu"), "main memory", 7 << 30), 278 * MIB)
    assert taken == [(278 * MIB, torch.uint8, GPU.device)]


def test_who_watches_other_programs_knows_what_torch_will_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = {"text weights": 2000 * MIB, "workspace": 300 * MIB, CONTEXT: 700 * MIB, GRAPHS: 44 * MIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (130 * MIB, 7 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2000 * MIB)
    watch = loading.watch_on(GPU, planned)
    assert watch is not None
    # cuBLAS' 32 MiB of the context are torch's, and come off the workspace.
    assert watch.missing_bytes(0) == (300 - 32) * MIB
    assert loading.watch_on(Place(torch.device("cpu"), "main memory", 7 << 30), planned) is None
