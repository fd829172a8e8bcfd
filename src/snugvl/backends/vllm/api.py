"""vLLM's HTTP API, as much of it as we use: what is there, what it does, and answers as they stream.

A Unix socket is reached through asyncio's own streams. httpcore leaves such sockets to anyio, which has the
event loop itself set the result of the future that a reader waits for (`loop.add_reader(socket,
future.set_result, None)`, anyio 4.16). Where the reader is cancelled in the very pass of the loop in which
its socket becomes readable, as when a client leaves while a piece of its answer comes, that future is done
already: the loop logs an `InvalidStateError` and its traceback. asyncio's transports, which anyio uses for
TCP, have no such future.
"""

import asyncio
import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import httpcore
import httpx

from snugvl.errors import EngineError, RequestError, RequestTooLarge, SnugvlError

CONNECT_S: Final = 5.0
CALL_S: Final = 30.0  # a call that computes nothing
UNIX: Final = "unix:"
MAX_QUOTED: Final = 300  # characters of an answer that we don't understand

_TOO_LARGE: Final = ("maximum context length", "maximum model length", "max_model_len", "encoder cache size")


class NotVllm(EngineError):
    """Something answers, but it is no vLLM server, or not the one that was meant. Waiting won't help."""


class Unreachable(EngineError):
    """No answer came, or not in time."""


class NobodyThere(Unreachable):
    """Nothing listens at the address."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind an address."""

    model: str
    root: str  # what the server loaded it from
    context_tokens: int
    version: str


class VllmApi:
    """Talks to one server. `where`: its base URL, or `unix:` and the path of the socket it listens on."""

    def __init__(self, where: str, api_key: str | None = None) -> None:
        self.where = where.rstrip("/").removesuffix("/v1")
        path = self.where.removeprefix(UNIX) if self.where.startswith(UNIX) else None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.where if path is None else "http://localhost",
            transport=None if path is None else unix_transport(path, limits),
            headers=headers,
            trust_env=False,  # a proxy of the environment is no way to this machine
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
            limits=limits,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def healthy(self, timeout_s: float) -> bool:
        """Whether it says it is well. False: it says that its engine is dead.

        Raises:
            Unreachable: nothing answers, or not in time.
            NotVllm: what answers doesn't speak as vLLM does.
        """
        status = (await self._get("/health", timeout_s)).status_code
        if status not in (200, 503):
            raise self._foreign(f"GET /health gave {status}")
        return status == 200

    async def served(self, wanted: str) -> Served:
        """What it serves. `wanted`: a model's name; empty for the first one.

        Raises:
            NotVllm: no vLLM, or it has another model.
            Unreachable: nothing answers.
        """
        response = await self._get("/v1/models", CALL_S)
        if response.status_code in (401, 403):
            raise NotVllm(f"the vLLM at {self.where} wants an API key, or another one than it was given")
        listed = [
            card
            for card in _list(_object(response).get("data"))
            if isinstance(card, dict)
            and isinstance(card.get("id"), str)
            and isinstance(card.get("max_model_len"), int)
        ]
        version = _object(await self._get("/version", CALL_S)).get("version")
        if not listed or not isinstance(version, str):
            asked = "GET /v1/models" if not listed else "GET /version"
            raise self._foreign(f"{asked} was not answered as vLLM does")
        cards = [card for card in listed if wanted in ("", card["id"])]
        if not cards:
            names = ", ".join(card["id"] for card in listed)
            raise NotVllm(f"the vLLM at {self.where} serves {names}, not {wanted}")
        root = cards[0].get("root")
        return Served(
            cards[0]["id"], root if isinstance(root, str) else "", cards[0]["max_model_len"], version
        )

    async def metrics(self) -> str:
        """The counters, in Prometheus' text format."""
        return (await self._get("/metrics", CALL_S)).text

    async def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = CALL_S
    ) -> dict[str, Any]:
        """POST and the JSON that comes back.

        Raises:
            RequestError, EngineError: what vLLM refuses or fails with.
        """
        try:
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
            response = await self._client.post(path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise refusal(response.status_code, response.content)
        return _object(response)

    async def tokens(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of a prompt or a conversation, by `POST /tokenize`."""
        found = (await self.call("/tokenize", body)).get("tokens")
        if not isinstance(found, list):
            raise EngineError("vLLM's answer to /tokenize has no tokens")
        return tuple(int(token) for token in found)

    async def open(self, path: str, body: bytes, until: AsyncExitStack) -> httpx.Response:
        """POST and the response as it begins to stream. The connection belongs to `until`.

        Raises:
            RequestError, EngineError: what vLLM refuses or fails with.
            httpx.HTTPError: the connection broke.
        """
        timeout = httpx.Timeout(CALL_S, connect=CONNECT_S, read=None)
        headers = {"Content-Type": "application/json"}
        stream = self._client.stream("POST", path, content=body, headers=headers, timeout=timeout)
        response = await until.enter_async_context(stream)
        if response.status_code != 200:
            raise refusal(response.status_code, await response.aread())
        return response

    async def _get(self, path: str, timeout_s: float) -> httpx.Response:
        try:
            return await self._client.get(path, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S))
        except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
            if "disconnected" in str(error):  # without a word: it may be going down
                raise self._unreachable(error) from None
            raise self._foreign(f"GET {path} was answered with something that is not HTTP") from None
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _foreign(self, why: str) -> NotVllm:
        return NotVllm(f"what answers at {self.where} is not a vLLM server: {why}")

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        if isinstance(error, httpx.ConnectError):
            return NobodyThere(f"nothing answers at {self.where}")
        return Unreachable(f"{self.where} doesn't answer ({type(error).__name__})")


def refusal(status: int, content: bytes) -> SnugvlError:
    """What vLLM answered in place of an answer, as an error of ours."""
    return error_of(_json(content), status, content.decode("utf-8", "replace"))


def error_of(value: Any, status: int, text: str = "") -> SnugvlError:
    """An error object of vLLM's (`{"error": {"message": …, "code": …}}`) as ours."""
    error = value.get("error") if isinstance(value, dict) else None
    error = error if isinstance(error, dict) else {}
    message = error.get("message")
    message = " ".join(message.split()) if isinstance(message, str) else text.strip()[:MAX_QUOTED]
    code = error.get("code")
    status = code if isinstance(code, int) else status
    param = error.get("param")
    field = param if isinstance(param, str) else None
    if status in (400, 413, 422):
        too_large = any(phrase in message for phrase in _TOO_LARGE)
        kind = RequestTooLarge if too_large else RequestError
        return kind(f"vLLM refuses this request: {message}", field=field)
    if status in (401, 403):
        return EngineError("vLLM refuses our API key; give the one that it was started with")
    return EngineError(f"vLLM failed with status {status}: {message}")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _object(response: httpx.Response) -> dict[str, Any]:
    found = _json(response.content) if response.status_code == 200 else None
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


FULL_S = 0.005  # until a queue of connections that is full is asked again


def unix_transport(path: str, limits: httpx.Limits) -> httpx.AsyncHTTPTransport:
    """What an `httpx.AsyncClient` reaches the socket at `path` with."""
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
                return _Stream(*await asyncio.open_unix_connection(sock=await _connect(path)))
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


class _Stream(httpcore.AsyncNetworkStream):
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
