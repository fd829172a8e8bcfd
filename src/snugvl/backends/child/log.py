"""A child server's log as it is written: its lines, and how far its start is.

How an engine writes is a `LogForm` of its own. A progress bar rewrites one line, so a carriage return ends a
line too.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HEAD_LINES: Final = 300  # the command, the version, the arguments
TAIL_LINES: Final = 600
MAX_LINE: Final = 8000  # the list of arguments is one line

_END: Final = re.compile(r"[\r\n]")


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a start is. `progress`: of all of it, from 0 to 1."""

    detail: str
    progress: float


class LogForm:
    """How an engine writes its log.

    Args:
        prefix: what stands before what a line says: process, time, file.
        failed: how a line without its prefix begins that says what failed.
        chatty: whether the usual lines of a start are too many to be read.
        stages: what a line says → what is being done now, and from where to where on the way. A group that
            a pattern has is a percentage: how far between the two.
    """

    def __init__(
        self,
        prefix: str,
        failed: str,
        stages: Sequence[tuple[str, str, float, float]],
        *,
        chatty: bool = False,
    ) -> None:
        self.chatty = chatty
        self._prefix, self._failed = re.compile(prefix), re.compile(failed)
        self._stages = tuple((re.compile(stage[0]), *stage[1:]) for stage in stages)

    def stage_of(self, line: str) -> Stage | None:
        """What a line says about the start, or None."""
        for pattern, detail, begin, end in self._stages:
            if match := pattern.search(line):
                if not pattern.groups:
                    return Stage(detail, begin)
                percent = min(int(match[1]), 100)
                return Stage(f"{detail} ({percent} %)", begin + (end - begin) * percent / 100)
        return None

    def plain(self, line: str) -> str:
        """A line without its prefix."""
        return self._prefix.sub("", line)

    def is_error(self, line: str) -> bool:
        """Whether a line says what failed."""
        return self._failed.match(self.plain(line)) is not None

    def exception_lines(self, lines: Sequence[str]) -> list[str]:
        """The lines of a log that say what failed, without their prefixes."""
        return [self.plain(line) for line in lines if self.is_error(line)]


class Log:
    """The lines of one life: the first and the last, as many as a diagnosis needs."""

    def __init__(self, form: LogForm) -> None:
        self._form = form
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = ""
        self._count = 0
        self._marks = (0, 0)  # lines at the last two times when all was well
        self.was_well = False
        self.stage: Stage | None = None

    def feed(self, text: str) -> list[str]:
        """Take output in any pieces; the lines that it completes."""
        *lines, rest = _END.split(self._partial + text)
        self._partial = rest[-MAX_LINE:]
        lines = [line.rstrip()[:MAX_LINE] for line in lines if line.strip()]
        for line in lines:
            self._keep(line)
        return lines

    @property
    def lines(self) -> tuple[str, ...]:
        """Oldest first; of a long log the middle is missing."""
        rest = (self._partial,) if self._partial.strip() else ()
        return (*self._head, *self._tail, *rest)

    @property
    def fresh(self) -> tuple[str, ...]:
        """The lines since all was well: since the start, before `all_is_well` was called twice."""
        return self.lines[-max(self._count - self._marks[0], 1) :] if self._count else self.lines

    def all_is_well(self) -> None:
        """Told while it serves: what was written before the last time but one is no reason of a death now."""
        self.was_well = True
        self._marks = (self._marks[1], self._count)

    @property
    def last(self) -> str:
        """The last line, without its prefix."""
        return self._form.plain(self.lines[-1]) if self.lines else ""

    def _keep(self, line: str) -> None:
        self._count += 1
        if len(self._head) < HEAD_LINES:
            self._head.append(line)
        else:
            self._tail.append(line)
        found = self._form.stage_of(line)
        # A parallel start says everything once a process; what is behind us stays behind us.
        if found is not None and (self.stage is None or found.progress >= self.stage.progress):
            self.stage = found
