"""A report as plain text, for pipes and logs."""

from itertools import pairwise

from snugvl.planner.report.sections import Report, Row
from snugvl.planner.shortfall import gib

BAR_WIDTH = 64
MARKS = {
    "held": "#", "context": "c", "weights": "W", "kv": "K", "work": "v", "other": "o", "spare": ".",
    "margin": "-",
}  # fmt: skip


def plain(report: Report) -> str:
    """Everything, without colours."""
    lines = [report.headline, ""]
    lines += [f"  {label:<9}{value}" for label, value in report.facts]
    if report.rows:
        lines += ["", *memory(report)]
    for title, entries in sections(report):
        lines += ["", title, *(f"  {entry}" for entry in entries)]
    return "\n".join(lines) + "\n"


def sections(report: Report) -> list[tuple[str, tuple[str, ...]]]:
    """Titles and lines of the parts below the table, those that have something to say."""
    parts = [
        ("Next", (report.command,) if report.command else ()),
        ("Without snugvl", (report.plain_command,) if report.plain_command else ()),
        ("Engine", report.engines),
        ("Also fits", report.also),
        ("Why not", report.why_not),
        ("Notes", report.notes),
    ]
    return [(title, entries) for title, entries in parts if entries]


def memory(report: Report) -> list[str]:
    """The table and the bar."""
    width = max(len(row.label) for row in report.rows)
    seen = any(row.measured_bytes is not None for row in report.rows)
    lines = [f"Memory: {gib(report.used_bytes)} of {gib(report.usable_bytes)} that may be used"]
    if seen:
        lines.append(f"  {'':<{width}}  {'planned':>9}  {'measured':>9}")
    for row in report.rows:
        found = f"  {gib(row.measured_bytes) if row.measured_bytes is not None else '':>9}" if seen else ""
        lines.append(
            f"  {MARKS[row.kind]} {row.label:<{width}}  {gib(row.nbytes):>9}{found}  {row.note}".rstrip()
        )
    return [*lines, f"  [{bar(report.rows)}] {gib(report.total_bytes)}"]


def bar(rows: tuple[Row, ...], width: int = BAR_WIDTH) -> str:
    """One character per share of the card; every part that is at least half a character shows."""
    return "".join(MARKS[row.kind] * cells for row, cells in zip(rows, shares(rows, width), strict=True))


def shares(rows: tuple[Row, ...], width: int) -> list[int]:
    """`width` cells shared among rows by size, rounded so that they sum up to `width`."""
    total = sum(row.nbytes for row in rows) or 1
    edges, passed = [0], 0
    for row in rows:
        passed += row.nbytes
        edges.append(round(passed * width / total))
    return [after - before for before, after in pairwise(edges)]
