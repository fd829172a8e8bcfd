"""Jobs, tasks, and the sinks of their outcomes: lines for people, JSON Lines, or one file at the end.

JSON Lines are one record per image, written as soon as it is done, and read again to resume:

    {"image": "a.png", "task": "ask", "model": "pocket", "params": {"question": "…"},
     "result": {…}, "usage": {"prompt_tokens": 210, "completion_tokens": 9, "image_tokens": 196},
     "seconds": 0.41}
    {"image": "b.png", "task": "ask", "model": "pocket", "params": {"question": "…"},
     "error": {"type": "ImageError", "message": "…"}}

`result` is the task's result as in `snugvl.tasks.results`, without its usage.
"""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from snugvl.cli.sources import STDIN
from snugvl.cli.terminal import printable, show, write
from snugvl.core.folders import json_object, named, write_whole
from snugvl.core.wrapping import columns, styled
from snugvl.errors import InputError, OutputError

if TYPE_CHECKING:
    from snugvl.client import Client
    from snugvl.core.messages import Delta
    from snugvl.inputs.given import VisualSource
    from snugvl.model import Model
    from snugvl.tasks.results import Answer, Caption, Detections, Result, Scene

    Deltas = AbstractContextManager[Iterable[Delta]]


@dataclass(frozen=True, slots=True)
class Job:
    """One result to make, from one image or from several together."""

    names: tuple[str, ...]
    together: bool = False

    @property
    def image(self) -> str | list[str]:
        """The job's name in records: that of its image, or a list where there are several."""
        return list(self.names) if self.together else self.names[0]

    @property
    def title(self) -> str:
        """The job's name for people."""
        return ", ".join(self.names)

    @property
    def called(self) -> list[str]:
        """The name of each of its images in messages."""
        return ["standard input" if name == STDIN else name for name in self.names]


def each(names: Sequence[str]) -> list[Job]:
    """A job per image."""
    return [Job((name,)) for name in names]


@dataclass(frozen=True, slots=True)
class Task:
    """A task with its parameters filled in.

    Attributes:
        name: name of the task in records.
        params: parameters of the task in records; a file is resumed only with the same.
        run: function that makes the result of a job's images.
        text: function that makes the text of a result for people.
        stream: like `run`, but yields the text while it is generated; None where it isn't plain text.
        videos: whether a video may stand for a picture.
    """

    name: str
    params: dict[str, Any]
    run: Callable[[Model | Client, Job, Sequence[VisualSource]], Result]
    text: Callable[[Any], str]
    stream: Callable[[Model | Client, Sequence[VisualSource]], Deltas] | None = field(default=None)
    videos: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job: a result or an error."""

    job: Job
    result: Result | None
    error: Exception | None
    seconds: float


def words(result: Caption | Answer) -> str:
    """The text of a caption or an answer."""
    return result.text


def scene(result: Scene) -> str:
    """The text of a scene: the summary, then a line for each part that isn't empty."""
    lines = [result.summary] if result.summary else []
    if result.setting:
        lines.append(f"Setting: {result.setting}")
    for thing in result.objects:
        where = f" ({'; '.join(thing.positions)})" if thing.positions else ""
        lines.append(f"{thing.count} × {thing.name}{where}")
    if result.text:
        lines.append("Text: " + ", ".join(f"“{text}”" for text in result.text))
    lines.extend(f"- {relation}" for relation in result.relations)
    return "\n".join(lines) or "nothing described"


def detections(result: Detections, asked: Sequence[str] = ()) -> str:
    """A line an object: label, x1 y1 x2 y2 in whole pixels; and one for each in `asked` that isn't found."""
    missing = [name for name in asked if not any(_same(name, thing.label) for thing in result.objects)]
    if not result.objects and len(missing) < 2:
        return f"nothing found: no {missing[0]}" if missing else "nothing found"
    width = max(len(name) for name in (*missing, *(thing.label for thing in result.objects)))
    rows = []
    for thing in result.objects:
        box = thing.box
        numbers = " ".join(f"{round(value):5d}" for value in (box.x1, box.y1, box.x2, box.y2))
        rows.append(f"{thing.label:<{width}} {numbers}")
    return "\n".join([*rows, *(f"{name:<{width}} not found" for name in missing)])


def _same(name: str, label: str) -> bool:
    """Whether a model's label means an object's name: a plural or a singular of it does."""
    name, label = name.casefold(), label.casefold()
    return name in label or label in name


_SAME = ("task", "model", "params")


def record(outcome: Outcome, task: Task, model: str) -> dict[str, Any]:
    """The record of an outcome."""
    head = {"image": outcome.job.image, "task": task.name, "model": model, "params": task.params}
    if outcome.result is None:
        return head | {"error": _error(outcome.error)}
    usage = outcome.result.usage
    return head | {
        "result": outcome.result.model_dump(mode="json", exclude={"usage"}),
        "usage": asdict(usage) if usage else None,
        "seconds": round(outcome.seconds, 3),
    }


def encode(value: dict[str, Any]) -> str:
    """A record as one line of JSON, not escaped unless a file name is not valid text."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text + "\n"


def _error(error: Exception | None) -> dict[str, str]:
    fields = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, OutputError):
        fields["text"] = error.text
    return fields


def check_new(path: Path) -> None:
    """Raise InputError where a file would be overwritten."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; --output takes a file")
    if path.exists() and path.stat().st_size:
        raise InputError(f"{path} exists; continue it with --resume, or remove it")


def results_in(path: Path, task: Task, model: str) -> list[dict[str, Any]]:
    """The records with a result in the file of an earlier run; none where it doesn't exist.

    Records of failures are left out, so those images are tried again, and so is a last line that was torn
    when the run ended.

    Raises:
        InputError: it is not a file of records, or one of another task, model or question.
    """
    if not path.exists():
        return []
    try:
        *lines, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; --output takes a file") from None
    kept = []
    for number, line in enumerate([*lines, torn], 1):
        value = json_object(line)
        last = number >= len(lines)
        if value is None and (last or not line.strip()):
            continue
        if value is None or "image" not in value or not set(_SAME) <= value.keys():
            raise InputError(f"{path}, line {number} is not a record of snugvl; --resume can't continue it")
        _check_same(value, {"task": task.name, "model": model, "params": task.params}, path, number)
        if "result" in value:
            kept.append(value)
    return kept


def rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace the file by `records`, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: draft.write_text("".join(map(encode, records)), encoding="utf-8"))


def remaining(jobs: Sequence[Job], records: list[dict[str, Any]]) -> list[Job]:
    """The jobs that `records` has no result of."""
    have = {json.dumps(each["image"]) for each in records}
    return [job for job in jobs if json.dumps(job.image) not in have]


def _check_same(value: dict[str, Any], wanted: dict[str, Any], path: Path, number: int) -> None:
    for key, mine in wanted.items():
        if value[key] != mine:
            raise InputError(
                f"{path}, line {number} has {key} {json.dumps(value[key], ensure_ascii=False)}, not "
                f"{json.dumps(mine, ensure_ascii=False)}; --resume continues the same work only"
            )


class Sink(AbstractContextManager["Sink"]):
    """Takes outcomes in order. Leaving its `with` finishes it, also when the batch was interrupted."""

    @abstractmethod
    def put(self, outcome: Outcome) -> None:
        """Take the next outcome."""

    def __exit__(self, *exc: object) -> None:
        """Finish; nothing is left to do where every outcome was written at once."""


class Readable(Sink):
    """Text on standard output: alone for one image, under its name for several. Errors go elsewhere."""

    def __init__(self, text: Callable[[Any], str], *, several: bool) -> None:
        self._text = text
        self._several = several

    def put(self, outcome: Outcome) -> None:
        if outcome.result is None:
            return
        text, title = printable(self._text(outcome.result)), printable(outcome.job.title.replace("\n", " "))
        if not self._several:
            show(text)
        elif sys.stdout.isatty():
            self._in_colour(title, text)
        else:
            write(_under(title + ":", text) + "\n")

    def _in_colour(self, title: str, text: str) -> None:
        from rich.console import Console
        from rich.text import Text

        line = Text(_under(title + ":", text))
        line.stylize("bold cyan", 0, len(title) + 1)
        console = Console(file=sys.stdout, highlight=False)
        console.print(styled(line, columns(sys.stdout), 2), soft_wrap=True)


class JsonLines(Sink):
    """A record per outcome, on standard output or in a file, flushed one by one."""

    def __init__(self, task: Task, model: str, path: Path | None = None) -> None:
        self._task = task
        self._model = model
        self._file: IO[str] | None = None
        self._path = path or Path()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def put(self, outcome: Outcome) -> None:
        line = encode(record(outcome, self._task, self._model))
        if self._file is None:
            write(line)
            return
        with named(self._path):
            self._file.write(line)
            self._file.flush()

    def __exit__(self, *exc: object) -> None:
        if self._file:
            with named(self._path):
                self._file.close()


class Gathered(Sink):
    """Keeps the results and hands them to `finish` at the end: formats that are one document.

    Without any result no document is written: the error is reported, and the next try finds no file.
    """

    def __init__(self, finish: Callable[[Sequence[Outcome]], None]) -> None:
        self._finish = finish
        self._outcomes: list[Outcome] = []

    def put(self, outcome: Outcome) -> None:
        if outcome.result is not None:
            self._outcomes.append(outcome)

    def __exit__(self, *exc: object) -> None:
        if self._outcomes:
            self._finish(self._outcomes)


Opener = Callable[[], Sink]


def _under(title: str, text: str) -> str:
    """`title text` on one line, or the lines of `text` indented under the title."""
    lines = text.splitlines()
    if len(lines) <= 1:
        return f"{title} {text}"
    return "\n".join([title, *(f"  {line}" for line in lines)])
