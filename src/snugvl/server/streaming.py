"""Answers that are sent piece by piece: server-sent events (SSE) and newline-delimited JSON.

    async def events() -> AsyncIterator[Event]:
        async with generation:                  # leaving aborts the request
            async for delta in generation:
                yield Event(chunk_json(delta))
        yield Event("[DONE]")

    return event_stream(context, events())

The stream itself takes care of these: a comment every few seconds while nothing comes, so that proxies keep
the connection; warnings that come when the header is out, as comments before the next event; an error of
`events` becomes an error event in the protocol's form and ends the stream; a client that left, or reads
nothing for `settings.write_timeout_s`, closes `events` at once. Call `generate` before `event_stream`, so
that a refusal is still a proper status.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from snugvl.errors import EngineError, SnugvlError
from snugvl.server.context import Context
from snugvl.server.errors import error_body, family_of
from snugvl.server.metrics import record_of

KEEP_ALIVE_S = 10.0
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

log = logging.getLogger("snugvl.server")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream: one line of JSON (or "[DONE]"). `name` is SSE's `event:` line."""

    data: str
    name: str | None = None


def events_document(description: str) -> dict[str, Any]:
    """OpenAPI's `content` for server-sent events of a route that can stream."""
    item = {
        "type": "object",
        "description": description,
        "properties": {
            "event": {"type": "string", "description": "the type of the event, where the protocol has one"},
            "data": {"type": "string", "description": "JSON, or [DONE]"},
        },
        "required": ["data"],
    }
    return {"text/event-stream": {"itemSchema": item}}


def lines_document(model: str) -> dict[str, Any]:
    """OpenAPI's content for lines of JSON, each of them the component `model`."""
    return {"application/x-ndjson": {"itemSchema": {"$ref": f"#/components/schemas/{model}"}}}


ErrorEvent = Callable[[Exception], Event]


def event_stream(
    context: Context,
    events: AsyncGenerator[Event] | AsyncIterator[Event],
    *,
    on_error: ErrorEvent | None = None,
) -> Response:
    """The response that streams `events` as SSE. `on_error`: makes the last event of a failed stream, where a
    protocol has its own (Responses)."""
    return _Streamed(context, events, on_error, "sse")


def line_stream(context: Context, events: AsyncGenerator[Event] | AsyncIterator[Event]) -> Response:
    """The response that streams one JSON document a line (`application/x-ndjson`), without keep-alive."""
    return _Streamed(context, events, None, "lines")


class _Streamed(Response):
    def __init__(
        self,
        context: Context,
        events: AsyncIterator[Event],
        on_error: ErrorEvent | None,
        form: Literal["sse", "lines"],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream" if form == "sse" else "application/x-ndjson"
        self.init_headers(HEADERS)
        self._write_timeout_s = context.settings.write_timeout_s
        self._events = events
        self._on_error = on_error
        self._form = form
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream; `server.connection` cancels this when the client leaves."""
        timeout = WriteTimeout(self._write_timeout_s)
        try:
            await timeout.send(
                send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await self._pump(scope, send, timeout)
            await timeout.send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            timeout.end()

    async def _pump(self, scope: Scope, send: Send, timeout: "WriteTimeout") -> None:
        alive = asyncio.ensure_future(self._keep_alive(send)) if self._form == "sse" else None
        try:
            warnings = record_of(scope).notes.warnings
            sent = len(warnings)  # with the header
            async for event in self._events:
                if len(warnings) > sent and self._form == "sse":  # lines have no comments
                    late = "".join(f": snugvl-warning: {line}\n\n" for line in warnings[sent:])
                    sent = len(warnings)
                    await self._put(send, timeout, late.encode())
                await self._put(send, timeout, self._encode(event))
        except SlowClient:
            raise
        except Exception as error:
            await self._put(send, timeout, self._encode(self._error(error, scope)))
        finally:
            if alive is not None:
                alive.cancel()
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()

    async def _keep_alive(self, send: Send) -> None:
        """Send comments while nothing else is sent. If the client reads none of them, the next event
        fails."""
        while True:
            idle_s = time.monotonic() - self._sent_at
            if idle_s >= KEEP_ALIVE_S:
                self._sent_at = time.monotonic()
                await send(_piece(b": keep-alive\n\n"))
                idle_s = 0.0
            await asyncio.sleep(KEEP_ALIVE_S - idle_s)

    def _error(self, error: Exception, scope: Scope) -> Event:
        record, family = record_of(scope), family_of(scope["path"], scope["headers"])
        record.error = error
        if not isinstance(error, SnugvlError):
            log.error("the stream of %s failed", record.id, exc_info=error)
        if self._on_error is not None:
            return self._on_error(error)
        return Event(
            compact(error_body(error, family, record.id)), "error" if family == "anthropic" else None
        )

    def _encode(self, event: Event) -> bytes:
        if self._form == "lines":
            return f"{event.data}\n".encode()
        name = f"event: {event.name}\n" if event.name else ""
        return f"{name}data: {event.data}\n\n".encode()

    async def _put(self, send: Send, timeout: "WriteTimeout", chunk: bytes) -> None:
        self._sent_at = time.monotonic()
        await timeout.send(send, _piece(chunk))


def _piece(chunk: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


class WriteTimeout:
    """Ends a send of the present task that takes longer than `limit_s`.

    One timer a stream looks whether a send waits: a timer for each send would cost a fifth of a token's time
    here.
    """

    def __init__(self, limit_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None, "a stream is sent by a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._since: float | None = None  # when the send that waits began
        self._over = False
        self._timer = self._loop.call_later(limit_s, self._look)

    async def send(self, send: Send, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            SlowClient: it took too long.
        """
        self._since = time.monotonic()
        try:
            await send(message)
        except asyncio.CancelledError:
            if self._over and not self._task.uncancel():
                raise SlowClient(f"the client read nothing for {self._limit_s:g} s") from None
            raise
        finally:
            self._since = None

    def end(self) -> None:
        """Stop watching: there are no more sends."""
        self._timer.cancel()

    def _look(self) -> None:
        waited_s = 0.0 if self._since is None else time.monotonic() - self._since
        if waited_s >= self._limit_s:
            self._over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._limit_s - waited_s, self._look)


class SlowClient(EngineError):
    """A client that doesn't read its stream; its connection is closed."""

    http_status = 408


def compact(value: object) -> str:
    """JSON on one line. Pydantic's writer takes a quarter of the time of Python's, once a token."""
    return to_json(value).decode()
