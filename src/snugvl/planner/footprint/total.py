"""The whole footprint of one way to run a model."""

from dataclasses import dataclass, replace

from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.component import Component, Footprint, footprint_of
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

MOST_MULTIPROCESSORS = 148
PROCESS = Kind.PROCESS.value
PROCESS_BYTES = 320 << 20  # of a process with torch, as `/memory` measured it with pocket on Linux
FUSED_SINCE = (8, 0)  # flash attention in PyTorch; before, grouped heads fall back to plain matrix products


@dataclass(frozen=True, slots=True)
class Device:
    """What the footprint depends on of a GPU (or of a CPU, whose context costs nothing).

    Attributes:
        context_bytes: CUDA context, torch's libraries and cuBLAS' workspace.
        context_measured: on this machine; otherwise the documented default.
        cpu: main memory, no GPU; `free_bytes` of it decide about float32.
        multiprocessors: bound how small products are split; that of the largest GPUs where it isn't known.
        host_bytes: what weights beside a GPU may take of main memory; None where nobody has looked.
        pinned_bytes: page-locked main memory that can be had, where it is scarce (WSL2, Windows), or None.
        api: how the GPU is reached, as people call it.
        unified: its memory is main memory, so what an engine has beside it counts as well.
    """

    context_bytes: int
    context_measured: bool = False
    compute_capability: tuple[int, int] | None = None
    cpu: bool = False
    free_bytes: int = 0
    multiprocessors: int = MOST_MULTIPROCESSORS
    host_bytes: int | None = None
    pinned_bytes: int | None = None
    api: str = "CUDA"
    unified: bool = False

    @property
    def cublas_bytes(self) -> int:
        """What torch gives cuBLAS to work in, once a stream: 32 MiB since Hopper, 8.1 MiB before."""
        capability = self.compute_capability
        return 32 << 20 if capability is None or capability[0] >= 9 else 8_519_680

    @property
    def fused_attention(self) -> bool:
        """Unknown GPUs count as recent."""
        return self.compute_capability is None or self.compute_capability >= FUSED_SINCE


def footprint(model: Inventory, settings: Settings, device: Device) -> Footprint:
    """Every component of `settings` on the fullest of its GPUs."""
    if settings.data_parallel > 1:  # each copy for itself, with its share of the requests
        settings = replace(settings, concurrency=settings.concurrency_of_copy, data_parallel=1)
    rules = rules_of(settings.engine)
    parts = []
    if device.cpu:
        own = rules.process_bytes
        parts.append(
            Component(PROCESS, Kind.PROCESS, own, basis="measured", why="the engine's process, idle")
        )
    if device.context_bytes:
        parts.append(
            Component(
                f"{device.api} context and libraries",
                Kind.CONTEXT if device.api == "CUDA" else Kind.OTHER,
                device.context_bytes,
                basis="measured" if device.context_measured else "default",
                why="measured on this GPU" if device.context_measured else "documented default, not measured",
            )
        )
    return footprint_of(parts + rules.components(model, settings, device))
