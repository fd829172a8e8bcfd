"""Memory that the processes of a child engine hold: of a GPU, or of main memory where there is none."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from snugvl.hardware import host


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
        self._nvml = start_nvml()

    def read(self, family: Sequence[psutil.Process]) -> Held:
        """What it holds now. Takes milliseconds: call it in a thread."""
        gpu = self._gpu({process.pid for process in family})
        return gpu if gpu is not None else main_memory(family)

    def _gpu(self, pids: set[int]) -> Held | None:
        """Name, total, free and held bytes of the GPU that holds most of it; None without a GPU."""
        if self._nvml is None:
            return None
        best: tuple[int, Any] | None = None
        with suppress(self._nvml.NVMLError):
            for handle in self._handles():
                held_bytes = self._held_bytes(handle, pids)
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

    def _held_bytes(self, handle: Any, pids: set[int]) -> int:
        """Bytes of our processes; 0 where the driver doesn't tell (WSL2)."""
        assert self._nvml is not None
        try:
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:
            return 0
        own = [process for process in found if process.pid in pids]
        # A container's process ids are not the driver's; a process that is alone on the GPU is still ours.
        own = own or (found if len(found) == 1 else [])
        return sum(int(process.usedGpuMemory or 0) for process in own)


def main_memory(family: Sequence[psutil.Process]) -> Held:
    """Main memory, and what they hold of it."""
    held_bytes = 0
    for process in family:
        with suppress(psutil.Error):
            held_bytes += process.memory_info().rss
    memory = host.memory()
    return Held("main memory", memory.total_bytes, memory.free_bytes, held_bytes)


def start_nvml() -> Any:
    """NVML where there is a GPU, or None."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError:
        return None
