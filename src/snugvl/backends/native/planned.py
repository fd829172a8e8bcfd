"""Rows of the ledger that an allocation plans, and the watch on other programs that take its memory."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock, Thread

from snugvl.backends.measure import CONTEXT, GRAPHS, INTERPRETER, process_reader
from snugvl.backends.place import TargetDevice, hold
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import MIB, format_size
from snugvl.engine.pressure import CountedDriver, PlannedBytes, PressureMonitor, memory_reader
from snugvl.hardware.machine import Gpu, Machine, Tenant
from snugvl.hardware.probe import probe
from snugvl.layers.compilations import compilations
from snugvl.planner.engines.native.footprint import GRAPHS_LIBRARY, KERNELS, LATE
from snugvl.planner.engines.native.step_graphs import DRIVER, LIBRARY
from snugvl.planner.footprint.kv import block_bytes
from snugvl.planner.inventory import Inventory
from snugvl.planner.plan import Allocation

GROWN_BYTES = 32 * MIB  # less is not blamed on a program
logger = logging.getLogger(__name__)


class Neighbours:
    """Looks at who is on a GPU, in a thread of its own: NVML takes its time.

    Calling it is cheap and returns at once; while one look is under way further calls are nothing.
    """

    def __init__(self, before: Gpu, own_pid: int, look: Callable[[], Machine] = probe) -> None:
        """`before`: the GPU as it was when nothing of the model was there."""
        self._before = before
        self._own_pid = own_pid
        self._probe = look
        self._busy = Lock()

    def __call__(self) -> None:
        """Look, and log who has grown."""
        if self._busy.acquire(blocking=False):
            try:
                Thread(target=self._look, name="snugvl-neighbours", daemon=True).start()
            except RuntimeError:  # the system gives no more threads; the next call may have one
                self._busy.release()

    def _look(self) -> None:
        try:
            gpus = self._probe().gpus
            now = next((gpu for gpu in gpus if gpu.index == self._before.index), None)
            who = [] if now is None else grown(self._before.tenants, now.tenants, self._own_pid)
            if who:
                logger.warning("GPU memory taken by other programs since the start: %s", "; ".join(who))
        except Exception:  # a name in the log is not worth an engine
            logger.exception("it can't be told which programs have taken GPU memory")
        finally:
            self._busy.release()


def grown(before: Sequence[Tenant], now: Sequence[Tenant], own_pid: int) -> list[str]:
    """Who holds more than before, most first: "game (pid 12) 1.20 GiB more"."""
    held = {(tenant.name, tenant.pid): tenant.held_bytes for tenant in before}
    more = [
        (tenant.held_bytes - held.get((tenant.name, tenant.pid), 0), tenant)
        for tenant in now
        if tenant.pid != own_pid
    ]
    found = sorted((each for each in more if each[0] >= GROWN_BYTES), key=lambda each: -each[0])
    return [
        f"{tenant.name}{'' if tenant.pid is None else f' (pid {tenant.pid})'} {format_size(nbytes)} more"
        for nbytes, tenant in found
    ]


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
        # What the allocator rounds up counts as workspace.
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

    `cap_bytes`: what this process never takes more of. It is watched where all that the process holds was
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
