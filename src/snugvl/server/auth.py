"""Who may come in: API keys, and browsers only from our own page.

A web page that a user happens to visit can make their browser send requests to 127.0.0.1. Two things stop
it: on a loopback address only loopback names are answered (a name that was rebound to 127.0.0.1 is not one),
and without API keys a request that a foreign page sent is refused. No CORS header is ever sent.
"""

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from snugvl.errors import Unauthorized
from snugvl.server.openapi import open_to_all
from snugvl.server.record import current
from snugvl.server.settings import ServerSettings, is_loopback

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Auth:
    """ASGI middleware: refuses before the body is read."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._digests = tuple(_digest(key) for key in settings.api_keys)
        self._loopback = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_host(headers)
            if self._digests:
                if not open_to_all(scope["path"]):
                    self._check_key(headers)
            elif scope["method"] not in SAFE_METHODS:
                _check_origin(headers)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._loopback and not is_loopback(_name(host)):
            raise HTTPException(
                403,
                f"this server answers to localhost, not to {host[:100]!r}; "
                "to serve other names, bind another address with --host and --api-key",
            )

    def _check_key(self, headers: Headers) -> None:
        key = _sent(headers)
        if not key:
            raise Unauthorized("no API key; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        digest = _digest(key)
        # Every key is compared, each in constant time: how long it takes says nothing.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the API key is wrong")
        current().key = digest.hex()[:8]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _sent(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()


def _name(host: str) -> str:
    """The name of a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _check_origin(headers: Headers) -> None:
    origin = headers.get("origin")
    if origin is None:
        return
    try:
        sender = urlsplit(origin).netloc
    except ValueError:
        sender = ""
    if not sender or sender.lower() != headers.get("host", "").lower():
        raise HTTPException(
            403,
            f"a page of {origin[:100]!r} may not use this server; "
            "start it with --api-key to let programs of other origins in",
        )
