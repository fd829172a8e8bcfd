"""What an engine on a GPU is told of its memory."""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import snugvl
from snugvl.backends import place as place_module
from snugvl.backends.measure import CONTEXT, GRAPHS
from snugvl.backends.native.planned import watch_on
from snugvl.backends.place import Place, cap, hold, place_on, with_driver
from snugvl.errors import DoesNotFit
from snugvl.hardware import host
from snugvl.hardware.machine import Gpu
from snugvl.planner.footprint.native import KERNEL_BYTES

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


class Nvml:
    """NVML on a card where a context takes `driver` bytes, and others `more` meanwhile."""

    NVMLError = RuntimeError

    def __init__(self, driver: int, *, more: int = 0, told: bool = True) -> None:
        self.free = 7 << 30
        self.driver, self.more, self.told = driver, more, told
        self.taken = 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(free=self.free)

    def take(self, _device: torch.device) -> None:
        self.taken += self.driver
        self.free -= self.driver + self.more


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Place, Nvml]]:
    """A place whose driver was taken and measured, on a stand-in for a card."""

    def measure(card: Nvml, **known: Any) -> tuple[Place, Nvml]:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(place_module, "_take_driver", card.take)
        monkeypatch.setattr(place_module.nvml, "started", lambda: card)
        told = (lambda: card.taken) if card.told else (lambda: None)
        monkeypatch.setattr(place_module, "process_reader", lambda _: told)
        gpu = Gpu(0, "a GPU", 8 << 30, 7 << 30, (12, 0), uuid="GPU-1")
        return with_driver(replace(GPU, gpu=gpu, **{"context_bytes": 450 * MIB, **known})), card

    return measure


Measure = Callable[..., tuple[Place, Nvml]]


def test_the_driver_is_measured_before_anything_is_planned(measured: Measure) -> None:
    place, _ = measured(Nvml(612 * MIB))
    assert (place.context_bytes, place.context_measured) == (612 * MIB, True)
    place, _ = measured(Nvml(612 * MIB, more=300 * MIB))
    assert place.context_bytes == 612 * MIB, "what others take is not ours where the driver tells"


def test_a_larger_figure_of_an_earlier_engine_stays(measured: Measure) -> None:
    place, _ = measured(Nvml(612 * MIB), context_bytes=640 * MIB, context_measured=True)
    assert place.context_bytes == 640 * MIB
    place, _ = measured(Nvml(612 * MIB), context_bytes=400 * MIB, context_measured=True)
    assert place.context_bytes == 612 * MIB


def test_where_the_driver_does_not_tell_what_a_process_has_the_card_does(measured: Measure) -> None:
    """WSL2: free memory before and after, unless that is no context, or was measured better before."""
    place, _ = measured(Nvml(612 * MIB, told=False))
    assert (place.context_bytes, place.context_measured) == (612 * MIB, True)
    for more in (-600 * MIB, 3 << 30):
        place, _ = measured(Nvml(612 * MIB, more=more, told=False))
        assert (place.context_bytes, place.context_measured) == (450 * MIB, False)
    place, _ = measured(Nvml(900 * MIB, told=False), context_bytes=500 * MIB, context_measured=True)
    assert place.context_bytes == 500 * MIB


def test_a_context_that_is_there_and_a_cpu_are_not_measured(measured: Measure) -> None:
    card = Nvml(612 * MIB)
    assert measured(card, context_bytes=0)[0].context_bytes == 0
    assert measured(card, device=torch.device("cpu"))[0].context_bytes == 450 * MIB
    assert card.taken == 0


def test_the_driver_is_taken_in_a_thread_that_has_ended(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS' handle belongs to a thread: only of one that has ended the engine's gets it."""
    threads: list[threading.Thread] = []
    card = Nvml(612 * MIB)
    take = card.take
    monkeypatch.setattr(
        card, "take", lambda device: (threads.append(threading.current_thread()), take(device))
    )
    measured(card)
    assert [thread.is_alive() for thread in threads] == [False]


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
    most = here.usable_bytes - (700 - 32 + 16) * MIB - KERNEL_BYTES
    assert shares[-1] * (8 << 30) == most
    hold(GPU.device, most + MIB)
    assert shares[-1] * (8 << 30) == most, "it never goes up"
    hold(GPU.device, most - 5 * MIB)
    assert shares[-1] * (8 << 30) == most - 5 * MIB
