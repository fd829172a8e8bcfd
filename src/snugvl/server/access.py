"""Refusals before a body is read: missing keys, foreign pages, and too many requests.

A web page that a user happens to visit can make their browser send requests to 127.0.0.1 and to other
machines of their network. Without API keys three things stop it: a request that a foreign page sent is
refused; on a loopback address only loopback names are answered; and on any other address a browser is
answered only under a name that no stranger can own, as a page whose name was rebound to our address looks
like our own. CORS headers are sent to the origins of `--allow-origin` alone (`app.py`).
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from snugvl.errors import QueueFull, RateLimited, Unauthorized
from snugvl.server.metrics import RequestRecord, record_of
from snugvl.server.settings import ServerSettings, is_loopback

# Below these nobody can register a name, and none without a dot: they are of a machine or a local network.
_LOCAL_SUFFIXES = (".localhost", ".local", ".lan", ".home", ".home.arpa", ".internal", ".localdomain")
KEY_HEADERS = ("x-api-key", "api-key")  # besides Authorization: of Anthropic's clients, of Azure's
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Headers that decide who is let in and what a body is: a proxy before us may go by the other one of two.
_ONCE = ("host", "origin", "sec-fetch-site", "authorization", "content-length", "content-type", *KEY_HEADERS)


def open_to_all(path: str) -> bool:
    """Whether a path needs no API key: health, and the files of the page, which hold no secret."""
    return path in ("/", "/favicon.ico", "/health") or path.startswith(("/health/", "/page/"))


def foreign(origin: str) -> str:
    """Error for a page of another address."""
    return (
        f"a page of {origin[:100]!r} may not use this server; start it with --allow-origin and that address "
        "to let the page in"
    )


class Auth:
    """ASGI middleware: refuses before the body is read."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._digests = tuple(_digest(key) for key in settings.api_keys)
        self._origins = frozenset(settings.allow_origins)
        self._names = frozenset(_name(urlsplit(origin).netloc) for origin in settings.allow_origins)
        self._loopback = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            _check_once(headers)
            # HTTP/1.0 needs no Host, and no browser speaks it: load balancers ask for /health so.
            if "host" in headers or scope.get("http_version") != "1.0":
                self._check_host(headers)
            if self._digests:
                if not open_to_all(scope["path"]):
                    record_of(scope).key = self._fingerprint(headers)
            else:
                self._check_browser(headers, safe=scope["method"] in SAFE_METHODS)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._loopback and not is_loopback(_name(host)):
            raise HTTPException(
                403,
                f"this server answers to localhost, not to {host[:100]!r}; "
                "to serve other names, bind another address with --host and --api-key",
            )

    def _fingerprint(self, headers: Headers) -> str:
        """Fingerprint of the API key in a head.

        Raises:
            Unauthorized: there is no key, or a wrong one.
        """
        key = _key_of(headers)
        if not key:
            why = (
                "the Authorization header holds no 'Bearer KEY'"
                if "authorization" in headers
                else "no API key"
            )
            raise Unauthorized(f"{why}; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        digest = _digest(key)
        # Every key is compared, each in constant time: how long it takes says nothing.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the API key is wrong")
        return digest.hex()[:8]

    def _check_browser(self, headers: Headers, *, safe: bool) -> None:
        origin = headers.get("origin")
        if "*" in self._origins or origin in self._origins:
            return
        name = _name(headers.get("host", ""))
        if _from_browser(headers) and not _local(name) and name not in self._names:
            raise HTTPException(
                403,
                f"without API keys browsers aren't answered under {name[:100]!r}, as any page's name could "
                "be made to point here; use this server's IP address, give it an --api-key, or start it with "
                f"--allow-origin http://{headers.get('host', '')[:100]}",
            )
        if not safe and origin is not None:
            self._check_origin(origin, headers)

    def _check_origin(self, origin: str, headers: Headers) -> None:
        try:
            sender = urlsplit(origin).netloc
        except ValueError:
            sender = ""
        if not sender or sender.lower() != headers.get("host", "").lower():
            raise HTTPException(403, foreign(origin))


def _check_once(headers: Headers) -> None:
    for name in _ONCE:
        if (count := len(headers.getlist(name))) > 1:
            raise HTTPException(
                400, f"the header {name.title()} stands in the request {count} times; send one"
            )


def _from_browser(headers: Headers) -> bool:
    """Whether a browser sent the request: it always sends Origin with requests that make the server work."""
    marked = "origin" in headers or "sec-fetch-site" in headers
    return marked or headers.get("user-agent", "").startswith("Mozilla/")


def _local(name: str) -> bool:
    """Whether no stranger can have the name: an IP address, no dot in it, a suffix of local networks."""
    with suppress(ValueError):
        return bool(ip_address(name))
    name = name.rstrip(".")
    return "." not in name or name.endswith(_LOCAL_SUFFIXES)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_of(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return next((key for name in KEY_HEADERS if (key := headers.get(name, "").strip())), "")


def _name(host: str) -> str:
    """The name of a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


MAX_HEADERS = 100
Clock = Callable[[], float]


class Bucket:
    """A minute's worth of requests that fills up evenly."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def take(self, now: float) -> float:
        """Take one request; returns 0, or the seconds after which there is one to take."""
        rate = self._per_minute / 60
        self._left = min(self._per_minute, self._left + (now - self._at) * rate)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / rate
        self._left -= 1
        return 0.0


class RateLimits:
    """ASGI middleware. Only requests that do work (POST) are counted: health and metrics always answer."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, clock: Clock = time.monotonic) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._running: dict[str, int] = {}  # per key; only keys that were let in, so it stays small
        self._buckets: dict[str, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request beyond the limits, pass others on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_headers(scope)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._running_request(record_of(scope)):
            await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        header_bytes = sum(len(name) + len(value) for name, value in headers)
        limit = self._settings.max_header_bytes
        if len(headers) > MAX_HEADERS:
            raise HTTPException(431, f"{len(headers)} header lines; at most {MAX_HEADERS} are read")
        if header_bytes > limit:
            raise HTTPException(431, f"{header_bytes:,} bytes of headers; at most {limit:,} are read")

    @contextmanager
    def _running_request(self, record: RequestRecord) -> Iterator[None]:
        """Count a request as running while the block runs."""
        settings, key = self._settings, record.key
        total, own = sum(self._running.values()), self._running.get(key, 0)
        if total >= settings.max_concurrent:
            raise QueueFull(f"{total} requests are being served, which is the limit; try again in a moment")
        if settings.key_concurrent is not None and own >= settings.key_concurrent:
            raise RateLimited(
                f"this API key has {own} requests running, which is its limit; wait until one ends"
            )
        self._take(key)
        self._running[key] = own + 1
        try:
            yield
        finally:
            if record.lingering is not None and not record.lingering.done():
                record.lingering.add_done_callback(lambda ended: self._end(key, ended))
            else:
                self._leave(key)

    def _end(self, key: str, ended: "asyncio.Future[object]") -> None:
        if not ended.cancelled():
            ended.exception()  # the client has left
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
