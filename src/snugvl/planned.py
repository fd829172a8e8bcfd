"""What an allocation plans, as rows of the ledger and as the watch on other programs needs it."""

import os
from collections.abc import Mapping
from functools import partial

from snugvl.allocation import Allocation
from snugvl.backends.measure import CONTEXT, GRAPHS, process_reader
from snugvl.backends.neighbours import Neighbours
from snugvl.engine.pressure import PlannedBytes, PressureMonitor, memory_reader
from snugvl.place import Place, hold
from snugvl.planner.footprint.allocator import LARGE_ROUND_BYTES, up
from snugvl.planner.footprint.native import GRAPHS_LIBRARY, KERNELS, LATE


def planned_rows(allocation: Allocation, place: Place) -> dict[str, int]:
    """The plan as rows of the ledger. Workspaces of different phases share theirs: it is the largest one.

    On a GPU encoder outputs are part of it, see `backends/measure.py`.
    """
    plan = allocation.footprint
    vision = plan.named("weights: vision tower")
    encodings = sum(part.nbytes for part in plan.counted if part.name.startswith("encoder outputs"))
    rows = {
        "text weights": plan.named("weights: ") - vision,
        "vision weights": vision,
        "KV cache": allocation.kv_bytes,
        **({"recurrent state": allocation.state_bytes} if allocation.state_bytes else {}),
    }
    graphs = allocation.recorded
    if place.device.type == "cuda":
        # What torch gives cuBLAS was measured as part of the context, and is torch's: workspace.
        rows[CONTEXT] = max(plan.named(CONTEXT) - place.planned().cublas_bytes, 0) + plan.named(KERNELS)
        rows[CONTEXT] += graphs.driver_bytes
        rows[LATE] = plan.named(LATE)
        rows[GRAPHS] = plan.named(GRAPHS) + plan.named(GRAPHS_LIBRARY)
        rows[GRAPHS] += graphs.pool_bytes + graphs.library_bytes
    else:
        rows["encoder outputs"] = encodings + allocation.engine.encoder_cache_bytes
    pool = up(allocation.kv_bytes, LARGE_ROUND_BYTES)  # what is rounded up is nobody's: workspace
    beyond = pool - plan.named("KV cache") + allocation.engine.encoder_cache_bytes + graphs.total_bytes
    rows["workspace"] = plan.total_bytes - sum(rows.values()) + beyond
    return rows


def watch_on(
    place: Place, planned: Mapping[str, int], cap_bytes: int | None = None
) -> PressureMonitor | None:
    """A watch on other programs that take a GPU's memory while the engine runs; None on a CPU.

    `cap_bytes`: what this process never takes more of. It is watched where all that the process holds was
    counted: with a CUDA context that was there before, the cap is that of this engine alone.
    """
    if place.device.type == "cpu":
        return None
    held = sum(planned.values()) - planned[CONTEXT] - planned.get(LATE, 0)
    told = None if place.gpu is None else Neighbours(place.gpu, os.getpid())
    wanted = PlannedBytes(held, planned[GRAPHS], cap_bytes if place.context_bytes else None)
    read = memory_reader(place.device, process_reader(place.device))
    return PressureMonitor(read, wanted, told, on_cap=partial(hold, place.device))
