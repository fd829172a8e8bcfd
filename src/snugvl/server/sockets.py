"""The socket, and what uvicorn leaves open on it: endless heads, clients that read nothing."""

import asyncio
import errno
import json
import socket
from typing import Any

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from snugvl.errors import SnugvlError
from snugvl.server.settings import ServerSettings

KEEP_ALIVE_S = 30
LINGER_S = 2
BACKLOG = 512


class PortTaken(SnugvlError):
    """Another program listens where the server should."""


def listen(settings: ServerSettings) -> socket.socket:
    """The listening socket. Clients that connect before the server runs wait in its queue.

    Raises:
        PortTaken: somebody else listens there.
        SnugvlError: the address is not one of this machine, or may not be used.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SnugvlError(f"--host {settings.host}: {error.strerror or error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # The kernel drops a connection whose client acknowledges or reads nothing for so long (milliseconds).
        unread_ms = int(settings.write_timeout_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(settings, error) from None
    return listener


def _refused(settings: ServerSettings, error: OSError) -> SnugvlError:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return PortTaken(
            f"another program listens on {where}; stop it, or choose another port, "
            f"such as --port {settings.port + 1} (--port 0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return SnugvlError(f"{where} may not be used without privileges; choose a --port of 1024 or more")
    return SnugvlError(f"cannot listen on {where}: {error.strerror or error}")


def protocol_of(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """HTTP/1.1 with bounds on the head of a request: its bytes, and the seconds it may take."""

    class Bounded(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head_bytes = 0
            self._in_head = True
            self._refused = False
            self._slow: asyncio.TimerHandle | None = None
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._in_head:
                self._head_bytes += len(data)
                self._await_head()
            super().data_received(data)
            # What came beside the head is not counted: the parser has read on by then.
            if self._in_head and self._head_bytes > settings.max_header_bytes:
                self._refuse(
                    "431 Request Header Fields Too Large",
                    f"the head of the request has more than {settings.max_header_bytes:,} bytes",
                    "headers_too_large",
                )

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_waiting()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_head, self._head_bytes = True, 0

        def _await_head(self) -> None:
            if self._slow is None:
                self._slow = self.loop.call_later(settings.read_timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None

        def send_400_response(self, msg: str) -> None:
            self._refuse("400 Bad Request", "the request is not valid HTTP", "invalid_http")

        def _refuse(self, status: str, message: str, code: str) -> None:
            if self.transport.is_closing():
                return
            detail = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = json.dumps({"error": detail}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n"
            head += "content-type: application/json\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            # Closing while the client still sends would reset the connection, and the answer with it.
            self._refused = True
            self.transport.write_eof()
            self._stop_waiting()
            self._slow = self.loop.call_later(LINGER_S, self.transport.close)

    return Bounded


def uvicorn_config(app: ASGIApp, settings: ServerSettings, **changes: Any) -> Config:
    """How uvicorn runs the app: our access log instead of its own, no trust in proxies' headers."""
    values: dict[str, Any] = {
        "http": protocol_of(settings),
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": 5,
    }
    return Config(app, **{**values, **changes})


def address_of(listener: socket.socket) -> tuple[str, int]:
    """Host and port that it listens on."""
    host, port = listener.getsockname()[:2]
    return host, port
