"""A server's address, and settings with which the openai SDK speaks to that server only."""

import socket
import threading
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final
from weakref import WeakSet

import httpx

from snugvl.client.pictures import in_our_names
from snugvl.core.sizes import http_address
from snugvl.errors import RequestError, WrongType, warn

DEFAULT_URL: Final = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S: Final = 5.0
sent: ContextVar[object] = ContextVar("sent", default=None)  # the body of the request under way
NO_KEY: Final = "none"  # the SDK insists on one; a server without keys doesn't look


@dataclass(frozen=True, slots=True)
class Address:
    """A server: scheme, host and port, with the path of a proxy in front where there is one."""

    root: str

    def url(self, path: str) -> str:
        """The full URL of one of its paths."""
        return f"{self.root}/{path.lstrip('/')}"

    @property
    def local(self) -> bool:
        """Whether it is on this machine, so that no proxy is used."""
        host = httpx.URL(self.root).host
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False


def address_of(url: str) -> Address:
    """The address in `url`, with or without http:// before a host and a port, and a final /v1.

    Raises:
        RequestError: not an http(s) URL; `WrongType` where it is no string, such as a port alone.
    """
    given: object = url
    if not isinstance(given, str):
        example = f"http://127.0.0.1:{given}" if isinstance(given, int) else DEFAULT_URL
        raise WrongType(f"the address is {given!r}, not a string such as {example!r}", field="base_url")
    root = http_address(url.strip()).rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parsed = httpx.URL(root)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    odd = not parsed.host or parsed.query or parsed.fragment or len(root.split()) != 1
    if parsed.scheme not in ("http", "https") or odd:
        raise RequestError(
            f"{url!r} is not the address of a server; give one such as {DEFAULT_URL}", field="base_url"
        )
    return Address(root)


def sdk_options(address: Address, api_key: str | None, timeout_s: float, max_retries: int) -> dict[str, Any]:
    """Arguments of both SDK clients; OpenAI's environment variables have no effect on them.

    Raises:
        RequestError: a key or number that can't be sent.
    """
    if api_key is not None and not isinstance(api_key, str):
        raise WrongType(f"an API key is a string, not of type {type(api_key).__name__}", field="api_key")
    for name, value in (("timeout", timeout_s), ("max_retries", max_retries)):
        if not isinstance(value, int | float):
            raise WrongType(f"{name} is a number, not {value!r}", field=name)
    if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable()):
        raise RequestError("an API key is printable ASCII without line breaks", field="api_key")
    if not timeout_s > 0:
        raise RequestError(f"timeout is a number of seconds above 0, not {timeout_s!r}", field="timeout")
    if max_retries < 0:
        raise RequestError(f"max_retries is 0 or more, not {max_retries!r}", field="max_retries")
    return {
        "base_url": address.url("/v1"),
        "api_key": api_key or NO_KEY,
        "organization": "",
        "project": "",
        "timeout": httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
        "max_retries": max_retries,
    }


def answered(response: httpx.Response) -> None:
    """Look at the head of an answer: a server's warning becomes a `SnugvlWarning`.

    The SDK repeats every 5xx, but only 503 can get better; others would do the same work again.
    """
    for text in filter(None, response.headers.get("snugvl-warning", "").split("; ")):
        warn(in_our_names(text, sent.get()))
    if response.status_code >= 500 and response.status_code != 503:
        response.headers["x-should-retry"] = "false"


class Sockets:
    """The open sockets of a client, so that closing it ends requests that wait in other threads.

    Closing a socket does not wake a thread that reads from it; shutting it down does.
    """

    def __init__(self) -> None:
        self._streams: WeakSet[Any] = WeakSet()
        self._lock = threading.Lock()
        self._shut = False

    def watch(self, request: httpx.Request) -> None:
        """Note the socket that `request` opens, by httpcore's trace extension."""
        request.extensions["trace"] = self._trace

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        with self._lock:
            self._streams.add(info["return_value"])
            if self._shut:  # it was on its way when the others were shut
                _shut_down(info["return_value"])

    def shut(self) -> None:
        """Shut all sockets down, which ends the requests on them."""
        with self._lock:
            self._shut = True
            for stream in self._streams:
                _shut_down(stream)


def _shut_down(stream: Any) -> None:
    with suppress(OSError):  # closed already
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
