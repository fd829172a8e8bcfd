"""What a running engine really takes, kept for the next plan (`hardware/calibration.py`)."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from snugvl.backends.measure import CONTEXT, GRAPHS
from snugvl.hardware import calibration
from snugvl.hardware.calibration import ANY_ENGINE, Measurement
from snugvl.hardware.context_cost import COMPONENT
from snugvl.ledger import Ledger
from snugvl.place import Place
from snugvl.planner.footprint.native import KERNEL_BYTES

GRAIN_BYTES = 8 << 20  # growth that is worth writing down


def keeper(place: Place, subject: str) -> Callable[[Ledger], None]:
    """A function that is shown the ledger now and then, and writes down what has grown."""
    kept: dict[str, int] = {}

    def keep(ledger: Ledger) -> None:
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
        more = place.planned().cublas_bytes - KERNEL_BYTES
        plan, whole = max(planned[CONTEXT] + more, 0), max(grown[CONTEXT] + more, 0)
        found.append(measurement(ANY_ENGINE, "", COMPONENT, "", plan, whole))
    return found
