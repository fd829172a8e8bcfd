"""Two saved results side by side, as ratios: the second to the first."""

from collections.abc import Iterator

from snugvl.bench.report import BenchmarkReport, Table, memory_peak, workload_line
from snugvl.bench.result import BenchmarkResult
from snugvl.bench.summary import METRICS, Metric, Summary, number
from snugvl.core.sizes import format_size
from snugvl.errors import InputError


def compare(first: BenchmarkResult, second: BenchmarkResult, names: tuple[str, str]) -> BenchmarkReport:
    """Every figure of every level that both have.

    Raises:
        InputError: they have no level in common.
    """
    theirs = {level.clients: level for level in second.levels}
    pairs = [(level, theirs[level.clients]) for level in first.levels if level.clients in theirs]
    if not pairs:
        have = " and ".join(
            ", ".join(str(level.clients) for level in result.levels) or "none" for result in (first, second)
        )
        raise InputError(f"the two results have no number of clients in common: {have}")
    tables = [_level(one, other) for one, other in pairs]
    above = [_line("A", names[0], first), _line("B", names[1], second)]
    if memory := tuple(_others(first, second)):
        tables.append(Table("Start and memory", ("", "A", "B", "B / A"), memory))
    return BenchmarkReport(tuple(above), tuple(tables), tuple(_warnings(first, second)))


def _line(letter: str, name: str, result: BenchmarkResult) -> str:
    return f"{letter}: {name}, {result.server.manner.model}, {result.taken_at}"


def _level(one: Summary, other: Summary) -> Table:
    rows = tuple(_row(metric, one, other) for metric in METRICS)
    title = f"{one.clients:,} client{'s' if one.clients != 1 else ''}"
    return Table(title, ("", "A", "B", "B / A", ""), rows)


def _row(metric: Metric, one: Summary, other: Summary) -> tuple[str, ...]:
    shown = f"{metric.name}, {metric.unit}", metric.shown(one), metric.shown(other)
    before, after = metric.of(one), metric.of(other)
    if not before or after is None:
        return (*shown, "–", "")
    return (*shown, *ratio(before, after, higher_is_better=metric.higher_is_better))


def ratio(before: float, after: float, *, higher_is_better: bool) -> tuple[str, str]:
    """The ratio with two decimals, and which is better where that can be seen in it."""
    text = f"{after / before:.2f}"
    if text == "1.00":
        return text, ""
    return text, "B better" if (after > before) == higher_is_better else "A better"


def _others(first: BenchmarkResult, second: BenchmarkResult) -> Iterator[tuple[str, ...]]:
    one, other = first.start, second.start
    if one is not None and other is not None:
        yield (
            "start to ready, s",
            number(one.ready_s),
            number(other.ready_s),
            f"{other.ready_s / one.ready_s:.2f}",
        )
    for name, before, after in zip(("engine's process", "GPU"), _peaks(first), _peaks(second), strict=True):
        if before and after:
            yield f"{name}, peak", format_size(before), format_size(after), f"{after / before:.2f}"


def _peaks(result: BenchmarkResult) -> tuple[int | None, int | None]:
    """Peak of the engine's process by its ledger, and the growth of the GPUs' memory by the driver."""
    peak = memory_peak(result)
    if peak is None:
        return None, None
    # Of a server that ran already, most was held before anything was watched.
    grown = sum(gpu.peak_bytes - gpu.before_bytes for gpu in peak.gpus) if result.server.command else 0
    return peak.ledger.process_bytes if peak.ledger else None, grown or None


def _warnings(first: BenchmarkResult, second: BenchmarkResult) -> Iterator[str]:
    if _asked(first) != _asked(second):
        one, other = workload_line(first.workload), workload_line(second.workload)
        yield f"they were asked different things: A: {one}; B: {other}"
    if first.server.manner.ignore_eos != second.server.manner.ignore_eos:
        yield "only one of the servers took ignore_eos: their answers differ in length"
    if first.machine != second.machine:
        yield "they were measured on different machines or versions: ratios mean little"
    for letter, result in (("A", first), ("B", second)):
        if result.interrupted:
            yield f"{letter} was interrupted"
        if any(level.failed for level in result.levels):
            yield f"{letter} has failed requests"


def _asked(result: BenchmarkResult) -> tuple[object, ...]:
    asked = result.workload
    return asked.image, asked.prompt_tokens, asked.max_tokens, asked.same_image
