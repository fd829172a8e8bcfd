"""A stand-in for the servers of strangers: says exactly the bytes it is told, over a real socket."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

Reply = bytes | Callable[[socket.socket, threading.Event], None]


class StandIn:
    """Listens on `host`; `replies` by path. `requests` holds the text of every request it got."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.replies: dict[str, Reply] = {}
        self.requests: list[str] = []
        self.stopped = threading.Event()
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self.stopped.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        text = b""
        while b"\r\n\r\n" not in text:
            piece = connection.recv(65536)
            if not piece:
                return
            text += piece
        self.requests.append(text.decode("latin-1"))
        reply = self.replies[text.split()[1].decode("latin-1")]
        if callable(reply):
            reply(connection, self.stopped)
        else:
            connection.sendall(reply)


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """An HTTP/1.1 response. `length`: what Content-Length claims."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return answer(b"moved", f"Location: {location}", status=status)


def endless(connection: socket.socket, stopped: threading.Event) -> None:
    """A body without end, as fast as it is read."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not stopped.is_set():
        connection.sendall(bytes(65536))


def endless_chunks(connection: socket.socket, stopped: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not stopped.is_set():
        connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")


def drip(connection: socket.socket, stopped: threading.Event) -> None:
    """One byte now and then: never slow enough for the time between two pieces."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not stopped.wait(0.05):
        connection.sendall(b"x")


def drip_headers(connection: socket.socket, stopped: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not stopped.wait(0.05):
        connection.sendall(b"x")


def silent(connection: socket.socket, stopped: threading.Event) -> None:
    stopped.wait()


def endless_continue(connection: socket.socket, stopped: threading.Event) -> None:
    while not stopped.is_set():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


@contextmanager
def standing_in(
    host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> Iterator[StandIn]:
    server = StandIn(host, port, tls)
    try:
        yield server
    finally:
        server.close()


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a self-signed certificate for `name`, and a client's that trusts it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("making a certificate needs the openssl command")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName=DNS:{name}"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=str(cert))
