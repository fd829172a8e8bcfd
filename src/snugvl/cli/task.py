"""What a command hands to the batch: jobs, and how to do one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snugvl.cli.sources import STDIN

if TYPE_CHECKING:  # they import Pillow and pydantic
    from snugvl.client import Client
    from snugvl.core.messages import Delta
    from snugvl.inputs.given import VisualSource
    from snugvl.model import Model
    from snugvl.tasks.results import Result

    Deltas = AbstractContextManager[Iterable[Delta]]


@dataclass(frozen=True, slots=True)
class Job:
    """One result to make: of one image, or of several together."""

    names: tuple[str, ...]
    together: bool = False

    @property
    def image(self) -> str | list[str]:
        """How records name it."""
        return list(self.names) if self.together else self.names[0]

    @property
    def title(self) -> str:
        """How people read it."""
        return ", ".join(self.names)

    @property
    def called(self) -> list[str]:
        """How messages call each of its images."""
        return ["standard input" if name == STDIN else name for name in self.names]


def each(names: Sequence[str]) -> list[Job]:
    """A job per image."""
    return [Job((name,)) for name in names]


@dataclass(frozen=True, slots=True)
class Task:
    """A task with its parameters filled in.

    Attributes:
        name: of the task, in records.
        params: what was asked, in records; a file is resumed only with the same.
        run: the result of a job's images.
        text: the result for people.
        stream: the same as `run` while it is generated, where the result is plain text.
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
    """What became of a job: a result or an error."""

    job: Job
    result: Result | None
    error: Exception | None
    seconds: float
