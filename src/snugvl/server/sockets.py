"""The socket, and how uvicorn runs on it."""

import errno
import socket
from typing import Any

from starlette.types import ASGIApp
from uvicorn import Config

from snugvl.errors import SnugvlError
from snugvl.server.connection import protocol_of
from snugvl.server.settings import ServerSettings

KEEP_ALIVE_S = 30
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
