"""What a running engine writes down for the next plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snugvl.backends.measure import CONTEXT, LATE
from snugvl.backends.native.remember import FEW, GRAIN_BYTES, keeper
from snugvl.backends.place import TargetDevice
from snugvl.core.ledger import Ledger, LedgerRow, last_start_file, read_last_start
from snugvl.core.service import Load
from snugvl.hardware import calibration
from snugvl.hardware.calibration import with_measured
from snugvl.hardware.machine import Gpu
from snugvl.planner.engines.native import footprint as native
from snugvl.planner.engines.native.footprint import KERNEL_BYTES
from snugvl.planner.engines.native.step_graphs import MOST, MOST_OF_DRAFTS

MIB = 1 << 20
GPU = Gpu(0, "Test GPU", 8 << 30, 7 << 30, (12, 0), driver="580.1", uuid="GPU-1")
PLACE = TargetDevice(torch.device("cuda", 0), "Test GPU", 7 << 30, (12, 0), context_bytes=350 * MIB, gpu=GPU)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calibration.calibration_file()


def ledger(context: int, graphs: int, late: int = 0) -> Ledger:
    rows = (
        LedgerRow(CONTEXT, 490 * MIB, context),
        LedgerRow(LATE, 16 * MIB, late),
        LedgerRow("CUDA graphs", 80 * MIB, graphs),
    )
    return Ledger("Test GPU", rows, 8 << 30, 1 << 30, 6 << 30)


def test_the_next_plan_knows_the_context(cache: Path) -> None:
    keeper(PLACE, "model and settings")(ledger(400 * MIB, 60 * MIB), Load())
    assert with_measured(GPU).context_bytes == 400 * MIB + 32 * MIB - KERNEL_BYTES
    known = calibration.load(cache)
    place = calibration.place_of(GPU)
    graphs = known.measured("native", "CUDA graphs", place, subject="model and settings")
    assert graphs is not None
    assert (graphs.planned_bytes, graphs.measured_bytes) == (80 * MIB, 60 * MIB)
    assert known.measured("native", "CUDA graphs", place, subject="others") is None


def test_what_a_start_measured_is_the_least_that_is_remembered() -> None:
    """A plan that counts on less would be made again by each start."""
    keeper(replace(PLACE, context_bytes=420 * MIB), "subject")(ledger(400 * MIB, 60 * MIB), Load())
    assert 400 * MIB + 32 * MIB - KERNEL_BYTES < 420 * MIB
    assert with_measured(GPU).context_bytes == 420 * MIB


def test_what_the_driver_took_late_is_planned_from_the_start_next_time() -> None:
    """An 8B in 7,200 MiB took 2 MiB more than an earlier start had measured, and 4.4 in another run."""
    keep = keeper(PLACE, "subject")
    for late in (0, 2, 4):
        keep(ledger(756 * MIB, 60 * MIB, late * MIB), Load())
    remembered = with_measured(GPU).context_bytes
    assert remembered is not None
    assert remembered - PLACE.planned().cublas_bytes + KERNEL_BYTES == 760 * MIB  # `planned_rows`


def test_the_largest_context_is_remembered_whichever_engine_ran_last() -> None:
    """A model of few layers has fewer kernels and smaller graphs than the next one."""
    for context in (700, 760, 730):
        keeper(PLACE, f"subject {context}")(ledger(context * MIB, 60 * MIB), Load())
    assert with_measured(GPU).context_bytes == 760 * MIB + 32 * MIB - KERNEL_BYTES


def test_the_ledger_and_the_plan_call_late_kernels_the_same() -> None:
    assert LATE == native.LATE


def test_a_context_is_no_measurement_before_kernels_are_loaded(cache: Path) -> None:
    keep = keeper(PLACE, "subject")
    keep(ledger(300 * MIB, 0), Load())
    assert not calibration.load(cache).measurements
    keep(ledger(400 * MIB, 60 * MIB), Load())
    assert with_measured(GPU).context_bytes == 400 * MIB + 32 * MIB - KERNEL_BYTES


def test_the_drivers_part_of_recordings_is_not_the_contexts(cache: Path) -> None:
    """Few engines have them: the next plan would count them for every one."""
    keep = keeper(PLACE, "subject", MOST * 2 * MIB, MOST)
    keep(ledger(406 * MIB, 60 * MIB), Load(recorded=3))
    assert with_measured(GPU).context_bytes == 400 * MIB + 32 * MIB - KERNEL_BYTES
    place = calibration.place_of(GPU)
    context = calibration.load(cache).measured("native", CONTEXT, place, subject="subject")
    assert context is not None
    assert (context.planned_bytes, context.measured_bytes) == ((490 - MOST * 2) * MIB, 400 * MIB)
    keep(ledger(460 * MIB, 60 * MIB), Load(recorded=FEW + 1))
    assert with_measured(GPU).context_bytes == 400 * MIB + 32 * MIB - KERNEL_BYTES


def test_a_plan_of_drafts_alone_has_fewer_recordings() -> None:
    keeper(PLACE, "subject", MOST_OF_DRAFTS * 2 * MIB, MOST_OF_DRAFTS)(
        ledger(406 * MIB, 60 * MIB), Load(recorded=3)
    )
    assert with_measured(GPU).context_bytes == 400 * MIB + 32 * MIB - KERNEL_BYTES


def test_where_the_driver_tells_nothing_the_newest_start_is_remembered(cache: Path) -> None:
    """As under WSL2: others may have been a part of an earlier figure."""

    def silent() -> Ledger:
        whole = ledger(0, 60 * MIB)
        rows = (LedgerRow(CONTEXT, 490 * MIB), *whole.rows[1:])
        return replace(whole, rows=rows)

    for nbytes in (600, 520):
        keep = keeper(replace(PLACE, context_bytes=nbytes * MIB, context_measured=True), "subject")
        keep(silent(), Load())
        assert with_measured(GPU).context_bytes == nbytes * MIB
        cache_before = cache.read_text()
        keep(silent(), Load())
        assert cache.read_text() == cache_before, "once a start"
    keeper(replace(PLACE, context_bytes=450 * MIB), "subject")(silent(), Load())
    assert with_measured(GPU).context_bytes == 520 * MIB, "a default is no measurement"


def test_only_growth_is_written_down(cache: Path) -> None:
    keep = keeper(PLACE, "subject")
    keep(ledger(400 * MIB, 60 * MIB), Load())
    cache.unlink()
    keep(ledger(400 * MIB, 60 * MIB + GRAIN_BYTES - 1), Load())
    assert not cache.exists()
    keep(ledger(400 * MIB, 60 * MIB + GRAIN_BYTES), Load())
    assert [each.component for each in calibration.load(cache).measurements] == ["CUDA graphs"]


def test_without_nvml_nothing_is_written_down(cache: Path) -> None:
    unknown = TargetDevice(torch.device("cuda", 0), "a GPU", 7 << 30)
    keeper(unknown, "subject")(ledger(400 * MIB, 60 * MIB), Load())
    assert not calibration.load(cache).measurements


def test_a_folder_that_can_not_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keeper(PLACE, "subject")(ledger(400 * MIB, 60 * MIB), Load())


def test_the_last_start_is_kept_for_a_report() -> None:
    """Planned beside taken, with what has started; the newest counts."""
    for nbytes in (300 * MIB, 400 * MIB):
        keeper(PLACE, "subject", about={"network": "Toy"})(ledger(nbytes, 60 * MIB), Load())
    start = read_last_start(last_start_file())["start"]
    assert start["network"] == "Toy"
    taken = {row["name"]: row["measured_bytes"] for row in start["rows"]}
    assert taken[CONTEXT] == 400 * MIB
