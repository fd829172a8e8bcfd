"""A report as text: plain for pipes and logs, in colours on a terminal; Rich is imported for the latter."""

from typing import TextIO

from snugvl.core import memory_kinds
from snugvl.core.memory_kinds import Kind, marked
from snugvl.core.sizes import format_size
from snugvl.core.wrapping import columns, styled, wrapped_command
from snugvl.planner.report.sections import LOWER, MemoryRow, Report

BAR_WIDTH = 64
TERMINAL_BAR_WIDTH = 76
FACTS = 11  # columns before what is said of each setting
MOST_REASONS = 3
MORE = "snugvl plan … --verbose says the rest: every component, every engine, every reason."


def plain(report: Report, *, verbose: bool = True) -> str:
    """The report as text without colours: all of it (`verbose`), or the short form."""
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
    """(title, lines) of each part below the table that isn't empty."""
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
    """Lines of the next steps: a remark, then its commands on lines of their own, so they can be pasted."""
    lines: list[str] = []
    for step in report.steps:
        lines += [step.remark] if step.remark else []
        lines += [f"  {command}" if step.remark else command for command in step.commands]
    return tuple(lines)


def brief(report: Report, width: int | None = None) -> list[str]:
    """Lines with the bar, within `width` columns, and the legend of its parts."""
    legend = [f"{kind.letter} {what}" for kind, what in parts(report)]
    half = (len(legend) + 1) // 2
    total = format_size(report.total_bytes)
    cells = BAR_WIDTH if width is None else max(1, min(BAR_WIDTH, width - len(f"  [] {total}")))
    return [
        report.memory,
        f"  [{bar(report.rows, cells)}] {total}",
        *(f"  {', '.join(part)}" for part in (legend[:half], legend[half:]) if part),
    ]


def parts(report: Report) -> list[tuple[Kind, str]]:
    """(kind, name with size) of each kind of memory that the bar shows."""
    sums: dict[Kind, int] = {}
    for row in report.rows:
        sums[row.kind] = sums.get(row.kind, 0) + row.nbytes
    return [(kind, f"{kind.group_words} {format_size(nbytes)}") for kind, nbytes in sums.items() if nbytes]


def memory(report: Report) -> list[str]:
    """Lines with the table of memory and the bar."""
    width = max(len(row.label) for row in report.rows)
    seen = _measured(report)
    lines = [report.memory]
    if seen:
        lines.append(f"  {'':<{width}}  {'planned':>9}  {'measured':>9}")
    for row in report.rows:
        measured = "" if row.measured_bytes is None else format_size(row.measured_bytes)
        found = f"  {measured:>9}" if seen else ""
        line = f"  {row.kind.letter} {row.label:<{width}}  {format_size(row.nbytes):>9}{found}  {row.note}"
        lines.append(line.rstrip())
    return [*lines, f"  [{bar(report.rows)}] {format_size(report.total_bytes)}"]


def bar(rows: tuple[MemoryRow, ...], width: int = BAR_WIDTH) -> str:
    """The bar of `width` characters; a part of at least half a character shows."""
    return "".join(text for text, _ in pieces(rows, width, colour=False))


def pieces(rows: tuple[MemoryRow, ...], width: int, *, colour: bool) -> list[tuple[str, str]]:
    """(text, colour) of each piece of the bar; parts of one kind are one piece, as in the legend."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    ordered = sorted(rows, key=lambda row: kinds.index(row.kind))
    return memory_kinds.bar(((row.kind, row.nbytes) for row in ordered), width, colour=colour)


def show(report: Report, file: TextIO, *, verbose: bool = True) -> None:
    """Write a report to a terminal: all of it (`verbose`), or the short form."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, highlight=False)

    def put(text: Text, hang: int = 2) -> None:
        console.print(styled(text, columns(file), hang), soft_wrap=True)

    put(Text(report.headline, "bold green" if report.fits else "bold red"))
    for label, value in report.facts:
        put(Text.assemble((f"  {label:<9}", "cyan"), value), FACTS)
    if report.rows:
        console.print()
        put(Text(report.memory))
        shown = pieces(report.rows, min(TERMINAL_BAR_WIDTH, console.width - 14), colour=True)
        console.print(Text.assemble("  ", *shown, f" {format_size(report.total_bytes)}"))
        if not verbose:
            legend = [marked(kind, what, "dim") for kind, what in parts(report)]
            put(Text.assemble("  ", Text(", ", "dim").join(legend)))
    if report.rows and verbose:
        table = Table(box=None, pad_edge=False, show_header=_measured(report), padding=(0, 2, 0, 0))
        table.add_column("", no_wrap=True)
        table.add_column("planned", justify="right")
        if _measured(report):
            table.add_column("measured", justify="right")
        table.add_column("", style="dim")
        for row in report.rows:
            found = format_size(row.measured_bytes) if row.measured_bytes is not None else ""
            cells_of = [format_size(row.nbytes), *([found] if _measured(report) else []), row.note]
            table.add_row(Text.assemble("  ", marked(row.kind, row.label)), *cells_of)
        console.print(table)
    commands = {report.plain_command, *report.commands}
    for title, entries in sections(report, verbose=verbose):
        console.print()
        console.print(Text(title, "bold"))
        for entry in entries:
            command = entry.lstrip()
            if command in commands:
                indent = 2 + len(entry) - len(command)
                console.print(Text(wrapped_command(command, columns(file), indent)), soft_wrap=True)
            else:
                put(Text(f"  {entry}"), 4)
    if not verbose:
        put(Text(f"\n{MORE}", "dim"))


def _measured(report: Report) -> bool:
    return any(row.measured_bytes is not None for row in report.rows)
