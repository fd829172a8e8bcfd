"""A stand-in for the Hub on 127.0.0.1: enough of its API for listings, ranges, downloads and failures.

Weights are redirected to another host name ("localhost"), as the Hub does to its CDN.
"""

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)$")


@dataclass
class Seen:
    """One request. `sent`: bytes of its body that were sent."""

    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0


@dataclass
class FakeHub:
    """Repositories, faults, and what was asked.

    Attributes:
        repos: id → file name → content.
        fault: called with each request first; True means that it has answered.
        token: what private repositories want.
        cut: files of which only so many bytes are sent before the connection breaks, once each.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    fault: Callable[["Handler"], bool] | None = None
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    ignore_ranges: bool = False
    wrong_content: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    port: int = 0

    def add(self, repo: str, folder: Path) -> None:
        """All files of a folder."""
        self.repos[repo] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def bytes_of(self, ending: str) -> int:
        """Bytes sent of files with that ending."""
        return sum(seen.sent for seen in self.seen if seen.path.endswith(ending))


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub
    record: Seen

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.record = Seen(self.command, path, dict(self.headers.items()))
        self.hub.seen.append(self.record)
        if self.hub.fault is not None and self.hub.fault(self):
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[0] == "cdn":
            self._content("/".join(parts[1:3]), "/".join(parts[3:]))
        else:
            self.reply(404, b"{}")

    def _allowed(self, repo: str) -> bool:
        right = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repo not in self.hub.repos or (repo in self.hub.private and not right):
            self.reply(404 if right else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return False
        if repo in self.hub.gated and not right:
            self.reply(
                401 if "Authorization" not in self.headers else 403, b"{}", {"X-Error-Code": "GatedRepo"}
            )
            return False
        return True

    def _api(self, repo: str, rest: list[str]) -> None:
        if repo not in self.hub.gated and not self._allowed(repo):  # listings of gated models are public
            return
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.hub.repos[repo]
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _sha1(data)}
                | (
                    {"lfs": {"oid": _sha256(data), "size": len(data), "pointerSize": 134}}
                    if is_lfs(name)
                    else {}
                )
                for name, data in files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
            return
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _sha1(data)}
            | (
                {"lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 134}}
                if is_lfs(name)
                else {}
            )
            for name, data in files.items()
        ]
        info = {
            "_id": "1",
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": False,
            "siblings": siblings,
        }
        self.reply(200, json.dumps(info).encode())

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        if not self._allowed(repo):
            return
        data = self.hub.repos[repo].get(name)
        if data is None or revision not in ("main", COMMIT):
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha1(data)}"'}
        if is_lfs(name):
            headers |= {
                "X-Linked-Etag": f'"{_sha256(data)}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"http://localhost:{self.hub.port}/cdn/{repo}/{name}",
            }
            self.reply(302, b"", headers)
            return
        self._send(data, name, headers)

    def _content(self, repo: str, name: str) -> None:
        data = self.hub.wrong_content.get(name, self.hub.repos[repo][name])
        self._send(data, name, {})

    def _send(self, data: bytes, name: str, headers: dict[str, str]) -> None:
        span = _RANGE.match(self.headers.get("Range", ""))
        if span and not self.hub.ignore_ranges:
            first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
            if first >= len(data):
                self.reply(416, b"")
                return
            headers = headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            self.reply(206, data[first : last + 1], headers, cut=self.hub.cut.pop(name, None))
            return
        self.reply(200, data, headers, cut=self.hub.cut.pop(name, None))

    def reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: int | None = None
    ) -> None:
        """Send an answer; with `cut` break the connection after so many bytes of its body."""
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            for start in range(0, len(body[:cut]), 65536):
                piece = body[:cut][start : start + 65536]
                self.wfile.write(piece)
                self.record.sent += len(piece)
        except OSError:  # whoever asked has left, as it should
            self.close_connection = True
        if cut is not None:
            self.close_connection = True

    def drip(self, body: bytes, seconds: float) -> None:
        """Send a body evenly over a time."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        step = len(body) // 100
        try:
            for start in range(0, len(body), step):
                self.wfile.write(body[start : start + step])
                self.record.sent += step
                time.sleep(seconds / 100)
        except OSError:
            self.close_connection = True

    def trickle(self, seconds: float) -> None:
        """Announce much and send it slowly."""
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self.wfile.write(b" ")
                time.sleep(0.02)
        except OSError:
            pass
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        """Without Nagle's algorithm, which waits 40 ms for each piece of a large answer."""
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is part of the tests."""


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A running stand-in."""
    hub = FakeHub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.port = server.server_address[1]
    hub.url = f"http://127.0.0.1:{hub.port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha1(data: bytes) -> str:
    """git's name of a file's content, which the Hub gives as blobId and ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
