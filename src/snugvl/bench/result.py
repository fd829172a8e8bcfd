"""A whole measurement, as it is saved: everything that was seen, so that any figure can be computed again."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from snugvl.bench.load import Generator
from snugvl.bench.memory import MemoryPeak
from snugvl.bench.record import Record
from snugvl.bench.summary import Summary, summarize
from snugvl.bench.workload import Manner, Workload
from snugvl.errors import InputError
from snugvl.hardware.probe import probe
from snugvl.hardware.software import torch_build

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Where the client ran. `torch`: the installed version, by its metadata."""

    system: str
    processor: str
    cpu_cores: int
    ram_total_bytes: int
    gpus: tuple[str, ...]
    driver: str | None
    python: str
    torch: str | None


def describe_machine() -> MachineFacts:
    """This machine."""
    found, build = probe(), torch_build()
    return MachineFacts(
        system=f"{found.os} {platform.release()}",
        processor=_processor(),
        cpu_cores=found.cpu_cores,
        ram_total_bytes=found.ram_total_bytes,
        gpus=tuple(gpu.name for gpu in found.gpus),
        driver=next((gpu.driver for gpu in found.gpus), None),
        python=platform.python_version(),
        torch=build.version if build else None,
    )


def _processor() -> str:
    """Linux tells the model in /proc/cpuinfo, `platform` only the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - a stream that is left early
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was measured. `command`: what started it, where we did. `software`: its version, if told."""

    url: str
    manner: Manner
    software: str | None
    command: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class StartTimes:
    """From the start of the server's process, in seconds: to taking requests, and to the first token."""

    ready_s: float
    first_token_s: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One level, once. `planned_requests`: how many it would have been without an interrupt."""

    clients: int
    repeat: int
    planned_requests: int
    records: tuple[Record, ...]
    generator: Generator
    memory: MemoryPeak | None


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """One call of `snugvl bench`. `taken_at`: local time in ISO 8601."""

    taken_at: str
    snugvl: str
    machine: MachineFacts
    server: ServerFacts
    workload: Workload
    start: StartTimes | None
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    format: int = FORMAT

    @property
    def levels(self) -> tuple[Summary, ...]:
        """A summary a level, in the order in which they ran."""
        clients = dict.fromkeys(run.clients for run in self.runs)
        return tuple(summarize(each, [run.records for run in self.of(each)]) for each in clients)

    def of(self, clients: int) -> tuple[Run, ...]:
        """All runs of a level."""
        return tuple(run for run in self.runs if run.clients == clients)

    @property
    def records(self) -> tuple[Record, ...]:
        """Records of all runs."""
        return tuple(record for run in self.runs for record in run.records)


def to_json(result: BenchmarkResult) -> str:
    """The result with its summaries: for our own reading and for other programs'."""
    document = {"levels": [asdict(level) for level in result.levels], **asdict(result)}
    return json.dumps(_rounded(document), ensure_ascii=False) + "\n"


def _rounded(value: Any) -> Any:
    """Times in microseconds: more would be noise, and a third of the file."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def load(path: Path) -> BenchmarkResult:
    """A saved result.

    Raises:
        InputError: not there, not JSON, not a result, or one of another format.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{path} can't be read: {reason}") from None
    try:
        result = TypeAdapter(BenchmarkResult).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        why = f"{where}: {first['msg']}" if where else first["msg"]
        raise InputError(f"{path} is no result of `snugvl bench --json` ({why})") from None
    if result.format != FORMAT:
        raise InputError(
            f"{path} has format {result.format}; this version of snugvl reads {FORMAT}: measure again"
        )
    return result
