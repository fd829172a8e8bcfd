"""A server's errors as the exceptions that a loaded model raises: the same class, the server's message."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Any, Final

import httpx
from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, OpenAIError

from snugvl.client.connection import DEFAULT_URL, NO_KEY, Address, sent
from snugvl.client.pictures import in_our_names
from snugvl.errors import (
    CODES,
    BodyTooLarge,
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    ImageError,
    OutputError,
    RateLimited,
    RequestError,
    SnugvlError,
    Unauthorized,
)

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


@contextmanager
def translating(address: Address, body: object = None) -> Iterator[None]:
    """Turns the SDK's and the network's exceptions into ours.

    Args:
        body: the request's JSON; errors call its pictures by their names here.
    """
    try:
        yield
    except (OpenAIError, httpx.HTTPError, httpx.StreamError, JSONDecodeError) as error:
        ours = translated(error, address)
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
    if isinstance(cause, RuntimeError):
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
