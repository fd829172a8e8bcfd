"""A SOCKS5 proxy of one purpose: whatever address is asked for, it leads to one port of this machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer


@contextmanager
def socks(port: int) -> Iterator[tuple[str, list[str]]]:
    """The proxy's HOST:PORT, and a list that gets the name of each host that is asked for."""
    asked: list[str] = []

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            _, methods = self._read(2)
            self._read(methods)
            self.request.sendall(b"\x05\x00")
            _, _, _, kind = self._read(4)
            length = {1: 4, 4: 16}.get(kind) or self._read(1)[0]
            host = self._read(length)
            asked.append(host.decode() if kind == 3 else socket.inet_ntop(socket.AF_INET, host))
            self._read(2)
            self.request.sendall(b"\x05\x00\x00\x01" + bytes(6))
            with socket.create_connection(("127.0.0.1", port)) as there, suppress(OSError):
                back = threading.Thread(target=_pass_on, args=(there, self.request))
                back.start()
                _pass_on(self.request, there)
                back.join()

        def _read(self, count: int) -> bytes:
            data = b""
            while len(data) < count:
                data += self.request.recv(count - len(data)) or b"\0" * count
            return data

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)
