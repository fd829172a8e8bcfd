"""A server's address, and settings with which the openai SDK speaks to that server only; its errors as the
exceptions that a loaded model raises: the same class, the server's message."""

import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import httpx2
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    DefaultHttpxClient,
    OpenAIError,
)

from snugvl.client.pictures import in_our_names
from snugvl.core.network import http_address, settle_network
from snugvl.errors import (
    CODES,
    BodyTooLarge,
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    ImageError,
    InputError,
    OutputError,
    RateLimited,
    RequestError,
    SnugvlError,
    Unauthorized,
    WrongType,
    warn,
)

# The SDK speaks HTTP by httpx2 from its version 3 on, by httpx before; their names are the same.
if TYPE_CHECKING or issubclass(DefaultHttpxClient, httpx2.Client):
    httpx = httpx2
else:
    import httpx

DEFAULT_URL: Final = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S: Final = 5.0
CLOSED: Final = "client has been closed"  # in what the HTTP library raises
sent: ContextVar[object] = ContextVar("sent", default=None)  # the body of the request under way
NO_KEY: Final = "none"  # the SDK insists on one; a server without keys doesn't look
# For answers without such a code: of a proxy, or of another server.
_BY_STATUS: Final[Mapping[int, type[SnugvlError]]] = {
    401: Unauthorized,
    403: Unauthorized,
    413: BodyTooLarge,
    429: RateLimited,
    502: EngineUnavailable,
    503: EngineUnavailable,
    504: DeadlineExceeded,
}
WRONG_KEY: Final = "the API key is wrong"  # as server/access.py says it
_START: Final = "start one with `snugvl serve{port}`, or give its address"
_NO_TLS: Final = "WRONG_VERSION_NUMBER"  # OpenSSL's word for an answer that isn't encrypted


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
        RequestError: not an http(s) URL; `WrongType` where it is not a string, such as a port alone.
    """
    given: object = url
    if not isinstance(given, str):
        example = f"http://127.0.0.1:{given}" if isinstance(given, int) else DEFAULT_URL
        raise WrongType(f"the address is {given!r}, not a string such as {example!r}", field="base_url")
    root = (http_address(url) or "").rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        host = httpx.URL(root).host
    except httpx.InvalidURL:
        host = ""
    if not host:
        raise RequestError(
            f"{url!r} is not the address of a server; give one such as {DEFAULT_URL}", field="base_url"
        )
    return Address(root)


def reads_environment(address: Address) -> bool:
    """Whether clients of that server read proxies and certificates from the environment: not on this machine.

    Raises:
        InputError: they can't be read; the message names the variable.
    """
    if address.local:
        return False
    settle_network()
    try:
        httpx.Client(verify=False).close()  # noqa: S501 (it asks nothing: variables are read when it is made)
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(
            f"the environment variable NO_PROXY can't be understood ({error}); correct or unset it"
        ) from None
    return True


def sdk_options(address: Address, api_key: str | None, timeout_s: float, max_retries: int) -> dict[str, Any]:
    """Arguments of both SDK clients; OpenAI's environment variables have no effect on them.

    Raises:
        RequestError: a key or number that can't be sent.
    """
    if api_key is not None and not isinstance(api_key, str):
        raise WrongType(f"an API key must be a string, not of type {type(api_key).__name__}", field="api_key")
    for name, value in (("timeout", timeout_s), ("max_retries", max_retries)):
        if not isinstance(value, int | float):
            raise WrongType(f"{name} must be a number, not {value!r}", field=name)
    if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable()):
        raise RequestError("an API key must be printable ASCII without line breaks", field="api_key")
    if not timeout_s > 0:
        raise RequestError(f"timeout must be a number of seconds above 0, not {timeout_s!r}", field="timeout")
    if max_retries < 0:
        raise RequestError(f"max_retries must be 0 or more, not {max_retries!r}", field="max_retries")
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

    def are_shut(self) -> bool:
        """Whether they were shut down."""
        return self._shut

    def shut(self) -> None:
        """Shut all sockets down, which ends the requests on them."""
        with self._lock:
            self._shut = True
            for stream in self._streams:
                _shut_down(stream)


def _shut_down(stream: Any) -> None:
    with suppress(OSError):  # closed already
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


@contextmanager
def translating(
    address: Address, body: object = None, closed: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Turns the SDK's and the network's exceptions into ours. `body`: the request's JSON; errors call its
    pictures by their names here. `closed`: whether the client was closed, which breaks what is under way."""
    try:
        yield
    except RuntimeError as error:
        if CLOSED not in str(error):
            raise
        raise EngineError("the client is closed") from error
    except UnicodeEncodeError as error:  # text of a program's own, such as an argument that isn't UTF-8
        raise RequestError("text has a lone surrogate, which is not a character") from error
    except (OpenAIError, httpx.HTTPError, httpx.StreamError, JSONDecodeError) as error:
        ours = EngineError("the client is closed") if closed() else translated(error, address)
        if isinstance(ours, ImageError):
            ours.args = (in_our_names(str(ours), body),)
        raise ours from error


@contextmanager
def sending(address: Address, body: object) -> Iterator[None]:
    """`translating` of a request that is sent within the block; warnings have the names, too."""
    before = sent.set(body)
    try:
        with translating(address, body):
            yield
    finally:
        sent.reset(before)


def translated(error: Exception, address: Address) -> SnugvlError:
    """The exception to raise for one of the SDK or the network."""
    if isinstance(error, APITimeoutError) and not isinstance(error.__cause__, httpx.ConnectTimeout):
        return DeadlineExceeded(f"no answer from {address.root} in time; a longer `timeout` waits longer")
    if isinstance(error, APIConnectionError):
        return _unreachable(error.__cause__, address)
    if isinstance(error, APIStatusError):
        return _of_status(error, address)
    if isinstance(error, APIError):  # an event of a stream
        return _made(_kind(error, 500), error.message, error)
    return EngineError(f"the answer of {address.root} broke off ({_reason(error)}); is it still running?")


def _unreachable(cause: BaseException | None, address: Address) -> SnugvlError:
    if CLOSED in str(cause):
        return EngineError("the client is closed")
    if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
        if _NO_TLS in str(cause):
            plain = address.root.replace("https://", "http://", 1)
            return EngineUnavailable(f"what answers at {address.root} doesn't speak https; use {plain}")
        port = httpx.URL(address.root).port
        start = _START.format(
            port=f" --port {port}" if port and address.local and port != httpx.URL(DEFAULT_URL).port else ""
        )
        return EngineUnavailable(f"no server answers at {address.root} ({_reason(cause)}); {start}")
    return EngineUnavailable(
        f"the connection to {address.root} broke ({_reason(cause)}); is the server still running?"
    )


def _of_status(error: APIStatusError, address: Address) -> SnugvlError:
    body = error.body if isinstance(error.body, Mapping) else {}
    message = body.get("message")
    if not isinstance(message, str):
        status = f"{error.status_code} {error.response.reason_phrase}".strip()
        message = f"{address.root} answered {status} to {error.request.url.path}; is it a snugvl server?"
    if message == WRONG_KEY and error.request.headers.get("authorization") == f"Bearer {NO_KEY}":
        message = f"{address.root} wants an API key"
    return _made(_kind(error, error.status_code), message, error)


def _kind(error: APIError, status: int) -> type[SnugvlError]:
    if (error.code or "") in CODES:
        return CODES[error.code or ""]
    return _BY_STATUS.get(status, RequestError if status < 500 else EngineError)


def _made(kind: type[SnugvlError], message: str, error: APIError) -> SnugvlError:
    if issubclass(kind, RequestError):
        return kind(message, field=error.param)
    if issubclass(kind, OutputError):
        text = error.body.get("text") if isinstance(error.body, Mapping) else None
        return kind(message, text=text if isinstance(text, str) else "")
    retry_after_s = _retry_after_s(error)
    if retry_after_s is not None and issubclass(kind, EngineUnavailable | RateLimited):
        return kind(message, retry_after_s=retry_after_s)
    return kind(message)


def _retry_after_s(error: APIError) -> float | None:
    value = error.response.headers.get("retry-after") if isinstance(error, APIStatusError) else None
    try:
        return float(value) if value is not None else None
    except ValueError:  # a date, from a proxy
        return None


def _reason(error: BaseException | None) -> str:
    text = re.sub(r"^\[Errno -?\d+\] ", "", str(error).strip()) if error is not None else ""
    return text.splitlines()[0] if text else type(error).__name__


def broke_off(address: Address) -> EngineError:
    """The error of a stream that ended without its end."""
    return EngineError(f"the answer of {address.root} broke off; is it a snugvl server, and still running?")


def body_of_503(error: Exception) -> Any:
    """The JSON of a 503; any other error is raised again."""
    if isinstance(error, APIStatusError) and error.status_code == 503:
        return error.response.json()
    raise error
