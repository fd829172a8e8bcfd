"""Measurements of every child engine: memory that its processes hold, and its counters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families

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
        """What it holds now. Takes milliseconds: call it in a thread."""
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
    """Host memory, and what they hold of it."""
    held_bytes = 0
    for process in family:
        with suppress(psutil.Error):
            held_bytes += process.memory_info().rss
    memory = host.memory()
    return Held("host memory", memory.total_bytes, memory.free_bytes, held_bytes)


def samples(text: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of each wanted sample of a text in Prometheus' format.

    The others are most of it, and would take the parser its time.
    """
    lines = [line for line in text.splitlines() if wanted(line.partition("{")[0].partition(" ")[0])]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
