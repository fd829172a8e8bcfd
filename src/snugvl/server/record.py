"""What one request leaves behind: filled in by whoever knows, read by the access log and the metrics."""

import asyncio
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from snugvl.core.messages import Usage

WARNINGS = 16  # of one answer
WARNING = 240  # characters of each
_NOT_IN_HEADERS = re.compile(r"[^ -:<-~]")  # what ends a line, is no ASCII, or parts two warnings


@dataclass(slots=True)
class RequestRecord:
    """Record of one request; changes while it runs.

    Attributes:
        id: ours, also sent to the client.
        key: fingerprint of the API key, or "-"; never the key.
        status: of the answer; 499 when the client left before it had one.
        error: what it ended with, also in the middle of a stream.
        left: the client was gone before the answer was complete.
        warnings: what was ignored or done otherwise than asked, for the header of the answer.
        unenforced: schemas of which a grammar leaves keywords out, by tool; None: of the answer itself.
        lingering: what is still being ended for it when its answer is out; it keeps its place until then.
    """

    id: str
    key: str = "-"
    status: int | None = None
    error: Exception | None = None
    left: bool = False
    lingering: "asyncio.Future[Any] | None" = None
    usage: Usage | None = None
    warnings: list[str] = field(default_factory=list)
    unenforced: dict[str | None, Mapping[str, Any]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    def warn(self, text: str) -> str:
        """Tell the client in the answer's `Snugvl-Warning` header; returns what is told.

        Names in it may be a stranger's.
        """
        line = _NOT_IN_HEADERS.sub("?", text)[:WARNING]
        if len(self.warnings) < WARNINGS and line not in self.warnings:
            self.warnings.append(line)
        return line

    def add(self, usage: Usage) -> None:
        """Count the tokens of one generation; a request may have several."""
        self.usage = (self.usage or Usage(0, 0)) + usage


REQUEST_RECORD: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


def current() -> RequestRecord:
    """The record of the request that runs here; one that nobody reads outside of requests."""
    return REQUEST_RECORD.get() or RequestRecord("-")
