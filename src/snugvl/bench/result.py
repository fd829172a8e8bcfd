"""A whole measurement, as it is saved: all records, so that any figure can be computed again, and the
arithmetic from a level's records to medians, percentiles and rates. Pure.
"""

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal, get_args

from snugvl.bench.load import Generator, Record, percentile
from snugvl.bench.workload import Manner, Workload
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.errors import InputError
from snugvl.hardware.probe import probe
from snugvl.hardware.software import torch_build

Share = Literal["median", "p95", "p99"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of values. Percentiles are interpolated between the two nearest values."""

    count: int
    mean: float
    min: float
    median: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One level, all its repeats together.

    Attributes:
        errors: number of requests by error code.
        first_token_s, latency_s: seconds from sending to the first piece and to the end.
        inter_token_s: seconds between pieces of one answer, all answers together.
        decode_tokens_per_s: tokens a second of single answers, after their first token.
        output_tokens_per_s, requests_per_s: rates of all clients together, one value a repeat.
        prompt_tokens, output_tokens: tokens of single requests.
        pieces: number of answers without usage, for which pieces are counted instead of tokens.
    """

    clients: int
    repeats: int
    requests: int
    failed: int
    errors: Mapping[str, int]
    first_token_s: Distribution | None
    inter_token_s: Distribution | None
    latency_s: Distribution | None
    decode_tokens_per_s: Distribution | None
    output_tokens_per_s: Distribution | None
    requests_per_s: Distribution | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    pieces: Distribution | None
    counted_by_pieces: int


def spread(values: Iterable[float | None]) -> Distribution | None:
    """The distribution of the values that aren't None; None without any."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Distribution(
        len(ordered), fmean(ordered), ordered[0], median(ordered),
        percentile(ordered, 0.95), percentile(ordered, 0.99), ordered[-1],
    )  # fmt: skip


def summarize(clients: int, repeats: Sequence[Sequence[Record]]) -> Summary:
    """The summary of a level, from the records of each of its repeats."""
    records = [record for repeat in repeats for record in repeat]
    good = [record for record in records if record.error is None]
    return Summary(
        clients=clients,
        repeats=len(repeats),
        requests=len(records),
        failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        first_token_s=spread(record.first_token_s for record in good),
        inter_token_s=spread(gap for record in good for gap in record.gaps_s),
        latency_s=spread(record.latency_s for record in good),
        decode_tokens_per_s=spread(record.decode_tokens_per_s for record in good),
        output_tokens_per_s=spread(rate(repeat, tokens=True) for repeat in repeats),
        requests_per_s=spread(rate(repeat, tokens=False) for repeat in repeats),
        prompt_tokens=spread(record.prompt_tokens for record in good),
        output_tokens=spread(record.output_tokens for record in good),
        pieces=spread(len(record.pieces_s) for record in good),
        counted_by_pieces=sum(record.counted_by == "pieces" for record in good),
    )


def rate(records: Sequence[Record], *, tokens: bool) -> float | None:
    """Output tokens (or answers) of the good requests per second, from the first sent to the last ended."""
    good = [record for record in records if record.error is None]
    if not good:
        return None
    seconds = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    amount = sum(record.output_tokens for record in good) if tokens else len(good)
    return amount / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a summary. `scale`: factor from our units to `unit`."""

    name: str
    unit: str
    of: Callable[[Summary], float | None]
    scale: float = 1.0
    higher_is_better: bool = False

    def shown(self, summary: Summary) -> str:
        """The figure in its unit, with three digits that matter; "–" where there is none."""
        value = self.of(summary)
        return "–" if value is None else number(value * self.scale)


def number(value: float) -> str:
    """A figure with about three digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _of(
    name: str, unit: str, field: str, share: Share = "median", *, scale: float = 1.0, more: bool = False
) -> Metric:
    """A metric that reads a share of one of a level's spreads. `more`: higher is better."""

    def read(level: Summary) -> float | None:
        spread: Distribution | None = getattr(level, field)
        return None if spread is None else getattr(spread, share)

    return Metric(name, unit, read, scale, more)


def _shares(name: str, unit: str, field: str, scale: float = 1.0) -> tuple[Metric, ...]:
    return tuple(_of(f"{name}, {share}", unit, field, share, scale=scale) for share in get_args(Share))


FIRST_TOKEN: Final = _shares("time to first token", "ms", "first_token_s", 1e3)
INTER_TOKEN: Final = _shares("inter-token latency", "ms", "inter_token_s", 1e3)
LATENCY: Final = _shares("whole answer", "s", "latency_s")
EACH: Final = _of("decode of one request, median", "tokens/s", "decode_tokens_per_s", more=True)
ALL: Final = _of("output of all together", "tokens/s", "output_tokens_per_s", more=True)
REQUESTS: Final = _of("requests", "1/s", "requests_per_s", more=True)
METRICS: Final = (*FIRST_TOKEN, *INTER_TOKEN, *LATENCY, EACH, ALL, REQUESTS)


@dataclass(frozen=True, slots=True)
class GpuPeak:
    """Peak memory of a GPU, all processes together, by NVML. `before_bytes`: use when watching began."""

    name: str
    total_bytes: int
    before_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peak memory of one level; every row may have another moment. `ledger`: None for a foreign server."""

    ledger: Ledger | None
    gpus: tuple[GpuPeak, ...] = ()


def higher(before: Ledger | None, now: Ledger) -> Ledger:
    """A ledger with each component's larger reading of the two."""
    if before is None:
        return now
    rows = tuple(_higher_row(before.row(row.name), row) for row in now.rows)
    return replace(
        now,
        rows=rows,
        process_bytes=max(before.process_bytes, now.process_bytes),
        free_bytes=min(before.free_bytes, now.free_bytes),
    )


def _higher_row(before: LedgerRow | None, now: LedgerRow) -> LedgerRow:
    if before is None:
        return now
    return replace(
        now,
        measured_bytes=_larger(before.measured_bytes, now.measured_bytes),
        used_bytes=_larger(before.used_bytes, now.used_bytes),
    )


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine on which the client ran. `torch`: the installed version, by its metadata."""

    system: str
    processor: str
    cpu_cores: int
    ram_total_bytes: int
    gpus: tuple[str, ...]
    driver: str | None
    python: str
    torch: str | None


def describe_machine() -> MachineFacts:
    """The hardware and software of this machine, as a result file states them."""
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
    """The processor's model from /proc/cpuinfo on Linux, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - a stream that is left early
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server that was measured. `command`: its command, where the benchmark started it. `software`: its
    name and version, where it tells them."""

    url: str
    manner: Manner
    software: str | None
    command: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds from the start of the server's process until it takes requests, and until the first token."""

    ready_s: float
    first_token_s: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a level. `planned_requests`: number of requests it would have had without an interrupt."""

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
        """All runs of the level with `clients` clients."""
        return tuple(run for run in self.runs if run.clients == clients)

    @property
    def records(self) -> tuple[Record, ...]:
        """Records of all runs."""
        return tuple(record for run in self.runs for record in run.records)


def to_json(result: BenchmarkResult) -> str:
    """The result with its summaries, as JSON for `load` and for other programs."""
    document = {"levels": [asdict(level) for level in result.levels], **asdict(result)}
    return json.dumps(_rounded(document), ensure_ascii=False) + "\n"


def _rounded(value: Any) -> Any:
    """The value with times rounded to microseconds: more would be noise, and a third of the file."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def load(path: Path) -> BenchmarkResult:
    """Read a saved result.

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
        raise InputError(f"{path} is not a result of `snugvl bench --json` ({why})") from None
    if result.format != FORMAT:
        raise InputError(
            f"{path} has format {result.format}; this version of snugvl reads {FORMAT}: measure again"
        )
    return result
