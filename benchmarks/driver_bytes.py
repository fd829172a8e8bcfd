"""What processes hold on a GPU as the driver counts it: the peak of one, and what the driver itself takes.

torch's cap knows torch's memory alone; the rest of a process (context, libraries, compiled kernels, the
driver's part of CUDA graphs) is seen from outside only. NVML is asked every 10 ms, since a peak may last no
longer; the server's own ledger says what of it is not torch's.
"""

import asyncio
import threading
from contextlib import suppress
from typing import Any, Self

import httpx

from snugvl.hardware.probe import probe

EVERY_S = 0.01
LEDGER_EVERY_S = 0.1
DRIVER = ("CUDA context and libraries", "late kernels")  # rows of the ledger that are not torch's


class ProcessPeak:
    """The largest process on the GPU beside `others`, while the block runs; without a GPU nothing."""

    def __init__(self, others: tuple[int | None, ...]) -> None:
        self._others = others
        self._nvml, self._handle = _handle()
        self._peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process-peak", daemon=True)

    def __enter__(self) -> Self:
        if self._handle is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._handle is not None:
            self._thread.join()

    def take(self) -> int | None:
        """The peak since the last call; None: nobody counts."""
        peak, self._peak = self._peak, 0
        return peak or None

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            with suppress(self._nvml.NVMLError):
                found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
                sizes = [each.usedGpuMemory or 0 for each in found if each.pid not in self._others]
                self._peak = max(self._peak, *sizes, 0)


class DriverTrace:
    """How the driver's part of the engine's process grows: `(requests asked, bytes)`, each larger."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.largest_step = 0  # between two readings, the first left out

    def add(self, asked: int, ledger: dict[str, Any]) -> None:
        """One reading of `/memory`'s ledger."""
        rows = {row["name"]: row["measured_bytes"] for row in ledger["rows"]}
        if rows.get(DRIVER[0]) is None:
            return
        held = sum(rows.get(name) or 0 for name in DRIVER)
        if self.steps and held > self.steps[-1][1]:
            self.largest_step = max(self.largest_step, held - self.steps[-1][1])
        if not self.steps or held > self.steps[-1][1]:
            self.steps.append((asked, held))

    async def watch(self, url: str, load: Any) -> None:
        """Read until cancelled. `load`: whose requests are counted."""
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            while True:
                with suppress(httpx.HTTPError, KeyError, ValueError):
                    self.add(load.sent, (await http.get("/memory")).json()["ledger"])
                await asyncio.sleep(LEDGER_EVERY_S)

    def at(self, asked: int) -> int | None:
        """What it held when so many requests had been asked."""
        return next((held for sent, held in reversed(self.steps) if sent <= asked), None)


def _handle() -> tuple[Any, Any]:
    """NVML and the GPU that CUDA calls the first; None without one."""
    gpus = probe().gpus
    if not gpus or gpus[0].uuid is None:
        return None, None
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpus[0].uuid)
