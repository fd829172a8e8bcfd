"""The record of one request: filled in while it runs, read by the access log and the metrics."""

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
        id: our id of the request, also sent to the client.
        key: fingerprint of the API key, or "-"; never the key.
        status: HTTP status of the answer; 499 when the client left before it had one.
        error: error that it ended with, also in the middle of a stream.
        left: whether the client was gone before the answer was complete.
        warnings: wishes that were ignored or done otherwise, for the header of the answer.
        unenforced: schemas with keywords that a grammar leaves out, by tool; None: the answer's own.
        lingering: work that is still being ended when its answer is out; it keeps its place until then.
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
        """Seconds since the request began."""
        return time.monotonic() - self.started

    def warn(self, text: str) -> str:
        """Add a warning to the answer's `Snugvl-Warning` header; returns it as it is sent.

        It may hold names from the request, so characters that a header can't have are replaced.
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
    """The record of the request that runs here; outside of requests, one that is dropped."""
    return REQUEST_RECORD.get() or RequestRecord("-")
