"""A Unix socket as httpx reaches it, through asyncio's own streams.

httpcore leaves such sockets to anyio, which has the
event loop itself set the result of the future that a reader waits for (`loop.add_reader(socket,
future.set_result, None)`, anyio 4.16). Where the reader is cancelled in the very pass of the loop in which
its socket becomes readable, as when a client leaves while a piece of its answer comes, that future is done
already: the loop logs an `InvalidStateError` and its traceback. asyncio's transports, which anyio uses for
TCP, have no such future.
"""

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

FULL_S = 0.005  # until a queue of connections that is full is asked again


def unix_transport(path: str, limits: httpx.Limits) -> httpx.AsyncHTTPTransport:
    """The transport by which an `httpx.AsyncClient` reaches the socket at `path`."""
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
    """A connected socket. asyncio would take one whose queue was full for connected."""
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
