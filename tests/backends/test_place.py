"""What an engine on a GPU is told of its memory."""

from types import SimpleNamespace

import pytest
import torch

import snugvl
from snugvl.backends.measure import CONTEXT, GRAPHS
from snugvl.backends.native.planned import watch_on
from snugvl.backends.place import Place, cap, hold, place_on
from snugvl.errors import DoesNotFit
from snugvl.hardware import host

MIB = 1 << 20
GPU = Place(torch.device("cuda", 0), "a GPU", 7 << 30, compute_capability=(9, 0))


def test_who_watches_other_programs_knows_what_torch_will_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = {"text weights": 2000 * MIB, "workspace": 300 * MIB, CONTEXT: 700 * MIB, GRAPHS: 44 * MIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (130 * MIB, 7 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2000 * MIB)
    watch = watch_on(GPU, planned)
    assert watch is not None
    # What torch gives cuBLAS is among it: no part of the context's row, and in the workspace's.
    assert watch.missing_bytes(0) == 300 * MIB
    assert watch_on(Place(torch.device("cpu"), "main memory", 7 << 30), planned) is None


def test_a_container_is_as_large_as_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB are free on the machine, and a kernel that ends who takes more than 2 of them."""
    monkeypatch.setattr(host, "memory", lambda: host.Memory(2 << 30, 560 * MIB))
    assert place_on(torch.device("cpu")).usable_bytes == 48 * MIB
    with pytest.raises(DoesNotFit, match="more than the 48 MiB that may be used"):
        snugvl.load("pocket", device="cpu")


def test_the_cap_leaves_room_for_late_kernels_and_may_come_down_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares: list[float] = [1.0]
    stands_in = {
        "memory_reserved": lambda _: 0,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=8 << 30),
        "set_per_process_memory_fraction": lambda share, _: shares.append(share),
        "get_per_process_memory_fraction": lambda _: shares[-1],
    }
    for name, value in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    here = Place(GPU.device, "a GPU", 7 << 30, (9, 0), context_bytes=700 * MIB)
    whole = cap(here, 16 * MIB)
    assert whole == here.usable_bytes
    most = here.usable_bytes - (700 + 80 + 16 - 32) * MIB
    assert shares[-1] * (8 << 30) == most
    hold(GPU.device, most + MIB)
    assert shares[-1] * (8 << 30) == most, "it never goes up"
    hold(GPU.device, most - 5 * MIB)
    assert shares[-1] * (8 << 30) == most - 5 * MIB
