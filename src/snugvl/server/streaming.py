"""Answers that are sent piece by piece: server-sent events (SSE) and newline-delimited JSON.

    async def events() -> AsyncIterator[Event]:
        async with generation:                  # leaving aborts the request
            async for delta in generation:
                yield Event(chunk_json(delta))
        yield Event("[DONE]")

    return event_stream(request, context, events())

What the stream itself cares for: a comment every few seconds while nothing comes, so that proxies keep the
connection; an error of `events` becomes an error event in the protocol's form and ends the stream; a client
that left, or reads nothing for `settings.write_timeout_s`, closes `events` at once. Call `generate` before
`event_stream`, so that a refusal is still a proper status.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from snugvl.errors import EngineError, SnugvlError
from snugvl.server.context import Context
from snugvl.server.errors import error_body, family_of
from snugvl.server.record import current

KEEP_ALIVE_S = 10.0
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

log = logging.getLogger("snugvl.server")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream: one line of JSON (or "[DONE]"). `name` is SSE's `event:` line."""

    data: str
    name: str | None = None


ErrorEvent = Callable[[Exception], Event]


def event_stream(
    request: Request,
    context: Context,
    events: AsyncGenerator[Event] | AsyncIterator[Event],
    *,
    on_error: ErrorEvent | None = None,
) -> Response:
    """SSE. `on_error`: the last event of a stream that failed, where a protocol has its own (Responses)."""
    return _Streamed(request, context, events, on_error, "sse")


def line_stream(
    request: Request, context: Context, events: AsyncGenerator[Event] | AsyncIterator[Event]
) -> Response:
    """One JSON document a line (`application/x-ndjson`), as Ollama streams; it has no keep-alive."""
    return _Streamed(request, context, events, None, "lines")


class _Streamed(Response):
    def __init__(
        self,
        request: Request,
        context: Context,
        events: AsyncIterator[Event],
        on_error: ErrorEvent | None,
        form: Literal["sse", "lines"],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream" if form == "sse" else "application/x-ndjson"
        self.init_headers(HEADERS)
        self._request = request
        self._write_timeout_s = context.settings.write_timeout_s
        self._events = events
        self._on_error = on_error
        self._form = form
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all; `server.connection` cancels this when the client leaves."""
        await self._send(
            send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await self._pump(send)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        alive = asyncio.ensure_future(self._keep_alive(send)) if self._form == "sse" else None
        try:
            async for event in self._events:
                await self._put(send, self._written(event))
        except SlowClient:
            raise
        except Exception as error:
            await self._put(send, self._written(self._error(error)))
        finally:
            if alive is not None:
                alive.cancel()
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()

    async def _keep_alive(self, send: Send) -> None:
        """Comments while nothing else is sent. A client that reads none of them fails the next event."""
        while True:
            idle_s = time.monotonic() - self._sent_at
            if idle_s >= KEEP_ALIVE_S:
                with suppress(SlowClient):
                    await self._put(send, b": keep-alive\n\n")
                idle_s = 0.0
            await asyncio.sleep(KEEP_ALIVE_S - idle_s)

    def _error(self, error: Exception) -> Event:
        current().error = error
        if not isinstance(error, SnugvlError):
            log.error("a stream failed", exc_info=error)
        if self._on_error is not None:
            return self._on_error(error)
        family = family_of(self._request.url.path)
        return Event(compact(error_body(error, family)), "error" if family == "anthropic" else None)

    def _written(self, event: Event) -> bytes:
        if self._form == "lines":
            return f"{event.data}\n".encode()
        name = f"event: {event.name}\n" if event.name else ""
        return f"{name}data: {event.data}\n\n".encode()

    async def _put(self, send: Send, chunk: bytes) -> None:
        self._sent_at = time.monotonic()
        await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send(message)
        except TimeoutError:
            raise SlowClient(f"the client read nothing for {self._write_timeout_s:g} s") from None


class SlowClient(EngineError):
    """A client that doesn't read its stream; its connection is closed."""

    http_status = 408


def compact(value: object) -> str:
    """JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
