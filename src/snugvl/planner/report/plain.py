"""A report as plain text, for pipes and logs."""

from snugvl.core import memory_kinds
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import format_size
from snugvl.planner.report.sections import LOWER, Report, Row

BAR_WIDTH = 64
MOST_REASONS = 3
MORE = "snugvl plan … --verbose says the rest: every component, every engine, every reason."


def plain(report: Report, *, verbose: bool = True) -> str:
    """Without colours: everything, or in short."""
    lines = [report.headline]
    if report.facts:
        lines += ["", *(f"  {label:<9}{value}" for label, value in report.facts)]
    if report.rows:
        lines += ["", *(memory(report) if verbose else brief(report))]
    for title, entries in sections(report, verbose=verbose):
        lines += ["", title, *(f"  {entry}" for entry in entries)]
    if not verbose:
        lines += ["", MORE]
    return "\n".join(lines) + "\n"


def sections(report: Report, *, verbose: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    """Titles and lines of the parts below the table, those that have something to say."""
    found = [
        ("Next", next_lines(report)),
        ("Without snugvl", (report.plain_command,) if report.plain_command and verbose else ()),
        ("Engine", report.engines if verbose else ()),
        ("Also fits", report.also if verbose else tuple(each for each in report.also if LOWER in each)[:1]),
        ("Why not more", report.why_not if verbose else report.why_not[:MOST_REASONS]),
        ("Notes", report.notes),
        ("Figures", report.figures if verbose else ()),
    ]
    return [(title, entries) for title, entries in found if entries]


def next_lines(report: Report) -> tuple[str, ...]:
    """Remarks, and commands alone on their lines below them: shells take no remark for one."""
    lines: list[str] = []
    for step in report.steps:
        lines += [step.remark] if step.remark else []
        lines += [f"  {command}" if step.remark else command for command in step.commands]
    return tuple(lines)


def brief(report: Report, width: int | None = None) -> list[str]:
    """The bar, and what its parts are; the bar within `width` columns."""
    legend = [f"{kind.letter} {what}" for kind, what in parts(report)]
    half = (len(legend) + 1) // 2
    return [
        report.memory,
        f"  [{bar(report.rows, _bar_width(report, width))}] {format_size(report.total_bytes)}",
        *(f"  {', '.join(part)}" for part in (legend[:half], legend[half:]) if part),
    ]


def parts(report: Report) -> list[tuple[Kind, str]]:
    """The kinds of memory that the bar shows, each with its name and size."""
    sums: dict[Kind, int] = {}
    for row in report.rows:
        sums[row.kind] = sums.get(row.kind, 0) + row.nbytes
    return [(kind, f"{kind.group_words} {format_size(nbytes)}") for kind, nbytes in sums.items() if nbytes]


def _bar_width(report: Report, width: int | None) -> int:
    around = len(f"  [] {format_size(report.total_bytes)}")
    return BAR_WIDTH if width is None else max(1, min(BAR_WIDTH, width - around))


def memory(report: Report) -> list[str]:
    """The table and the bar."""
    width = max(len(row.label) for row in report.rows)
    seen = any(row.measured_bytes is not None for row in report.rows)
    lines = [report.memory]
    if seen:
        lines.append(f"  {'':<{width}}  {'planned':>9}  {'measured':>9}")
    for row in report.rows:
        measured = "" if row.measured_bytes is None else format_size(row.measured_bytes)
        found = f"  {measured:>9}" if seen else ""
        line = f"  {row.kind.letter} {row.label:<{width}}  {format_size(row.nbytes):>9}{found}  {row.note}"
        lines.append(line.rstrip())
    return [*lines, f"  [{bar(report.rows)}] {format_size(report.total_bytes)}"]


def bar(rows: tuple[Row, ...], width: int = BAR_WIDTH) -> str:
    """One character per share of the card; every part that is at least half a character shows."""
    return "".join(text for text, _ in pieces(rows, width, colour=False))


def pieces(rows: tuple[Row, ...], width: int, *, colour: bool) -> list[tuple[str, str]]:
    """Pieces of the bar and their colours, those of one kind together, as the legend has them."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    ordered = sorted(rows, key=lambda row: kinds.index(row.kind))
    return memory_kinds.bar(((row.kind, row.nbytes) for row in ordered), width, colour=colour)
