# ruff: noqa: N802, N815 (NVML's names)
"""NVML at its Python API: as much of the module pynvml as the probe uses, over invented GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 2**20


@dataclass
class Process:
    """A process on a GPU; None bytes where the system doesn't tell, as under WSL2."""

    pid: int
    usedGpuMemory: int | None


@dataclass
class Card:
    """One GPU. `free` is read value by value, the last for ever. `broken`: the error every question gets."""

    name: str = "NVIDIA GeForce RTX 3090"
    uuid: str = "GPU-0"
    total: int = 24576 * MIB
    free: Sequence[int] = (24000 * MIB,)
    reserved: int = 0
    capability: tuple[int, int] = (8, 6)
    compute: Sequence[Process] | int = ()
    graphics: Sequence[Process] = ()
    slices: Sequence["Card"] = ()
    mig: bool = False
    broken: int | None = None
    memory_error: int | None = None
    link: tuple[int, int] | None = (4, 16)
    reads: int = field(default=0)


class FakeNvml:
    """Stands for the module."""

    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(
        self,
        *cards: Card,
        driver: str = "580.95.05",
        init: Sequence[int] = (),
        names: dict[int, str] | None = None,
        v2: bool = True,
    ) -> None:
        self.cards, self.driver, self.init, self.names, self.v2 = cards, driver, list(init), names or {}, v2
        self.started = self.stopped = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVMLError"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if self.init:
            raise pynvml.NVMLError(self.init.pop(0))
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.stopped += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid not in self.names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.names[pid]

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return _alive(self.cards[index])

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: Card) -> int:
        return _link(card)[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: Card) -> int:
        return _link(card)[1]

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if not card.mig and "A100" not in card.name:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(card.mig), int(card.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:
        if index >= len(card.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.slices[index]

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> SimpleNamespace:
        if card.memory_error is not None:
            raise pynvml.NVMLError(card.memory_error)
        if version is not None and not self.v2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        free = card.free[min(card.reads, len(card.free) - 1)]
        card.reads += 1
        memory = SimpleNamespace(total=card.total, free=free, used=card.total - free)
        if version is not None:
            memory.reserved = card.reserved
        return memory

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> Sequence[Process]:
        if isinstance(card.compute, int):
            raise pynvml.NVMLError(card.compute)
        return card.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> Sequence[Process]:
        return card.graphics


def _link(card: Card) -> tuple[int, int]:
    if card.link is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return card.link


def _alive(card: Card) -> Card:
    if card.broken is not None:
        raise pynvml.NVMLError(card.broken)
    return card
