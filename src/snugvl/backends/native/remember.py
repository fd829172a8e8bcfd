"""Keeps the memory that a running engine really takes for the next plan (`hardware/calibration.py`)."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from snugvl.backends.measure import CONTEXT, GRAPHS, LATE
from snugvl.backends.place import TargetDevice
from snugvl.core.ledger import Ledger, LedgerRow, keep_last_start, last_start_file
from snugvl.core.service import Load
from snugvl.hardware import calibration
from snugvl.hardware.calibration import ANY_ENGINE, COMPONENT, Measurement
from snugvl.planner.engines.native.footprint import KERNEL_BYTES

GRAIN_BYTES = 8 << 20  # growth that is worth writing down, but for the context's: a plan fills its share
FEW = 4  # recordings whose part of the driver's memory is known well enough


def keeper(
    place: TargetDevice,
    subject: str,
    graphs_bytes: int = 0,
    most: int = 1,
    about: Mapping[str, object] | None = None,
) -> Callable[[Ledger, Load], None]:
    """A function that is shown the ledger now and then, and writes down what has grown.

    `graphs_bytes`: the driver's part of graphs of steps with prompts or drafts, `most` of them, as planned.
    Few engines have it, and it is not the context's: another plan would count it twice. It is known for the
    largest of them, so the context is no longer a measurement once there are some. `about`: what has started,
    for a report.

    The driver loads kernels when they first run, and how many of them depends on the model and on what it is
    asked. So the context that is kept is the largest that any engine had on such a GPU and driver.
    """
    kept: dict[str, int] = {}

    def keep(ledger: Ledger, load: Load) -> None:
        context = ledger.row(CONTEXT)
        told = context is None or context.measured_bytes is not None
        untold = not told and place.context_measured and CONTEXT not in kept
        ledger = replace(ledger, rows=_rows(ledger, graphs_bytes, most, load.recorded))
        graphs = ledger.row(GRAPHS)
        ran = graphs is not None and bool(graphs.measured_bytes)
        grown = {
            row.name: row.measured_bytes
            for row in ledger.rows
            if row.measured_bytes
            and row.measured_bytes >= kept.get(row.name, 0) + (1 if row.name == CONTEXT else GRAIN_BYTES)
            # The driver loads kernels when they first run: before, its part looks too small.
            and (ran or row.name != CONTEXT)
        }
        if untold:  # the start's own figure is all there is; the newest, since others are a part of it
            kept[CONTEXT] = place.context_bytes
            _add([_measurement(place, ANY_ENGINE, COMPONENT, measured=place.context_bytes)])
        if grown:
            kept.update(grown)
            keep_last_start(last_start_file(), "start", {**(about or {}), **_told(ledger)})
            _add(*_measurements(place, subject, ledger, grown))

    return keep


def _told(ledger: Ledger) -> dict[str, object]:
    """Planned beside taken, for a report."""
    rows = [
        {"name": row.name, "planned_bytes": row.planned_bytes, "measured_bytes": row.measured_bytes}
        for row in ledger.rows
    ]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"when": when, "rows": rows, "process_bytes": ledger.process_bytes}


def _add(found: list[Measurement | None], largest: list[Measurement | None] | None = None) -> None:
    """Write measurements to the cache folder; where that can't be written, plans estimate."""
    known, most = ([each for each in some or [] if each is not None] for some in (found, largest))
    if known or most:
        with suppress(OSError):
            calibration.add(calibration.calibration_file(), known, largest=most)


def _rows(ledger: Ledger, graphs_bytes: int, most: int, count: int) -> tuple[LedgerRow, ...]:
    """The ledger's rows, the driver's memory in one of them and without the part of `count` recordings."""
    late = ledger.row(LATE)
    return tuple(_alone(row, late, graphs_bytes, most, count) for row in ledger.rows if row.name != LATE)


def _alone(row: LedgerRow, late: LedgerRow | None, graphs_bytes: int, most: int, count: int) -> LedgerRow:
    if row.name != CONTEXT or row.measured_bytes is None:
        return row
    if count > FEW:
        return LedgerRow(CONTEXT)
    planned = None if row.planned_bytes is None else row.planned_bytes - graphs_bytes
    measured = row.measured_bytes + ((late.measured_bytes or 0) if late is not None else 0)
    return LedgerRow(CONTEXT, planned, max(measured - count * graphs_bytes // most, 0))


def _measurements(
    place: TargetDevice, subject: str, ledger: Ledger, grown: dict[str, int]
) -> tuple[list[Measurement | None], list[Measurement | None]]:
    """(measurements under the planner's keys, those of the context)."""
    planned = {row.name: row.planned_bytes or 0 for row in ledger.rows}
    found = [
        _measurement(place, "native", name, subject, planned=planned[name], measured=nbytes)
        for name, nbytes in grown.items()
    ]
    if CONTEXT not in grown:
        return found, []
    # As `doctor --measure-context` has it: with what torch gives cuBLAS, without our kernels; and no less
    # than the driver took before there were any.
    more = place.planned().cublas_bytes - KERNEL_BYTES
    plan, whole = max(planned[CONTEXT] + more, 0), max(grown[CONTEXT] + more, place.context_bytes)
    return found, [_measurement(place, ANY_ENGINE, COMPONENT, planned=plan, measured=whole)]


def _measurement(
    place: TargetDevice, engine: str, component: str, subject: str = "", *, planned: int = 0, measured: int
) -> Measurement | None:
    """The measurement of an engine's component here; None for a GPU that NVML doesn't know."""
    where = calibration.place_of(place.gpu) if place.gpu is not None else None
    if where is None:
        return None
    version = "" if engine == ANY_ENGINE else where.snugvl
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Measurement(
        where.gpu, where.driver, where.torch, version, engine, component, subject, planned, measured, when
    )
