"""Receives bodies, bounded in bytes and time and checked as JSON, and ends requests whose client leaves.

The client's connection is watched from the end of the request's body on. When it closes before the answer is
complete, the handler is cancelled wherever it waits: in the queue, at a token, at a write. So every request
of a client that left frees its KV cache at once, streaming or not.
"""

import asyncio
import time
import zlib
from email.message import Message as MimeHeader
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snugvl.errors import BodyTooLarge, DeadlineExceeded, QueueFull
from snugvl.server.body import read_json
from snugvl.server.errors import family_of
from snugvl.server.metrics import record_of
from snugvl.server.settings import ServerSettings

BODIES = 2  # bodies of the largest size whose bytes may be there at once
SMALL_BYTES = 1 << 20
PACKED = ("gzip", "x-gzip", "deflate")  # codings of a body; x-gzip is an older name of gzip
MEMBERS = 1_000  # of a body in gzip, as programs write that compress it in pieces; each may unpack to nothing
_EITHER = 32 + zlib.MAX_WBITS  # zlib finds out which of them it is: deflate has a head of zlib's, in HTTP
LEAST_BYTES_PER_S = 16 * 1024  # what a client must send on average, after the first `read_timeout_s`


class ClientLeft(Exception):
    """The client closed its connection before its request was complete."""


class BodyBudget:
    """Counts bytes of all bodies, announced, received or in use. Used from one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0

    def add(self, count: int, own: int) -> None:
        """Count `count` more bytes of a body, which then has `own`.

        Raises:
            QueueFull: there are too many in all. Small bodies always have room: of those there are only so
                many as requests are served at once.
        """
        if own > SMALL_BYTES and self._bytes + count > self._max_bytes:
            raise QueueFull(
                f"requests that are under way hold {self._bytes:,} of {self._max_bytes:,} bytes; try again "
                "in a moment, or send less"
            )
        self._bytes += count

    def remove(self, count: int) -> None:
        """Count `count` bytes less."""
        self._bytes -= count


class Receiving:
    """ASGI middleware next to the app: receives bodies and watches for clients that leave."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._budget = BodyBudget(BODIES * settings.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read JSON whole, let other bodies through piece by piece; stop the app when the client leaves."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = RequestBody(scope, receive, self._settings, self._budget)
        try:
            if _is_json(scope):
                async with asyncio.timeout(self._remaining_s(scope)):
                    await body.read_json()
            await _until_client_leaves(self._app, scope, body, send, self._remaining_s(scope))
        except ClientLeft:
            record_of(scope).left = True
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline of {self._settings.deadline_s:g} s passed before there was an answer"
            ) from None
        finally:
            body.close()

    def _remaining_s(self, scope: Scope) -> float | None:
        """Seconds until the deadline of the request that runs here; what only reads (GET) has none."""
        limit_s = self._settings.deadline_s
        return None if limit_s is None or scope["method"] != "POST" else limit_s - record_of(scope).seconds


class RequestBody:
    """The body of one request on its way in; `receive` is what the app gets."""

    def __init__(self, scope: Scope, receive: Receive, settings: ServerSettings, budget: BodyBudget) -> None:
        self._scope = scope
        self._receive = receive
        self._settings = settings
        self._budget = budget
        self._count = 0  # of bytes that came
        self._held = 0  # of bytes that are counted in `budget`
        self._pieces: list[bytes] = []
        self._started = time.monotonic()
        self._whole: bytes | None = None
        self._complete = asyncio.Event()
        self._gone = asyncio.Event()
        headers = Headers(scope=scope)
        self._coding = headers.get("content-encoding", "identity").strip().lower() or "identity"
        if self._coding not in ("identity", *(PACKED if _is_json(scope) else ())):
            raise HTTPException(
                415, f"Content-Encoding: {self._coding[:40]} isn't read here; send plain JSON, or gzip"
            )
        self._length = int(headers.get("content-length", "0"))  # the parser has let only digits through
        if self._length > settings.max_body_bytes:
            raise self._too_large(self._length)
        if not self._length and "transfer-encoding" not in headers:
            self._whole = b""
            self._complete.set()

    @property
    def complete(self) -> bool:
        """Whether all of the body came."""
        return self._complete.is_set()

    def close(self) -> None:
        """Free the body's bytes, as the request is over, even if its error is still being sent."""
        self._pieces.clear()
        self._budget.remove(self._held)
        self._held = 0

    async def read_json(self) -> None:
        """Read the body, check that it is valid JSON within bounds, and keep its value for the routes.

        Raises:
            RequestError: it isn't.
            ClientLeft: it broke off.
        """
        while not self._complete.is_set():
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            self._pieces.append(message.get("body", b""))
        whole = b"".join(self._pieces)
        self._pieces.clear()
        if self._coding in PACKED:
            whole = await self._unpacked(whole)
        if whole:
            await read_json(whole, self._scope)
        self._whole = whole[:1]  # something, so that there is a body; its value is all that anybody asks for

    async def _unpacked(self, packed: bytes) -> bytes:
        """A body with one of the codings of `PACKED`, unpacked. It counts as if it had come so.

        Raises:
            HTTPException: it isn't packed so, breaks off, or has more than `MEMBERS` parts.
            BodyTooLarge, QueueFull: as for bodies that come as they are.
        """
        pieces, view, at, members = list[bytes](), memoryview(packed), 0, 0
        while at < len(view) or not members:
            unpacker, members = zlib.decompressobj(_EITHER), members + 1
            if members > (MEMBERS if self._coding != "deflate" else 1):
                raise self._broken(f"more than {members - 1:,} of it stand one after the other; send one")
            while not unpacker.eof:
                more = unpacker.unconsumed_tail
                if not more:
                    more = bytes(view[at : at + SMALL_BYTES])
                    at += len(more)
                try:
                    piece = await asyncio.to_thread(unpacker.decompress, more, SMALL_BYTES)
                except zlib.error as error:
                    alien = members == 1 and "header" in str(error)
                    raise self._broken("it isn't; leave that out" if alien else "it is damaged") from None
                if not piece and not unpacker.unconsumed_tail and not unpacker.eof and at == len(view):
                    raise self._broken(f"it breaks off after {len(view):,} bytes; send all of it")
                pieces.append(piece)
                self._count += len(piece)
                self._budget.add(len(piece), self._count)
                self._held += len(piece)
                if self._count > self._settings.max_body_bytes:
                    raise self._too_large(self._count)
            at -= len(unpacker.unused_data)
        return b"".join(pieces)

    def _broken(self, why: str) -> HTTPException:
        return HTTPException(400, f"the body's Content-Encoding says {self._coding}, but {why}")

    async def receive(self) -> Message:
        """The next piece; after the last one it waits until the client leaves."""
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return {"type": "http.request", "body": whole, "more_body": False}
        if not self._complete.is_set():
            return await self._next()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def wait_until_gone(self) -> None:
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
        # A large body has room for all of it or is refused while little came: were room taken piece by piece,
        # all would come in halfway before most of them are refused.
        held = self._count if self._count <= SMALL_BYTES else max(self._count, self._length)
        self._budget.add(held - self._held, held)
        self._held = held
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


async def _until_client_leaves(
    app: ASGIApp, scope: Scope, body: RequestBody, send: Send, left_s: float | None
) -> None:
    """Run the app until it is done, or its client has left.

    Raises:
        TimeoutError: nothing of an answer was sent after `left_s` seconds. What the app still does is ended;
            the record says when it has.
    """
    answered = begun = False

    async def watched_send(message: Message) -> None:
        nonlocal answered, begun
        begun = True
        if message["type"] == "http.response.start" and not body.complete:
            # Refused in the middle of its body: what still comes of it is not a new request.
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            answered = True

    handler = asyncio.ensure_future(_call(app, scope, body, watched_send))
    watcher = asyncio.ensure_future(body.wait_until_gone())
    try:
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait({handler, watcher}, timeout=left_s, return_when=first)
        if not done and not begun:
            record_of(scope).lingering = handler
            raise TimeoutError
        if not done:  # an answer that has begun ends by the engine's own clock
            await asyncio.wait({handler, watcher}, return_when=first)
        if not handler.done() and not answered:
            record_of(scope).left = True
            handler.cancel()
            await asyncio.wait({handler})
            if not handler.cancelled() and handler.exception() is not None and not answered:
                return  # whatever went wrong while it was stopped: the client has left
        if not handler.cancelled():
            await handler
    finally:
        watcher.cancel()
        handler.cancel()


async def _call(app: ASGIApp, scope: Scope, body: RequestBody, send: Send) -> Any:
    return await app(scope, body.receive, send)


def _is_json(scope: Scope) -> bool:
    # Ollama's client calls a layer of a model JSON, too, as it does everything: that path is not here anyway.
    if scope["method"] in ("GET", "HEAD") or scope["path"].startswith("/api/blobs/"):
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
