"""Results made up by hand, with figures that are easy to check."""

from snugvl.bench.load import Generator, Record
from snugvl.bench.result import (
    BenchmarkResult,
    GpuPeak,
    MachineFacts,
    MemoryPeak,
    Run,
    ServerFacts,
    StartTimes,
)
from snugvl.bench.workload import Manner, Workload
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind

GIB = 1 << 30
MACHINE = MachineFacts("linux 6", "a processor", 16, 64 * GIB, ("NVIDIA H200",), "580.1", "3.11", "2.11")


def run(clients: int, *, pace: float = 1.0, memory: MemoryPeak | None = None, repeat: int = 0) -> Run:
    """Every client sends one request: a token after 0.1 s · pace, then 9 more, each after 0.01 s · pace."""
    pieces = tuple(pace * (0.1 + 0.01 * number) for number in range(10))
    record = Record(0.0, pieces[-1], pieces, pieces[-1], 100, 10, "usage", "length")
    return Run(clients, repeat, clients, (record,) * clients, Generator(0.05, 1e-5, 1e-4, 1e-3), memory)


def memory(process: int = 6 * GIB) -> MemoryPeak:
    rows = (
        LedgerRow("text weights", 4 * GIB, 4 * GIB, kind=Kind.TEXT),
        LedgerRow("KV cache", GIB, GIB, GIB // 2, kind=Kind.CACHE),
        LedgerRow("Python & <libraries>", None, GIB // 2),
    )
    ledger = Ledger("NVIDIA H200", rows, 140 * GIB, 100 * GIB, process, 7 * GIB)
    return MemoryPeak(ledger, (GpuPeak("NVIDIA H200", 140 * GIB, 2 * GIB, 8 * GIB),))


def result(*runs: Run, start: StartTimes | None = None, model: str = "a/model") -> BenchmarkResult:
    manner = Manner(model)
    return BenchmarkResult(
        taken_at="2026-11-21T08:00:00+00:00",
        snugvl="0.1.0",
        machine=MACHINE,
        server=ServerFacts("http://127.0.0.1:1", manner, None, None),
        workload=Workload((1024, 1024), None, 10, False, 1),
        start=start,
        runs=runs,
    )
