"""What an engine on a GPU is told of its memory."""

import re
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
from snugvl.backends.place import TargetDevice, cap, device_of, hold, place_on, with_driver
from snugvl.errors import DoesNotFit, EngineError, RequestError
from snugvl.hardware import host
from snugvl.hardware.machine import Gpu
from snugvl.hardware.software import BuildTools, TorchBuild
from snugvl.planner.engines.native.footprint import KERNEL_BYTES
from tests.hardware.test_advice import recorded

MIB = 1 << 20
GPU = TargetDevice(torch.device("cuda", 0), "a GPU", 7 << 30, compute_capability=(9, 0))


def test_who_watches_other_programs_knows_what_torch_will_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = {"text weights": 2000 * MIB, "workspace": 300 * MIB, CONTEXT: 700 * MIB, GRAPHS: 44 * MIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (130 * MIB, 7 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2000 * MIB)
    watch = watch_on(GPU, planned)
    assert watch is not None
    # What torch gives cuBLAS is among it: no part of the context's row, and in the workspace's.
    assert watch.missing_bytes(0) == 300 * MIB
    assert watch_on(TargetDevice(torch.device("cpu"), "host memory", 7 << 30), planned) is None


def test_a_container_is_as_large_as_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB are free on the machine, and a kernel that ends who takes more than 2 of them."""
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(2 << 30, 560 * MIB))
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
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TargetDevice, Nvml]]:
    """A place whose driver was taken and measured, on a stand-in for a card."""

    def measure(card: Nvml, **known: Any) -> tuple[TargetDevice, Nvml]:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(place_module, "_take_driver", card.take)
        monkeypatch.setattr(place_module.nvml, "started", lambda: card)
        told = (lambda: card.taken) if card.told else (lambda: None)
        monkeypatch.setattr(place_module, "process_reader", lambda _: told)
        gpu = Gpu(0, "a GPU", 8 << 30, 7 << 30, (12, 0), uuid="GPU-1")
        return with_driver(replace(GPU, gpu=gpu, **{"context_bytes": 450 * MIB, **known})), card

    return measure


Measure = Callable[..., tuple[TargetDevice, Nvml]]


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
    """WSL2: free memory now and when the machine was looked at, unless that is no context."""
    place, _ = measured(Nvml(612 * MIB, told=False))
    assert (place.context_bytes, place.context_measured) == (612 * MIB, True)
    for more in (-600 * MIB, 3 << 30):
        place, _ = measured(Nvml(612 * MIB, more=more, told=False))
        assert (place.context_bytes, place.context_measured) == (450 * MIB, False)
    place, _ = measured(Nvml(600 * MIB, told=False), context_bytes=900 * MIB, context_measured=True)
    assert place.context_bytes == 600 * MIB, "others may have been a part of the larger figure"


def test_a_context_that_was_made_since_the_machine_was_looked_at_counts(measured: Measure) -> None:
    """The engine's process makes it in a thread while it reads torch."""
    card = Nvml(102 * MIB, told=False)
    card.free -= 510 * MIB
    place, _ = measured(card)
    assert place.context_bytes == 612 * MIB


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
    here = TargetDevice(GPU.device, "a GPU", 7 << 30, (9, 0), context_bytes=700 * MIB)
    whole = cap(here, 16 * MIB)
    assert whole == here.usable_bytes
    most = here.usable_bytes - (700 - 32 + 16) * MIB - KERNEL_BYTES
    assert shares[-1] * (8 << 30) == most
    hold(GPU.device, most + MIB)
    assert shares[-1] * (8 << 30) == most, "it never goes up"
    hold(GPU.device, most - 5 * MIB)
    assert shares[-1] * (8 << 30) == most - 5 * MIB


@pytest.fixture
def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose driver is too old for torch: torch counts it all the same, by NVML, and can't use it."""
    monkeypatch.setattr(place_module, "probe", lambda: recorded("l4-container"))
    monkeypatch.setattr(place_module, "torch_build", lambda: TorchBuild("2.13.0", (13, 0), cpu_only=False))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


SAID = r"Driver 535.261.03 is too old for torch 2.13.0 \(CUDA 13.0\); update it to 580.65 or later, or "


@pytest.mark.usefixtures("too_old")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_driver_that_is_too_old_is_named_where_the_gpu_is_asked_for(name: str) -> None:
    with pytest.raises(RequestError, match=rf"device '{name}' is not there: {SAID}.*; use cpu$"):
        device_of(name)


@pytest.mark.usefixtures("too_old")
def test_nobody_waits_for_a_processor_without_being_told_why(caplog: pytest.LogCaptureFixture) -> None:
    assert device_of("auto").type == "cpu"
    assert re.search(f"the model runs on the processor: {SAID}", caplog.text)


def test_a_machine_without_a_gpu_says_nothing_of_drivers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place_module, "probe", lambda: recorded("laptop-no-gpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == "cpu"
    assert not caplog.text
    with pytest.raises(RequestError, match="device 'cuda' is not there: torch sees 0 CUDA GPUs; use cpu"):
        device_of("cuda")


def test_a_gpu_without_a_compiler_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = BuildTools(None, headers=False, venv=True, apt=True, python="3.13")
    facts = SimpleNamespace(major=8, minor=9, name="NVIDIA L4", multi_processor_count=58)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(place_module, "build_tools", lambda: bare)
    monkeypatch.setattr(place_module, "has_launcher", lambda: False)
    machine, device = recorded("l4-container"), torch.device("cuda", 0)
    with pytest.raises(EngineError, match=r"sudo apt install build-essential python3\.13-dev$"):
        place_on(device, machine=machine)
    # Engines without our kernels need none, nor does a machine where Triton's part was compiled before.
    assert place_on(device, machine=machine, kernels=False).name == "NVIDIA L4"
    monkeypatch.setattr(place_module, "has_launcher", lambda: True)
    assert place_on(device, machine=machine).name == "NVIDIA L4"
