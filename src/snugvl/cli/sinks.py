"""Where the outcomes of a batch go: lines for people, JSON Lines, or one file at the end."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Protocol

from snugvl.cli import records
from snugvl.cli.stderr import printable
from snugvl.cli.stdout import show, write
from snugvl.cli.task import Outcome, Task
from snugvl.core.wrapping import columns, styled


class Sink(Protocol):
    """Takes outcomes in order. Leaving its `with` finishes it, also when the batch was interrupted."""

    def put(self, outcome: Outcome) -> None: ...

    def __enter__(self) -> "Sink": ...

    def __exit__(self, *exc: object) -> None: ...


class Readable:
    """Text on standard output: alone for one image, under its name for several. Errors go elsewhere."""

    def __init__(self, text: Callable[[Any], str], *, several: bool) -> None:
        self._text = text
        self._several = several

    def put(self, outcome: Outcome) -> None:
        if outcome.result is None:
            return
        text = printable(self._text(outcome.result))
        if not self._several:
            show(text)
        elif sys.stdout.isatty():
            self._in_colour(printable(outcome.job.title), text)
        else:
            write(_under(printable(outcome.job.title) + ":", text) + "\n")

    def _in_colour(self, title: str, text: str) -> None:
        from rich.console import Console
        from rich.text import Text

        line = Text(_under(title + ":", text))
        line.stylize("bold cyan", 0, len(title) + 1)
        console = Console(file=sys.stdout, highlight=False)
        console.print(styled(line, columns(sys.stdout), 2), soft_wrap=True)

    def __enter__(self) -> "Readable":
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is held back."""


class JsonLines:
    """A record per outcome, on standard output or in a file, flushed one by one."""

    def __init__(self, task: Task, model: str, path: Path | None = None) -> None:
        self._task = task
        self._model = model
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def put(self, outcome: Outcome) -> None:
        record = records.record(outcome, self._task, self._model)
        if self._file is None:
            write(records.encode(record))
            return
        self._file.write(records.encode(record))
        self._file.flush()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file:
            self._file.close()


class Gathered:
    """Keeps the results and hands them to `finish` at the end: formats that are one document.

    Without any result there is no document: the error is told, and the next try finds its place free.
    """

    def __init__(self, finish: Callable[[Sequence[Outcome]], None]) -> None:
        self._finish = finish
        self._outcomes: list[Outcome] = []

    def put(self, outcome: Outcome) -> None:
        if outcome.result is not None:
            self._outcomes.append(outcome)

    def __enter__(self) -> "Gathered":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._outcomes:
            self._finish(self._outcomes)


Opener = Callable[[], AbstractContextManager[Sink]]


def _under(title: str, text: str) -> str:
    """`title text` on one line, or the lines of `text` indented under the title."""
    lines = text.splitlines()
    if len(lines) <= 1:
        return f"{title} {text}"
    return "\n".join([title, *(f"  {line}" for line in lines)])
