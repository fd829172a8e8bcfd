"""HTTP by hand, for clients that misbehave."""

import socket
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S


def connect(base: str, data: bytes = b"") -> socket.socket:
    parts = urlsplit(base)
    assert parts.hostname
    assert parts.port
    link = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)
    link.sendall(data)
    return link


def head(length: int | str, path: str = "/tokenize", extra: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{extra}\r\n"
    ).encode()


def read_to(link: socket.socket, end: bytes) -> bytes:
    """What comes until something ends so, which may take several pieces, or the connection does."""
    data = b""
    while not data.endswith(end) and (piece := link.recv(65536)):
        data += piece
    return data


def answered(base: str, data: bytes) -> bytes:
    """All that comes back from a server that gives a head little time; once more where we were slower."""
    while True:
        with connect(base, data) as link:
            if answer := read_all(link):
                return answer


def read_all(link: socket.socket) -> bytes:
    data = b""
    while piece := link.recv(65536):
        data += piece
    return data
