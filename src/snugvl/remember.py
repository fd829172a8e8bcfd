"""What a running engine really takes, kept for the next plan (`hardware/calibration.py`)."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from snugvl.backends.measure import CONTEXT, GRAPHS
from snugvl.backends.service import Load
from snugvl.hardware import calibration
from snugvl.hardware.calibration import ANY_ENGINE, Measurement
from snugvl.hardware.context_cost import COMPONENT
from snugvl.ledger import Ledger, LedgerRow
from snugvl.place import Place
from snugvl.planner.footprint.native import KERNEL_BYTES
from snugvl.planner.footprint.step_graphs import NOTHING, Recorded

GRAIN_BYTES = 8 << 20  # growth that is worth writing down
# The driver loads kernels when they first run, some of them after a measurement: 2 MiB on an H200
# (`benchmarks/results/h200/never_oom_8b.json`), where a plan that fills its share has no room for them.
LATER_BYTES = 4 << 20
FEW = 4  # recordings whose part of the driver's memory is known well enough


def keeper(place: Place, subject: str, recorded: Recorded = NOTHING) -> Callable[[Ledger, Load], None]:
    """A function that is shown the ledger now and then, and writes down what has grown.

    `recorded`: what graphs of steps with prompts take. The driver's part of them, which few engines have, is
    not the context's: another plan would count it twice. It is known for the largest of them, so the context
    is no measurement any more once there are some.
    """
    kept: dict[str, int] = {}

    def keep(ledger: Ledger, load: Load) -> None:
        ledger = replace(ledger, rows=tuple(_alone(row, recorded, load.recorded) for row in ledger.rows))
        graphs = ledger.row(GRAPHS)
        ran = graphs is not None and bool(graphs.measured_bytes)
        grown = {
            row.name: row.measured_bytes
            for row in ledger.rows
            if row.measured_bytes
            and row.measured_bytes >= kept.get(row.name, 0) + GRAIN_BYTES
            # The driver loads kernels when they first run: before, its part looks too small.
            and (ran or row.name != CONTEXT)
        }
        if grown:
            kept.update(grown)
            with suppress(OSError):  # a cache folder that can't be written costs an estimate, no more
                calibration.add(calibration.calibration_file(), _measurements(place, subject, ledger, grown))

    return keep


def _alone(row: LedgerRow, recorded: Recorded, count: int) -> LedgerRow:
    """The context's row without what the driver has of `count` recordings."""
    if row.name != CONTEXT or row.measured_bytes is None:
        return row
    if count > FEW:
        return LedgerRow(CONTEXT)
    planned = None if row.planned_bytes is None else row.planned_bytes - recorded.driver_bytes
    return LedgerRow(CONTEXT, planned, max(row.measured_bytes - count * recorded.each_bytes, 0))


def _measurements(place: Place, subject: str, ledger: Ledger, grown: dict[str, int]) -> list[Measurement]:
    """As the planner asks for them; none for a GPU of which NVML says nothing."""
    where = calibration.place_of(place.gpu) if place.gpu is not None else None
    if where is None:
        return []
    planned = {row.name: row.planned_bytes or 0 for row in ledger.rows}
    when = datetime.now(UTC).isoformat(timespec="seconds")

    def measurement(
        engine: str, version: str, component: str, of: str, plan: int, measured: int
    ) -> Measurement:
        return Measurement(
            where.gpu, where.driver, where.torch, version, engine, component, of, plan, measured, when
        )

    found = [
        measurement("native", where.snugvl, name, subject, planned[name], nbytes)
        for name, nbytes in grown.items()
    ]
    if CONTEXT in grown:
        # As `doctor --measure-context` has it: with what torch gives cuBLAS, without our kernels.
        more = place.planned().cublas_bytes - KERNEL_BYTES + LATER_BYTES
        plan, whole = max(planned[CONTEXT] + more, 0), max(grown[CONTEXT] + more, 0)
        found.append(measurement(ANY_ENGINE, "", COMPONENT, "", plan, whole))
    return found
