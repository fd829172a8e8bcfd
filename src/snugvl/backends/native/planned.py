"""An allocation as planned rows of the ledger, and as the watch on other programs needs it."""

import os
from collections.abc import Mapping
from functools import partial

from snugvl.backends.measure import CONTEXT, GRAPHS, INTERPRETER, process_reader
from snugvl.backends.native.neighbours import Neighbours
from snugvl.backends.place import TargetDevice, hold
from snugvl.core.memory_kinds import Kind
from snugvl.engine.pressure import CountedDriver, PlannedBytes, PressureMonitor, memory_reader
from snugvl.layers.compilations import compilations
from snugvl.planner.engines.native.footprint import GRAPHS_LIBRARY, KERNELS, LATE
from snugvl.planner.engines.native.step_graphs import DRIVER, LIBRARY
from snugvl.planner.footprint.kv import block_bytes
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Allocation


def planned_rows(allocation: Allocation, model: Inventory) -> dict[str, int]:
    """The plan as rows of the ledger; together they are its footprint.

    Workspaces of different phases share theirs: it is the largest one. On a GPU encoder outputs are part of
    it, see `backends/measure.py`.
    """
    plan, settings = allocation.footprint, allocation.settings
    vision, states = plan.of(Kind.VISION), plan.of(Kind.STATES)
    rows: dict[str, int] = {
        Kind.TEXT: plan.weights_bytes - vision,
        Kind.VISION: vision,
        # The allocator's rounding belongs to no component: it counts as workspace.
        Kind.CACHE: settings.kv_blocks * block_bytes(model, settings),
        **({Kind.STATES: states} if states else {}),
    }
    if allocation.device.cpu:
        outputs = sum(part.nbytes for part in plan.counted if part.kind is Kind.ENCODINGS)
        rows[Kind.ENCODINGS] = outputs + settings.encoder_cache_bytes
        rows[INTERPRETER] = plan.of(Kind.PROCESS)
    else:
        # What torch gives cuBLAS was measured as part of the context, and is torch's: workspace.
        context = max(plan.of(Kind.CONTEXT) - allocation.device.cublas_bytes, 0)
        rows[CONTEXT] = context + plan.named(KERNELS) + plan.named(DRIVER)
        rows[LATE] = plan.of(Kind.KERNELS)
        rows[GRAPHS] = plan.of(Kind.GRAPHS) + plan.named(GRAPHS_LIBRARY) + plan.named(LIBRARY)
    rows[Kind.WORKSPACE] = plan.total_bytes - sum(rows.values())
    return rows


def watch_on(
    place: TargetDevice, planned: Mapping[str, int], cap_bytes: int | None = None
) -> PressureMonitor | None:
    """A watch on other programs that take a GPU's memory while the engine runs; None on a CPU.

    `cap_bytes`: most bytes that this process ever takes. It is watched where all memory of the process was
    counted: with a CUDA context that was there before, the cap is that of this engine alone.
    """
    if place.device.type == "cpu":
        return None
    held = sum(planned.values()) - planned[CONTEXT] - planned.get(LATE, 0)
    told = None if place.gpu is None else Neighbours(place.gpu, os.getpid())
    wanted = PlannedBytes(held, planned[GRAPHS], cap_bytes if place.context_bytes else None)
    # Without what torch gives cuBLAS, which is torch's.
    driver = max(place.context_bytes - place.planned().cublas_bytes, 0)
    counted = CountedDriver(driver, lambda: compilations(place.device).loaded)
    read = memory_reader(place.device, process_reader(place.device), counted)
    return PressureMonitor(read, wanted, told, on_cap=partial(hold, place.device))
