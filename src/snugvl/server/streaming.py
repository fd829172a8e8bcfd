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
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from snugvl.errors import EngineError, SnugvlError
from snugvl.server.context import Context
from snugvl.server.errors import error_body, family_of

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all; `server.connection` cancels this when the client leaves."""
        await self._send(
            send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        if scope["method"] == "HEAD":
            await _close(self._events)
        else:
            await self._pump(send)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        chunks = self._chunks()
        async with aclosing(chunks):
            async for chunk in chunks:
                await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})

    async def _chunks(self) -> AsyncGenerator[bytes]:
        """The bytes to send, keep-alive comments and the error among them."""
        pending: asyncio.Task[Event] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(_next(self._events))
                await asyncio.wait({pending}, timeout=KEEP_ALIVE_S)
                if pending.done():
                    done, pending = pending, None
                    yield self._written(done.result())
                elif self._form == "sse":
                    yield b": keep-alive\n\n"
        except StopAsyncIteration:
            return
        except Exception as error:
            yield self._written(self._error(error))
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.wait({pending})
            await _close(self._events)

    def _error(self, error: Exception) -> Event:
        self._request.state.error = error
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

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(send(message), self._write_timeout_s)
        except TimeoutError:
            raise SlowClient(f"the client read nothing for {self._write_timeout_s:g} s") from None


class SlowClient(EngineError):
    """A client that doesn't read its stream; its connection is closed."""

    http_status = 408


def compact(value: object) -> str:
    """JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def _next(events: AsyncIterator[Event]) -> Event:
    return await anext(events)


async def _close(events: AsyncIterator[Event]) -> None:
    if isinstance(events, AsyncGenerator):
        await events.aclose()
