"""Measures the memory that a child engine's processes hold: on a GPU, or in host memory without one."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from snugvl.hardware import host, nvml


class Held(NamedTuple):
    """Bytes of one device: all of it, what is free, what the processes hold."""

    device: str
    total: int
    free: int
    held: int


class Gauge:
    """Measures one server. `gpu_uuids`: NVML's names of its GPUs, where the plan knows them."""

    def __init__(self, gpu_uuids: Sequence[str]) -> None:
        self._gpu_uuids = gpu_uuids
        self._nvml = nvml.started()

    def read(self, family: Sequence[psutil.Process]) -> Held:
        """The memory that the processes hold now. Takes milliseconds: call it in a thread."""
        gpu = self._gpu({process.pid for process in family})
        return gpu if gpu is not None else host_memory(family)

    def _gpu(self, pids: set[int]) -> Held | None:
        """Name, total, free and held bytes of the GPU that holds most of it; None without a GPU."""
        if self._nvml is None:
            return None
        best: tuple[int, Any] | None = None
        with suppress(self._nvml.NVMLError):
            for handle in self._handles():
                held_bytes = nvml.held_by(self._nvml, handle, pids)
                if best is None or held_bytes > best[0]:
                    best = (held_bytes, handle)
            if best is not None:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(best[1])
                name = str(self._nvml.nvmlDeviceGetName(best[1]))
                return Held(name, int(memory.total), int(memory.free), best[0])
        return None

    def _handles(self) -> list[Any]:
        assert self._nvml is not None
        if self._gpu_uuids:
            return [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in self._gpu_uuids]
        return [
            self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())
        ]


def host_memory(family: Sequence[psutil.Process]) -> Held:
    """Host memory, with the part that the processes hold."""
    held_bytes = 0
    for process in family:
        with suppress(psutil.Error):
            held_bytes += process.memory_info().rss
    memory = host.memory()
    return Held("host memory", memory.total_bytes, memory.free_bytes, held_bytes)
