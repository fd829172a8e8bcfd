"""A benchmark's result for people: what was asked, the table, memory, and notes on the figures; or two saved
results side by side, as ratios of the second to the first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from snugvl.bench.load import LEAST_TOKENS, Record
from snugvl.bench.result import METRICS, BenchmarkResult, GpuPeak, MemoryPeak, Metric, Summary, higher, number
from snugvl.bench.workload import Workload
from snugvl.core.ledger import Ledger
from snugvl.core.sizes import format_size
from snugvl.core.wrapping import columns, styled
from snugvl.errors import InputError

BUSY_SHARE = 0.8
LATE_S = 0.005
NAMES = 28  # cells that the first column of a table is given on a narrow terminal: its words wrap
GAP = 3  # cells between columns


@dataclass(frozen=True, slots=True)
class Table:
    """Words in rows and columns; the first column is text, the others are figures."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """A printed report: lines above, tables, lines below."""

    above: tuple[str, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def report(result: BenchmarkResult) -> BenchmarkReport:
    """The report of a result."""
    tables = (speed(result), *_memory(memory_peak(result)))
    return BenchmarkReport(tuple(_above(result)), tables, tuple(_notes(result)))


def speed(result: BenchmarkResult) -> Table:
    """The table of speed: a row a figure, a column a level."""
    levels = result.levels
    head = ("clients", *(f"{level.clients:,}" for level in levels))
    rows = [
        ("requests answered", *(f"{level.requests - level.failed:,}" for level in levels)),
        ("requests failed", *(f"{level.failed:,}" for level in levels)),
    ]
    rows += [
        (f"{metric.name}, {metric.unit}", *(metric.shown(level) for level in levels)) for metric in METRICS
    ]
    if any(level.repeats > 1 for level in levels):
        rows.append(("output of all together, least – most", *(_range(level) for level in levels)))
    return Table("", head, tuple(rows))


def _range(level: Summary) -> str:
    found = level.output_tokens_per_s
    return "–" if found is None else f"{found.min:,.0f} – {found.max:,.0f}"


def memory_peak(result: BenchmarkResult) -> MemoryPeak | None:
    """The peaks of all levels together."""
    ledger: Ledger | None = None
    gpus: dict[int, GpuPeak] = {}
    for run in result.runs:
        if run.memory is None:
            continue
        if run.memory.ledger is not None:
            ledger = higher(ledger, run.memory.ledger)
        for index, gpu in enumerate(run.memory.gpus):
            before = gpus.get(index, gpu)
            gpus[index] = replace(gpu, peak_bytes=max(before.peak_bytes, gpu.peak_bytes))
    return MemoryPeak(ledger, tuple(gpus.values())) if ledger or gpus else None


def _memory(peak: MemoryPeak | None) -> Iterator[Table]:
    if peak is None:
        return
    if peak.ledger is not None:
        ledger = peak.ledger
        rows = [(row.name, _size(row.planned_bytes), _size(row.measured_bytes)) for row in ledger.rows]
        planned = [row.planned_bytes for row in ledger.rows if row.planned_bytes is not None]
        rows.append(
            ("the engine's process", _size(sum(planned)) if planned else "", _size(ledger.process_bytes))
        )
        if ledger.cap_bytes is not None:
            rows.append(("its cap", _size(ledger.cap_bytes), ""))
        yield Table(f"Memory: {ledger.device}", ("", "planned", "peak"), tuple(rows))
    if peak.gpus:
        shown = tuple(
            (
                gpu.name,
                _size(gpu.before_bytes),
                _size(gpu.peak_bytes),
                _size(gpu.peak_bytes - gpu.before_bytes),
            )
            for gpu in peak.gpus
        )
        yield Table("GPUs of this machine, by the driver", ("", "before", "peak", "more"), shown)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_size(nbytes)


def _above(result: BenchmarkResult) -> Iterator[str]:
    server, machine = result.server, result.machine
    what = "snugvl serve, started for this" if server.command else server.url
    version = f" (version {server.software})" if server.software else ""
    yield f"{server.manner.model} at {what}{version}"
    yield f"each request: {workload_line(result.workload)}"
    gpus = ", ".join(machine.gpus) or "no GPU"
    yield f"on {machine.processor}, {machine.cpu_cores} cores, {gpus}; {result.taken_at}"
    if result.start is not None:
        first = result.start.first_token_s
        token = f", first token after {first:.2f} s" if first is not None else ""
        yield f"ready {result.start.ready_s:.2f} s after the start{token}"


def workload_line(workload: Workload) -> str:
    """The line that describes the workload."""
    picture = "no picture"
    if workload.image is not None:
        width, height = workload.image
        kind = "the same" if workload.same_image else "a new"
        picture = f"{kind} picture of {width}×{height}"
    text = f", about {workload.prompt_tokens:,} tokens of text" if workload.prompt_tokens else ""
    return f"{picture}{text}, {workload.max_tokens:,} tokens of answer, greedy"


def _notes(result: BenchmarkResult) -> Iterator[str]:
    if result.interrupted:
        yield "interrupted: figures are of what was measured until then"
    yield from result.notes
    for level in result.levels:
        for code, count in level.errors.items():
            said = next(record.message for record in result.records if record.error == code)
            yield f"{level.clients} clients: {count:,} × {code}" + (f": {said}" if said else "")
    yield from _about_tokens(result)
    yield _generator(result)


def _about_tokens(result: BenchmarkResult) -> Iterator[str]:
    good = [record for record in result.records if record.error is None]
    if not good:
        return
    counted = [record for record in good if record.counted_by == "usage"]
    if len(counted) < len(good):
        count = len(good) - len(counted)
        yield f"{count:,} answers came without a count of tokens: each of their pieces counts as one"
    if prompts := [record.prompt_tokens for record in good if record.prompt_tokens is not None]:
        low, high = min(prompts), max(prompts)
        yield f"prompts had {low:,} tokens" if low == high else f"prompts had {low:,} to {high:,} tokens"
    short = sum(record.output_tokens < result.workload.max_tokens for record in good)
    if short:
        yield f"{short:,} of {len(good):,} answers ended before {result.workload.max_tokens:,} tokens"
    if all(record.output_tokens < LEAST_TOKENS for record in good):
        yield f"answers of fewer than {LEAST_TOKENS} tokens are too short for a decode rate"
    yield from _about_pieces(counted)


def _about_pieces(counted: Sequence[Record]) -> Iterator[str]:
    tokens = sum(record.output_tokens for record in counted)
    pieces = sum(len(record.pieces_s) for record in counted)
    if pieces < 0.95 * tokens:
        yield (
            f"{tokens:,} tokens came in {pieces:,} pieces: the inter-token latency is the time between pieces"
        )


def _generator(result: BenchmarkResult) -> str:
    costs = [run.generator for run in result.runs]
    if not costs:
        return "nothing was measured"
    share, late = max(cost.cpu_share for cost in costs), max(cost.lag_p99_s for cost in costs)
    late_ms = late * 1e3
    line = (
        f"the client used at most {share:.0%} of a core, and its times are up to {late_ms:.1f} ms late (p99)"
    )
    if share > BUSY_SHARE or late > LATE_S:
        line += (
            ". This machine was too busy for the client, so the server may be faster than these figures say"
        )
    return line


def as_text(report: BenchmarkReport) -> str:
    """A report for a pipe or a file."""
    parts = ["\n".join(report.above), *("\n".join(_lines(table)) for table in report.tables)]
    return "\n\n".join([*parts, "\n".join(report.notes)]) + "\n"


def _lines(table: Table) -> Iterator[str]:
    rows = (table.head, *table.rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    if table.title:
        yield table.title
    for row in rows:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *figures]).rstrip()


def in_width(table: Table, width: int) -> Iterator[Table]:
    """The table in as many parts as a narrow terminal needs; each has the first column and some figures."""
    rows = (table.head, *table.rows)
    names, *figures = (max(len(row[column]) for row in rows) for column in range(len(table.head)))
    free = width - min(names, NAMES)
    chosen: list[int] = []
    for column, needed in enumerate(figures, 1):
        if chosen and sum(figures[each - 1] + GAP for each in chosen) + needed + GAP > free:
            yield _columns(table, chosen)
            chosen = []
        chosen.append(column)
    yield _columns(table, chosen)


def _columns(table: Table, chosen: Sequence[int]) -> Table:
    head, *rows = (tuple(row[column] for column in (0, *chosen)) for row in (table.head, *table.rows))
    return Table(table.title, head, tuple(rows))


def print_to_terminal(report: BenchmarkReport, file: TextIO) -> None:
    """A report with rules and weights."""
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = Console(file=file, highlight=False)
    width = columns(file) or console.width

    def put(text: Text) -> None:
        console.print(styled(text, width, 2), soft_wrap=True)

    for index, line in enumerate(report.above):
        put(Text(line, "bold" if index == 0 else "dim"))
    for table in (part for whole in report.tables for part in in_width(whole, width)):
        console.print()
        if table.title:
            put(Text(table.title, "bold"))
        grid = Grid(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="cyan")
        for index, name in enumerate(table.head):
            grid.add_column(Text(name), justify="right" if index else "left", no_wrap=index > 0)
        for row in table.rows:
            grid.add_row(*(Text(cell) for cell in row))
        console.print(grid)
    console.print()
    for line in report.notes:
        put(Text(line, "dim"))


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
        raise InputError(
            f"the two results have no number of clients in common: {have}; measure both "
            "with the same --levels"
        )
    tables = [_level(one, other) for one, other in pairs]
    above = [_line("A", names[0], first), _line("B", names[1], second)]
    if memory := tuple(_others(first, second)):
        tables.append(Table("Start and memory", ("", "A", "B", "B / A"), memory))
    return BenchmarkReport(tuple(above), tuple(tables), tuple(_unlike(first, second)))


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


def _unlike(first: BenchmarkResult, second: BenchmarkResult) -> Iterator[str]:
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
