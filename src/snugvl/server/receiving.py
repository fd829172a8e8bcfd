"""How bodies come in (so many bytes, in time, JSON that is JSON), and what happens when a client leaves.

The client's connection is watched from the end of the request's body on. When it closes before the answer is
complete, the handler is cancelled wherever it waits: in the queue, at a token, at a write. So every request
of a client that left frees its KV cache at once, streaming or not.
"""

import asyncio
import time
from email.message import Message as MimeHeader
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snugvl.errors import BodyTooLarge
from snugvl.server.body import parse_json
from snugvl.server.errors import family_of
from snugvl.server.record import current
from snugvl.server.settings import ServerSettings

LEAST_BYTES_PER_S = 16 * 1024  # what a client must send on average, after the first `read_timeout_s`


class ClientLeft(Exception):
    """The client closed its connection before its request was complete."""


class Receiving:
    """ASGI middleware, next to the app."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read JSON whole, let other bodies through piece by piece; stop the app when the client leaves."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = Body(scope, receive, self._settings)
        if _is_json(scope):
            try:
                await body.read_json()
            except ClientLeft:
                current().left = True
                return
        await _until_client_leaves(self._app, scope, body, send)


class Body:
    """The body of one request on its way in; `receive` is what the app gets."""

    def __init__(self, scope: Scope, receive: Receive, settings: ServerSettings) -> None:
        self._receive = receive
        self._settings = settings
        self._count = 0
        self._started = time.monotonic()
        self._whole: bytes | None = None
        self._complete = asyncio.Event()
        self._gone = asyncio.Event()
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")  # the parser has let only digits through
        if int(length) > settings.max_body_bytes:
            raise self._too_large(int(length))
        if not int(length) and "transfer-encoding" not in headers:
            self._whole = b""
            self._complete.set()

    @property
    def complete(self) -> bool:
        """Whether all of it came."""
        return self._complete.is_set()

    async def read_json(self) -> None:
        """Read everything, and check that it is JSON we take.

        Raises:
            RequestError: it isn't.
            ClientLeft: it broke off.
        """
        pieces = []
        while not self._complete.is_set():
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            pieces.append(message.get("body", b""))
        self._whole = b"".join(pieces)
        if self._whole:
            parse_json(self._whole)

    async def receive(self) -> Message:
        """The next piece; after the last one it waits until the client leaves."""
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return {"type": "http.request", "body": whole, "more_body": False}
        if not self._complete.is_set():
            return await self._next()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def gone(self) -> None:
        """Wait until the client leaves; the body must have been read before that can be seen."""
        await self._complete.wait()
        while not self._gone.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone.set()

    async def _next(self) -> Message:
        allowed_s = self._settings.read_timeout_s + self._count / LEAST_BYTES_PER_S
        try:
            async with asyncio.timeout(allowed_s - (time.monotonic() - self._started)):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body came too slowly: {self._count:,} bytes in {allowed_s:.0f} s"
            ) from None
        if message["type"] == "http.disconnect":
            self._complete.set()
            self._gone.set()
            return message
        self._count += len(message.get("body", b""))
        if self._count > self._settings.max_body_bytes:
            raise self._too_large(self._count)
        if not message.get("more_body", False):
            self._complete.set()
        return message

    def _too_large(self, length: int) -> BodyTooLarge:
        limit = self._settings.max_body_bytes
        return BodyTooLarge(
            f"the body has {length:,} bytes or more; at most {limit:,} are read (--max-body raises it)"
        )


async def _until_client_leaves(app: ASGIApp, scope: Scope, body: Body, send: Send) -> None:
    answered = False

    async def watched_send(message: Message) -> None:
        nonlocal answered
        if message["type"] == "http.response.start" and not body.complete:
            # Refused in the middle of its body: what still comes of it is no new request.
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            answered = True

    handler = asyncio.ensure_future(_call(app, scope, body, watched_send))
    watcher = asyncio.ensure_future(body.gone())
    try:
        await asyncio.wait({handler, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not handler.done() and not answered:
            current().left = True
            handler.cancel()
            await asyncio.wait({handler})
            if not handler.cancelled() and handler.exception() is not None and not answered:
                return  # whatever went wrong while it was stopped, nobody is left to tell
        if not handler.cancelled():
            await handler
    finally:
        watcher.cancel()
        handler.cancel()


async def _call(app: ASGIApp, scope: Scope, body: Body, send: Send) -> Any:
    return await app(scope, body.receive, send)


def _is_json(scope: Scope) -> bool:
    if scope["method"] in ("GET", "HEAD"):
        return False
    header = MimeHeader()
    header["content-type"] = Headers(scope=scope).get("content-type", "")
    kind = header.get_content_type()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return True
    # Ollama takes JSON whatever it is called, and its users' curl calls it a form.
    if family_of(scope["path"]) == "ollama" and kind != "multipart/form-data":
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*others, (b"content-type", b"application/json")]
        return True
    return False
