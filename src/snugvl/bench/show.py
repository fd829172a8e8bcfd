"""A report as text, plain, or with rules and weights on a terminal."""

from collections.abc import Iterator
from typing import TextIO

from snugvl.bench.report import Report, Table


def plain(report: Report) -> str:
    """For a pipe or a file."""
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


def terminal(report: Report, file: TextIO) -> None:
    """For people."""
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = Console(file=file, highlight=False)
    for number, line in enumerate(report.above):
        console.print(Text(line, "bold" if number == 0 else "dim"))
    for table in report.tables:
        console.print()
        if table.title:
            console.print(Text(table.title, "bold"))
        grid = Grid(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="cyan")
        for number, name in enumerate(table.head):
            grid.add_column(Text(name), justify="right" if number else "left", no_wrap=number > 0)
        for row in table.rows:
            grid.add_row(*(Text(cell) for cell in row))
        console.print(grid)
    console.print()
    for line in report.notes:
        console.print(Text(line, "dim"))
