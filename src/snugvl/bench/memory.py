"""Peaks of memory while requests run: a snugvl server's ledger, and the driver's count of the GPUs here."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import httpx

from snugvl.client.answers import memory as read_memory
from snugvl.client.answers import understood
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.errors import SnugvlError
from snugvl.hardware.nvml import started

LEDGER_EVERY_S = 0.25
GPU_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class GpuPeak:
    """All processes together, by NVML. `before_bytes`: when watching began."""

    name: str
    total_bytes: int
    before_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The largest readings of one level; every row has its own moment. `ledger`: None of a foreign server."""

    ledger: Ledger | None
    gpus: tuple[GpuPeak, ...] = ()


class LedgerWatch:
    """The ledger at `/memory`, its largest readings kept."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http, self._url = http, url
        self._peak: Ledger | None = None

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LEDGER_EVERY_S)

    async def look(self) -> None:
        """One reading; a server that gives none now may do so later."""
        with suppress(httpx.HTTPError, SnugvlError, ValueError):
            answer = await self._http.get(self._url)
            found = understood(read_memory, answer.json()).ledger
            if found is not None:
                self._peak = higher(self._peak, found)

    def take(self) -> Ledger | None:
        """The peak since the last call."""
        peak, self._peak = self._peak, None
        return peak


def higher(before: Ledger | None, now: Ledger) -> Ledger:
    """Each component's larger reading."""
    if before is None:
        return now
    rows = tuple(_higher_row(before.row(row.name), row) for row in now.rows)
    return replace(
        now,
        rows=rows,
        process_bytes=max(before.process_bytes, now.process_bytes),
        free_bytes=min(before.free_bytes, now.free_bytes),
    )


def _higher_row(before: LedgerRow | None, now: LedgerRow) -> LedgerRow:
    if before is None:
        return now
    return replace(
        now,
        measured_bytes=_larger(before.measured_bytes, now.measured_bytes),
        used_bytes=_larger(before.used_bytes, now.used_bytes),
    )


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


class GpuWatch:
    """Every GPU of this machine, sampled in a thread of its own. Without one there is nothing to watch."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml or started()
        self._handles = _handles(self._nvml)
        self._before = [self._used(handle) for handle in self._handles]
        self._peaks = list(self._before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-memory", daemon=True)

    def __enter__(self) -> Self:
        if self._handles:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._handles:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def take(self) -> tuple[GpuPeak, ...]:
        """The peaks since the last call."""
        found = []
        for index, handle in enumerate(self._handles):
            peak = max(self._peaks[index], self._used(handle))
            self._peaks[index] = 0
            name, total = self._nvml.nvmlDeviceGetName(handle), self._info(handle).total
            found.append(GpuPeak(str(name), int(total), self._before[index], peak))
        return tuple(found)

    def _watch(self) -> None:
        while not self._over.wait(GPU_EVERY_S):
            for index, handle in enumerate(self._handles):
                self._peaks[index] = max(self._peaks[index], self._used(handle))

    def _used(self, handle: Any) -> int:
        return int(self._info(handle).used)

    def _info(self, handle: Any) -> Any:
        return self._nvml.nvmlDeviceGetMemoryInfo(handle)


def _handles(nvml: Any) -> list[Any]:
    """GPUs that tell their memory."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount() if nvml is not None else 0):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        with suppress(nvml.NVMLError):
            nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(handle)
    return found
