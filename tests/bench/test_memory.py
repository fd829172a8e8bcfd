"""Peaks: of ledgers, and of GPUs by a scripted driver."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from snugvl.bench.measure import GpuWatch
from snugvl.bench.result import higher
from snugvl.core.ledger import Ledger, LedgerRow
from tests.patience import until


def ledger(*rows: LedgerRow, process: int, free: int) -> Ledger:
    return Ledger("a GPU", rows, 100, free, process)


def test_every_component_keeps_its_own_peak() -> None:
    first = ledger(LedgerRow("a", 5, 4, 1), LedgerRow("b", None, None), process=9, free=50)
    then = ledger(LedgerRow("a", 5, 3, 2), LedgerRow("b", None, 7), LedgerRow("c", 1, 1), process=8, free=60)
    peak = higher(higher(None, first), then)
    assert peak.row("a") == LedgerRow("a", 5, 4, 2)
    assert peak.row("b") == LedgerRow("b", None, 7)
    assert peak.row("c") == LedgerRow("c", 1, 1)
    assert (peak.process_bytes, peak.free_bytes) == (9, 50)


@dataclass
class Info:
    used: int
    total: int = 1000


class NVMLError(Exception):
    """Of the scripted driver."""


@dataclass
class Driver:
    """One GPU whose memory goes up and down, and one that tells nothing."""

    readings: Iterator[int] = field(default_factory=lambda: iter([100, *([100] * 3), 900, *([200] * 10_000)]))
    NVMLError = NVMLError
    shut: bool = False
    looked: int = 0

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if handle == 1:
            raise NVMLError
        self.looked += 1
        return Info(next(self.readings))

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut = True


def test_the_peak_of_a_gpu_is_seen_between_two_looks() -> None:
    driver = Driver()
    with GpuWatch(driver) as watch:
        until(lambda: driver.looked >= 8)
        (peak,) = watch.take()
        (later,) = watch.take()
    assert (peak.name, peak.total_bytes, peak.before_bytes, peak.peak_bytes) == ("GPU 0", 1000, 100, 900)
    assert later.peak_bytes == 200
    assert driver.shut


def test_a_machine_without_a_driver(monkeypatch: Any) -> None:
    monkeypatch.setattr("snugvl.bench.measure.started", lambda: None)
    with GpuWatch() as watch:
        assert watch.take() == ()
