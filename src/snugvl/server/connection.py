"""The socket, and uvicorn on it, with the bounds that uvicorn lacks: on heads, trailers and pipelines.

A request that offers to go on in another protocol (`Upgrade: h2c`, as Java's HttpClient does first of all) is
answered in HTTP/1.1, as it may be: see `_Parser`.
"""

import asyncio
import errno
import json
import socket
from typing import Any, ClassVar

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import httptools
from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from snugvl.errors import SnugvlError
from snugvl.server.settings import ServerSettings

LINGER_S = 2
ASK_S = 0.25  # between two lines to a client that sends no more; who has left is told apart by the second
# The parser can't be stopped, so it is fed in pieces: each may hold as many requests as fit into it.
HEAD_PIECE_BYTES, BODY_PIECE_BYTES = 1 << 10, 1 << 14
PIPELINED_BYTES = 1 << 16  # of requests that wait for the one before them; no usual client sends any
LINE_BYTES = 256  # of a request's first line, which hold a path of ours
FRAME_BYTES = 32  # around a piece of a chunked body: its length, its line ends


class _Parser:
    """httptools' parser, for a server that never changes its protocol.

    httptools skips the body of a request that has an `Upgrade` header and takes what follows its head for the
    other protocol's. Such a head is parsed a second time, without that header.
    """

    def __init__(self, protocol: "BoundedProtocol") -> None:
        self._protocol = protocol
        self._inner = _httptools_parser(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def should_upgrade(self) -> bool:
        """Whether the present head is parsed a second time. CONNECT never is: its URL is refused."""
        return bool(self._inner.should_upgrade()) and self._inner.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse more of the connection.

        Raises:
            HttpParserError: it is not HTTP.
        """
        while data:
            try:
                self._inner.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head, data = self._head(), data[upgrade.args[0] :]
            self._inner = _httptools_parser(self._protocol)
            self._inner.feed_data(head)

    def _head(self) -> bytes:
        """The head of the request that was parsed last, without `Upgrade`."""
        protocol = self._protocol
        line = b"%s %s HTTP/%s" % (
            self._inner.get_method(),
            protocol.url,
            self._inner.get_http_version().encode(),
        )
        headers = [b"%s: %s" % header for header in protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join((line, *headers, b"", b""))


def _httptools_parser(protocol: "BoundedProtocol") -> Any:
    parser = httptools.HttpRequestParser(protocol)
    # As uvicorn has it: what a client sends behind its last request is left alone.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds on all data that the app never sees.

    These are the head of a request, in bytes and in seconds; data behind it that only the parser reads
    (trailers, extensions of chunks), in bytes; and requests that are sent before the one ahead of them is
    answered.
    """

    settings: ClassVar[ServerSettings]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = _Parser(self)  # type: ignore[assignment]
        self._unread = memoryview(b"")  # what the parser has not been given yet
        self._head_bytes = 0
        self._line = b""  # how the present request, or one before it, begins
        self._swallowed = 0  # bytes of this request that came behind its head and were no body
        self._left = 0  # bytes of its body that its Content-Length still promises
        self._body: list[bytes] = []  # what the parser has found of it in the present piece
        self._in_head = True
        self._refused = False
        self._sent_all = False  # the client, who may still read
        self._running: RequestResponseCycle | None = None
        self._slow: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unread = memoryview(b"")
        self.pipeline.clear()
        super().connection_lost(exc)  # which tells the last request that came, not the one that runs
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays: a client that sends no more may still read, as `nc -N` does.

        One that has left says the same. So it gets what clients skip: who has left can't take it, which the
        second write tells. Nothing can be skipped in an answer of a known length, or of HTTP/1.0.
        """
        waits = bool(self._skipped) and self._in_head
        self._sent_all = waits and self._running.scope["http_version"] == "1.1"  # type: ignore[union-attr]
        if self._sent_all:
            self.loop.call_later(ASK_S, self._ask_whether_it_reads)
        return self._sent_all

    @property
    def _skipped(self) -> bytes:
        """Bytes that may stand before the next piece of an answer that is due; behind a refusal none."""
        running = self._running
        if running is None or running.response_complete or self._refused or self.transport.is_closing():
            return b""
        if not running.response_started:
            return b"HTTP/1.1 100 Continue\r\n\r\n"
        if not running.chunked_encoding:
            return b""
        lines = running.scope["path"].startswith("/api/")  # of JSON; else it is a stream of events
        return b"1\r\n \r\n" if lines else b"3\r\n:\n\n\r\n"

    def _ask_whether_it_reads(self) -> None:
        if skipped := self._skipped:
            self.transport.write(skipped)
            self.loop.call_later(ASK_S, self._ask_whether_it_reads)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        self._feed()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser has this head once more
        self._in_head, self._swallowed = False, 0
        headers = dict(self.headers)
        self._left = 0 if b"transfer-encoding" in headers else int(headers.get(b"content-length", 0))
        self._stop_waiting()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, which would be taken for a header
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._swallowed -= len(body) + FRAME_BYTES
        self._left -= len(body)
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._hand_on_body()
        super().on_message_complete()
        self._in_head, self._head_bytes, self._swallowed, self._left = True, 0, 0, 0

    def _hand_on_body(self) -> None:
        """Give the received part of a body to the app at once: uvicorn copies all that waits for each
        part."""
        if self._body:
            body = b"".join(self._body)
            self._body.clear()
            super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(
            cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app
        )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread and not self.pipeline:
            self.loop.call_soon(self._feed)  # after other tasks that are ready
        elif self._sent_all and not self.pipeline:
            self.transport.close()

    def _feed(self) -> None:
        """Give received bytes to the parser, until a request waits for the one before it."""
        while self._unread and not self.pipeline and not self._refused and self.parser is not None:
            # What is sure to be body goes as a whole: uvicorn would copy all of it again for each piece.
            size = HEAD_PIECE_BYTES if self._in_head else max(BODY_PIECE_BYTES, self._left)
            piece, self._unread = self._unread[:size], self._unread[size:]
            self._parse(piece)
        if not self._unread:
            return
        self._stop_waiting()  # the rest of its head is here
        if len(self._unread) > PIPELINED_BYTES:
            # Not only unread until later: then it wouldn't be noticed that the client has left.
            self.transport.abort()

    def _parse(self, piece: memoryview) -> None:
        if self._in_head:
            if not self._head_bytes:
                self._line = bytes(piece[:LINE_BYTES])
            self._head_bytes += len(piece)
            self._await_head()
        else:
            self._swallowed += len(piece)
        super().data_received(piece)  # type: ignore[arg-type]  # it only hands it on to the parser
        self._hand_on_body()
        # What came beside the head is not counted: the parser has read on by then.
        if (self._in_head and self._head_bytes > self.settings.max_header_bytes) or (
            not self._in_head and self._swallowed > self.settings.max_header_bytes
        ):
            what = "head" if self._in_head else "trailer, or what describes its chunks,"
            self._refuse(
                "431 Request Header Fields Too Large",
                f"the {what} of the request has more than {self.settings.max_header_bytes:,} bytes",
                "headers_too_large",
            )

    def _await_head(self) -> None:
        if self._slow is None:
            self._slow = self.loop.call_later(self.settings.read_timeout_s, self._end_slow_head)

    def _end_slow_head(self) -> None:
        """Close a connection whose head didn't come; where it has begun, and nothing is being answered, with
        the reason."""
        self._slow = None
        if not self._head_bytes or (self._running is not None and not self._running.response_complete):
            self.transport.close()
            return
        came = f"{self._head_bytes:,} bytes in {self.settings.read_timeout_s:g} s"
        why = f"the head of the request came too slowly: {came}"
        self._refuse("408 Request Timeout", why, "request_timeout")

    def _stop_waiting(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", "the request is not valid HTTP", "invalid_http")

    def _refuse(self, status: str, message: str, code: str) -> None:
        if self.transport.is_closing():
            return
        self._refused = True
        self._unread = memoryview(b"")
        self.pipeline.clear()
        self._stop_waiting()
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            self.transport.abort()  # ours would be read as a part of that answer
            return
        if running is not None and not running.response_complete:
            running.disconnected = True  # nothing can be written behind ours
            running.message_event.set()
        body = json.dumps(self._error(message, code)).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n"
        head += "content-type: application/json\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        # Closing while the client still sends would reset the connection, and the answer with it.
        self.transport.write_eof()
        self._slow = self.loop.call_later(LINGER_S, self.transport.close)

    def _error(self, message: str, code: str) -> dict[str, Any]:
        """The body of a refusal in the form of the path's protocol, as far as the path was read."""
        from snugvl.server.errors import InvalidRequest, error_body, family_of  # slow: the app's

        path = self.url or b"".join(self._line.split()[1:2])
        family = family_of(path.partition(b"?")[0].decode("latin-1"))
        return error_body(InvalidRequest(message, field=None, code=code), family, "-")


def _unchunked(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The app for HTTP/1.0, which knows no chunks: an answer without a length ends with the connection."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        sized = True

        async def put(message: Any) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if sized else False
            elif not sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, put)

    return run


KEEP_ALIVE_S = 30
BACKLOG = 512
LEAST_FILES = 64  # it starts with 20; the engine, decoders and a few connections have others


class PortTaken(SnugvlError):
    """Another program listens where the server should. `another`: the way out, behind "another port"."""

    def __init__(self, message: str, another: str = "") -> None:
        super().__init__(message)
        self.another = another


def listen(settings: ServerSettings) -> socket.socket:
    """The listening socket. Clients that connect before the server runs wait in its queue.

    Raises:
        PortTaken: another program listens there.
        SnugvlError: the address is not one of this machine, or may not be used; too few files may be open.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else LEAST_FILES
    if 0 <= most < LEAST_FILES:  # -1: any number; with few asyncio fails at its start, libuv ends the process
        raise SnugvlError(
            f"the system lets this process open {most} files; a server needs {LEAST_FILES}, and more "
            "for many connections; raise the limit (ulimit -n)"
        )
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
        raise _listen_error(settings, error) from None
    return listener


def _listen_error(settings: ServerSettings, error: OSError) -> SnugvlError:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        another = f"such as --port {settings.port + 1} (--port 0 takes any free one)"
        return PortTaken(
            f"another program listens on {where}; stop it, or choose another port, {another}", another
        )
    if error.errno == errno.EACCES:
        return SnugvlError(f"{where} may not be used without privileges; choose a --port of 1024 or more")
    return SnugvlError(f"cannot listen on {where}: {error.strerror or error}")


def uvicorn_config(app: ASGIApp, settings: ServerSettings, **changes: Any) -> Config:
    """uvicorn's settings for the app: our access log instead of its own, no trust in proxies' headers."""
    values: dict[str, Any] = {
        "http": type("ServerProtocol", (BoundedProtocol,), {"settings": settings}),
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
