"""HTTP by hand, for clients that misbehave; and waiting for what happens elsewhere."""

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def connect(base: str, data: bytes = b"") -> socket.socket:
    parts = urlsplit(base)
    assert parts.hostname
    assert parts.port
    link = socket.create_connection((parts.hostname, parts.port), timeout=10)
    link.sendall(data)
    return link


def head(length: int | str, path: str = "/tokenize", extra: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{extra}\r\n"
    ).encode()


def read_all(link: socket.socket) -> bytes:
    data = b""
    while piece := link.recv(65536):
        data += piece
    return data
