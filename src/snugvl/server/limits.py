"""How much may come in: header lines, requests at once, requests of one key. Before any body is read."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from snugvl.errors import QueueFull, RateLimited
from snugvl.server.record import current
from snugvl.server.settings import ServerSettings

MAX_HEADERS = 100
Clock = Callable[[], float]


class Bucket:
    """A minute's worth of requests that fills up evenly."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def take(self, now: float) -> float:
        """Take one; 0, or the seconds after which there is one."""
        rate = self._per_minute / 60
        self._left = min(self._per_minute, self._left + (now - self._at) * rate)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / rate
        self._left -= 1
        return 0.0


class Limits:
    """ASGI middleware. Only requests that do work (POST) are counted: health and metrics always answer."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, clock: Clock = time.monotonic) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._running: dict[str, int] = {}  # per key; only keys that were let in, so it stays small
        self._buckets: dict[str, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what is too much, pass the rest on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_headers(scope)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._place(current().key):
            await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        held, limit = sum(len(name) + len(value) for name, value in headers), self._settings.max_header_bytes
        if len(headers) > MAX_HEADERS:
            raise HTTPException(431, f"{len(headers)} header lines; at most {MAX_HEADERS} are read")
        if held > limit:
            raise HTTPException(431, f"{held:,} bytes of headers; at most {limit:,} are read")

    @contextmanager
    def _place(self, key: str) -> Iterator[None]:
        """A place in the building while the block runs."""
        settings = self._settings
        total, own = sum(self._running.values()), self._running.get(key, 0)
        if total >= settings.max_concurrent:
            raise QueueFull(f"{total} requests are being served, which is the limit; try again in a moment")
        if settings.key_concurrent is not None and own >= settings.key_concurrent:
            raise RateLimited(f"this API key has {own} requests running, which is its limit")
        self._take(key)
        self._running[key] = own + 1
        record = current()
        try:
            yield
        finally:
            if record.lingering is not None and not record.lingering.done():
                record.lingering.add_done_callback(lambda ended: self._end(key, ended))
            else:
                self._leave(key)

    def _end(self, key: str, ended: "asyncio.Future[object]") -> None:
        if not ended.cancelled():
            ended.exception()  # nobody is left to tell
        self._leave(key)

    def _leave(self, key: str) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def _take(self, key: str) -> None:
        per_minute = self._settings.key_requests_per_minute
        if per_minute is None:
            return
        now = self._clock()
        bucket = self._buckets.setdefault(key, Bucket(per_minute, now))
        wait_s = bucket.take(now)
        if wait_s:
            raise RateLimited(
                f"this API key may send {per_minute} requests a minute; the next in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
