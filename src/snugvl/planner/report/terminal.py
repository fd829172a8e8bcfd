"""A report on a terminal: the same lines in colour. Rich is imported when it is needed."""

from typing import TextIO

from snugvl.core.memory_kinds import marked
from snugvl.core.sizes import format_size
from snugvl.core.wrapping import columns, styled, wrapped_command
from snugvl.planner.report.plain import MORE, parts, pieces, sections
from snugvl.planner.report.sections import Report

BAR_WIDTH = 76
FACTS = 11  # columns before what is said of each


def show(report: Report, file: TextIO, *, verbose: bool = True) -> None:
    """Write a report to a terminal: everything, or in short."""
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
        bar = pieces(report.rows, min(BAR_WIDTH, console.width - 14), colour=True)
        console.print(Text.assemble("  ", *bar, f" {format_size(report.total_bytes)}"))
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
    commands = {report.plain_command, *(command for step in report.steps for command in step.commands)}
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
