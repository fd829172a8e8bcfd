"""The progress bar of a batch, on standard error, only where a person watches it.

Not shown while results are printed on the same terminal: they are the progress.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from snugvl.cli.stderr import line, say


class Progress(Protocol):
    """Tells how far a batch is."""

    def advance(self) -> None: ...

    def say(self, message: str) -> None: ...


class _Silent:
    def advance(self) -> None:
        """Nothing to show."""

    def say(self, message: str) -> None:
        say(message)


@contextmanager
def progress(total: int, label: str, *, shown: bool) -> Iterator[Progress]:
    """A bar of `total` steps, or nothing where standard error is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield _Silent()
        return
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        rich_progress.TextColumn(label, markup=False),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console, redirect_stdout=False, transient=True) as display:
        bar = display.add_task(label, total=total)

        class Bar:
            def advance(self) -> None:
                display.advance(bar)

            def say(self, message: str) -> None:
                console.print(line(message), markup=False, highlight=False, soft_wrap=True)

        yield Bar()
