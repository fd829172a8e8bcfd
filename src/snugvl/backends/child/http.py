"""An engine's HTTP API, as far as all engines have one: its health, calls, answers as they stream, errors.

Unix sockets are reached through asyncio's own streams. httpcore leaves such sockets to anyio, which has the
event loop itself set the result of the future that a reader waits for (`loop.add_reader(socket,
future.set_result, None)`, anyio 4.16). Where the reader is cancelled in the very pass of the loop in which
its socket becomes readable, as when a client leaves while a piece of its answer comes, that future is done
already: the loop logs an `InvalidStateError` and its traceback. asyncio's transports, which anyio uses for
TCP, have no such future.
"""

import asyncio
import socket
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import httpcore
import httpx

from snugvl.core.folders import json_object
from snugvl.errors import EngineError, RequestError, RequestTooLarge, SnugvlError

FULL_S = 0.005  # until a queue of connections that is full is asked again


def unix_transport(path: str, limits: httpx.Limits) -> httpx.AsyncHTTPTransport:
    """Transport by which an `httpx.AsyncClient` reaches the socket at `path`."""
    transport = httpx.AsyncHTTPTransport()
    # httpx has no way to say which streams its pool uses.
    transport._pool = httpcore.AsyncConnectionPool(
        max_connections=limits.max_connections,
        max_keepalive_connections=limits.max_keepalive_connections,
        keepalive_expiry=limits.keepalive_expiry,
        uds=path,
        network_backend=_Backend(),
    )
    return transport


class _Backend(httpcore.AnyIOBackend):
    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return _UnixStream(*await asyncio.open_unix_connection(sock=await _connect(path)))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error


async def _connect(path: str) -> socket.socket:
    """A socket that is connected. asyncio takes one that found the queue full for connected."""
    link = socket.socket(socket.AF_UNIX)
    link.setblocking(False)
    try:
        while True:
            try:
                link.connect(path)
                return link
            except BlockingIOError:
                await asyncio.sleep(FULL_S)
    except BaseException:
        link.close()
        raise


class _UnixStream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.transport.abort()  # closing would wait until the other side has taken what is unsent
        await asyncio.sleep(0)  # in which it is closed

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # asked of a connection that idles: whether the other side has closed it
            return self._reader.at_eof() or self._writer.is_closing()
        return None


CONNECT_S: Final = 5.0
CALL_S: Final = 30.0  # a call that computes nothing
UNIX: Final = "unix:"
MAX_QUOTED: Final = 300  # characters of an answer that we don't understand


class Foreign(EngineError):
    """Something answers, but it is not such a server, or not the one that was meant. Waiting won't help."""


class Unreachable(EngineError):
    """No answer came, or not in time."""


class NobodyThere(Unreachable):
    """Nothing listens at the address."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind an address. `root`: what the server loaded it from."""

    model: str
    root: str
    context_tokens: int
    version: str


class ChildApi:
    """Talks to one server. `where`: its base URL, or `unix:` and the path of the socket it listens on.
    `name`: of the engine, as people know it; `too_large`: what it says of a request that doesn't fit."""

    name: ClassVar[str]
    too_large: ClassVar[tuple[str, ...]]

    def __init__(self, where: str, api_key: str | None = None) -> None:
        self.where = where.rstrip("/").removesuffix("/v1")
        path = self.where.removeprefix(UNIX) if self.where.startswith(UNIX) else None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.where if path is None else "http://localhost",
            transport=None if path is None else unix_transport(path, limits),
            headers=headers,
            trust_env=False,  # a proxy of the environment is not a way to this machine
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
            limits=limits,
        )

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._client.is_closed

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def healthy(self, timeout_s: float) -> bool:
        """Whether it says it is well. False: it says that its engine is dead.

        Raises:
            Unreachable: nothing answers, or not in time.
            Foreign: what answers doesn't speak as this engine does.
        """
        status = (await self.get("/health", timeout_s)).status_code
        if status not in (200, 503):
            raise self.foreign(f"GET /health gave {status}")
        return status == 200

    async def served(self, wanted: str) -> Served:
        """The model that it serves. `wanted`: a model's name; empty for the first one.

        Raises:
            Foreign: no such server, or it has another model.
            Unreachable: nothing answers.
        """
        raise NotImplementedError

    async def told(self, path: str) -> dict[str, Any]:
        """The JSON object that answers GET `path`; empty for another value.

        Raises:
            Foreign: it wants another API key.
            Unreachable: nothing answers.
        """
        response = await self.get(path, CALL_S)
        if response.status_code in (401, 403):
            raise Foreign(
                f"the {self.name} at {self.where} wants an API key, or another one than it was given"
            )
        return object_of(response)

    async def cards(self) -> list[Any]:
        """The models that the server names at GET /v1/models.

        Raises:
            Foreign: it wants another API key, or is a server of snugvl's.
            Unreachable: nothing answers.
        """
        cards = list_of((await self.told("/v1/models")).get("data"))
        if any(isinstance(card, dict) and card.get("owned_by") == "snugvl" for card in cards):
            raise Foreign(f"what answers at {self.where} is snugvl, which clients can ask themselves")
        return cards

    async def text_tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it is, control tokens among them."""
        raise NotImplementedError

    async def metrics(self) -> str:
        """The counters, in Prometheus' text format."""
        return (await self.get("/metrics", CALL_S)).text

    async def ids_of(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of a prompt or a conversation, by `POST /tokenize`."""
        found = (await self.call("/tokenize", body)).get("tokens")
        if not isinstance(found, list):
            raise self.foreign("POST /tokenize was answered without tokens")
        return tuple(int(token) for token in found)

    async def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = CALL_S
    ) -> dict[str, Any]:
        """POST and the JSON that comes back.

        Raises:
            RequestError, EngineError: what it refuses or fails with.
        """
        try:
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
            response = await self._client.post(path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise self.refusal(response.status_code, response.content)
        return object_of(response)

    async def open(self, path: str, body: bytes, until: AsyncExitStack) -> httpx.Response:
        """POST and the response as it begins to stream. The connection belongs to `until`.

        Raises:
            RequestError, EngineError: what it refuses or fails with.
            httpx.HTTPError: the connection broke.
        """
        timeout = httpx.Timeout(CALL_S, connect=CONNECT_S, read=None)
        headers = {"Content-Type": "application/json"}
        stream = self._client.stream("POST", path, content=body, headers=headers, timeout=timeout)
        response = await until.enter_async_context(stream)
        if response.status_code != 200:
            raise self.refusal(response.status_code, await response.aread())
        return response

    async def get(self, path: str, timeout_s: float) -> httpx.Response:
        """The server's answer to GET `path`, whatever its status.

        Raises:
            Unreachable, Foreign: as `healthy`.
        """
        try:
            return await self._client.get(path, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))
        except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
            if "disconnected" in str(error):  # without a word: it may be going down
                raise self._unreachable(error) from None
            raise self.foreign(f"GET {path} was answered with something that is not HTTP") from None
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def foreign(self, why: str) -> Foreign:
        """The error for an answer that shows that another program answers."""
        return Foreign(f"what answers at {self.where} is not a {self.name} server: {why}")

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        if isinstance(error, httpx.ConnectError):
            return NobodyThere(f"nothing answers at {self.where}")
        return Unreachable(f"{self.where} doesn't answer ({type(error).__name__})")

    def refusal(self, status: int, content: bytes) -> SnugvlError:
        """Our exception for a refusal: an HTTP `status` with the body `content`."""
        return self.error_of(json_object(content) or {}, status, content.decode("utf-8", "replace"))

    def error_of(self, value: Mapping[str, Any], status: int, text: str = "") -> SnugvlError:
        """An error object (`{"error": {"message": …, "code": …}}`) as ours."""
        error = value.get("error")
        error = error if isinstance(error, dict) else {}
        message = error.get("message")
        message = " ".join(message.split()) if isinstance(message, str) else text.strip()[:MAX_QUOTED]
        code = error.get("code")
        status = code if isinstance(code, int) else status
        param = error.get("param")
        field = param if isinstance(param, str) else None
        if status in (400, 413, 422):
            too_large = any(phrase in message for phrase in self.too_large)
            kind = RequestTooLarge if too_large else RequestError
            return kind(f"{self.name} refuses this request: {message}", field=field)
        if status in (401, 403):
            return EngineError(f"{self.name} refuses our API key; give the one that it was started with")
        return EngineError(f"{self.name} failed with status {status}: {message}")


def object_of(response: httpx.Response) -> dict[str, Any]:
    return (json_object(response.content) or {}) if response.status_code == 200 else {}


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
