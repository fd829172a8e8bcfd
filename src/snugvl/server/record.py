"""The record of one request, in its scope, which the access log and the metrics read."""

import asyncio
import re
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from snugvl.core.messages import Usage

WARNINGS = 16  # of one answer
WARNING = 240  # characters of each
_NOT_IN_HEADERS = re.compile(r"[^ -:<-~]")  # what ends a line, is no ASCII, or parts two warnings


@dataclass(slots=True)
class RequestNotes:
    """Findings of reading a request: warnings for its answer, and schemas to check it by.

    Attributes:
        warnings: what was ignored or done otherwise than asked, for the header of the answer.
        unenforced: schemas of which a grammar leaves keywords out, by tool; None: of the answer itself.
    """

    warnings: list[str] = field(default_factory=list)
    unenforced: dict[str | None, Mapping[str, Any]] = field(default_factory=dict)

    def warn(self, text: str) -> str:
        """Add a line to the answer's `Snugvl-Warning` header; returns the line as it stands there.

        Names in it may be a stranger's.
        """
        line = _NOT_IN_HEADERS.sub("?", text)[:WARNING]
        if len(self.warnings) < WARNINGS and line not in self.warnings:
            self.warnings.append(line)
        return line


@dataclass(slots=True)
class RequestRecord:
    """Record of one request; changes while it runs.

    Attributes:
        id: our id of the request, also sent to the client.
        key: fingerprint of the API key, or "-"; never the key.
        status: of the answer; 499 when the client left before it had one.
        error: what it ended with, also in the middle of a stream.
        left: the client was gone before the answer was complete.
        lingering: what is still being ended for it when its answer is out; it keeps its place until then.
        notes: warnings, and schemas that the answer is validated against.
    """

    id: str
    key: str = "-"
    status: int | None = None
    error: Exception | None = None
    left: bool = False
    lingering: "asyncio.Future[Any] | None" = None
    usage: Usage | None = None
    notes: RequestNotes = field(default_factory=RequestNotes)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started

    def add(self, usage: Usage) -> None:
        """Count the tokens of one generation; a request may have several."""
        self.usage = (self.usage or Usage(0, 0)) + usage


_RECORD: Final = "snugvl.record"  # where it is, in the scope of its request


def begin_record(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    """Give a connection's request its record, before any layer or route runs."""
    scope[_RECORD] = record


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """The record of the request with this scope; a new one where no layer has given it any."""
    if _RECORD not in scope:
        begin_record(scope, RequestRecord("-"))
    record: RequestRecord = scope[_RECORD]
    return record
