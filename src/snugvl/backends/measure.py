"""The ledger of the process that runs the engine: planned bytes beside bytes held now.

On a GPU every byte of the process has a row: weights, KV cache, recurrent state where a model has one, the
pool of the CUDA graphs, what else torch holds (workspace), and what torch doesn't know of (the CUDA context
and its libraries). The workspace is one piece, claimed at the start, that steps and pictures share: what is
an encoder output now is a layer's activation in the next step, so outputs are part of it. In host memory they
have a row, and the last one is the interpreter with its libraries: as large as it was when nothing had run
yet, and the pages of libraries that were read since. Pixels that the server shares are image inputs. What is
left is workspace, with what the C library keeps of it for the next step.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from snugvl.core import resources
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.service import Load
from snugvl.hardware import host, nvml
from snugvl.layers.device import pooled_bytes

GRAPHS, CONTEXT, LATE, INTERPRETER = Kind.GRAPHS, Kind.CONTEXT, Kind.KERNELS, Kind.PROCESS
TRIES = 3


class Meter:
    """Measures one engine in this process. Made when the model is loaded and nothing has run."""

    def __init__(
        self,
        device: torch.device,
        planned: Mapping[str, int],
        weights: Mapping[str, int],
        kv_bytes: int,
        *,
        cap_bytes: int | None = None,
        keep: Callable[[Ledger, Load], None] | None = None,
        beside: tuple[LedgerRow, ...] = (),
    ) -> None:
        """`kv_bytes`: bytes of the KV cache and of recurrent states, which are held from the start.

        `cap_bytes`: most bytes that the process ever holds; `keep` is called with every ledger of a GPU and
        the engine's load. `beside`: rows of what stays in host memory beside a GPU.
        """
        self._beside = beside
        self._device = device
        self._planned = planned
        self._weights = weights
        self._cap_bytes = cap_bytes
        self._keep = keep
        self._pooled = (-1, 0)  # reserved bytes when the graphs' pool was measured, and its bytes
        self._process_bytes = process_reader(device)
        held = sum(weights.values()) + kv_bytes
        self._interpreter = max(resources.resident() - held, 0)
        self._read_pages = resident("RssFile")

    def read(self, memory: Mapping[str, int], load: Load) -> Ledger:
        """The ledger now, from the engine's memory by component and its load."""
        parts = dict(self._weights)
        parts[Kind.CACHE] = memory["kv_cache"]
        if memory.get("recurrent_state"):
            parts[Kind.STATES] = memory["recurrent_state"]
        held_blocks = load.num_blocks - load.free_blocks
        used: dict[str, int] = {Kind.CACHE: memory["kv_cache"] * held_blocks // max(load.num_blocks, 1)}
        if self._device.type == "cuda":
            return self._on_gpu(parts, used, load)
        parts[Kind.ENCODINGS] = used[Kind.ENCODINGS] = memory["encoder_outputs"]
        parts[Kind.INPUTS] = memory["vision_inputs"]
        return self._in_host_memory(parts, used)

    def _on_gpu(self, parts: dict[str, int], used: dict[str, int], load: Load) -> Ledger:
        free, total = torch.cuda.mem_get_info(self._device)
        known = sum(parts.values())
        reserved, process = self._settled()
        parts[GRAPHS] = self._graphs(reserved)
        known += parts[GRAPHS]
        used[Kind.WORKSPACE] = max(torch.cuda.memory_allocated(self._device) - known, 0)
        parts[Kind.WORKSPACE] = max(reserved - known, 0)
        if process is not None:
            driver = max(process - reserved, 0)
            # What is beyond the plan came late: kernels and libraries look alike from outside.
            late = max(driver - self._planned.get(CONTEXT, 0), 0) if LATE in self._planned else 0
            parts[CONTEXT] = driver - late
            if LATE in self._planned:
                parts[LATE] = late
        name = torch.cuda.get_device_name(self._device)
        rows = self._rows(parts, used)
        ledger = Ledger(name, rows, total, free, process or reserved, self._cap_bytes)
        if self._keep is not None:
            self._keep(ledger, load)
        return replace(ledger, rows=(*rows, *self._beside))

    def _graphs(self, reserved: int) -> int:
        """Bytes of torch's private pools. Looked up only when torch holds more or less than last time."""
        if self._pooled[0] != reserved:
            self._pooled = (reserved, pooled_bytes())
        return self._pooled[1]

    def _in_host_memory(self, parts: dict[str, int], used: dict[str, int]) -> Ledger:
        own = resources.resident()
        parts[INTERPRETER] = self._interpreter + max(resident("RssFile") - self._read_pages, 0)
        parts[Kind.INPUTS] += resident("RssShmem")
        parts[Kind.WORKSPACE] = max(own - sum(parts.values()), 0)
        memory = host.memory()
        rows = self._rows(parts, used)
        return Ledger("host memory", rows, memory.total_bytes, memory.free_bytes, own)

    def _rows(self, parts: Mapping[str, int], used: Mapping[str, int]) -> tuple[LedgerRow, ...]:
        names = sorted(parts.keys() | self._planned.keys(), key=lambda name: -self._planned.get(name, 0))
        return tuple(
            LedgerRow(str(name), self._planned.get(name), parts.get(name), used.get(name), Kind(name))
            for name in names
        )

    def _settled(self) -> tuple[int, int | None]:
        """(torch's bytes, the process' or None) at the same time: the engine works in another thread."""
        reserved, process = torch.cuda.memory_reserved(self._device), self._process_bytes()
        for _ in range(TRIES):
            again = torch.cuda.memory_reserved(self._device)
            if again == reserved:
                return reserved, process
            reserved, process = again, self._process_bytes()
        return reserved, None


def resident(kind: Literal["RssFile", "RssShmem"]) -> int:
    """Resident bytes of this process that are pages of files, or shared; 0 where no one tells (not Linux)."""
    try:
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def process_reader(device: torch.device) -> Callable[[], int | None]:
    """A function that reads the driver's count of this process' bytes; None where there is none (WSL2)."""
    module = nvml.started() if device.type == "cuda" else None
    if module is None:
        return lambda: None
    try:
        handle = module.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except module.NVMLError:
        return lambda: None
    return lambda: nvml.held_by(module, handle, {os.getpid()}) or None
