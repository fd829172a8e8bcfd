"""Servers to talk to: pocket, a scripted engine, and answers byte by byte."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Request
from snugvl.core.service import Load, Snapshot
from tests.patience import PATIENCE_S
from tests.server.conftest import data_url, picture, pocket, url  # noqa: F401
from tests.server.fake import FakeService, FakeStream
from tests.server.live import live
from tests.tasks.fake import FakeBackend

GIB = 1 << 30
LEDGER = Ledger(
    "NVIDIA GeForce RTX 5060",
    (
        LedgerRow("text weights", 4 * GIB, 4 * GIB, kind=Kind.TEXT),
        LedgerRow("vision weights", GIB, GIB, kind=Kind.VISION),
        LedgerRow("KV cache", GIB, GIB, GIB // 4, kind=Kind.CACHE),
        LedgerRow("workspace", GIB // 2, GIB // 4, kind=Kind.WORKSPACE),
    ),
    total_bytes=8 * GIB,
    free_bytes=GIB // 4 * 3,
    process_bytes=GIB // 4 * 25,
    cap_bytes=7 * GIB,
)


class ScriptedEngine(FakeService):
    """A service over a scripted backend. `load` and `delay` (seconds a word) can be set."""

    def __init__(self, backend: FakeBackend | None = None) -> None:
        super().__init__()
        self.backend = backend or FakeBackend()
        self.capabilities = self.backend.capabilities
        self.load = Load(running=2, waiting=1, free_blocks=30, num_blocks=40, block_size=16)
        self.at = 1000.0
        self.delay = 0.0

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.at, LEDGER, self.load)

    async def submit(self, request: Request) -> FakeStream:
        return await asyncio.to_thread(self.backend.submit, request, lambda: self.delay)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def scripted(engine: ScriptedEngine) -> Iterator[str]:
    """The base URL of a real server over `engine`."""
    with live(engine) as base:
        yield base


@dataclass
class Asked:
    """A request that the raw server got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class RawServer:
    """Answers the first request with the first of `answers`, and so on; the last one stays."""

    url: str = ""
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)

    def says(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        """Add an answer. A length in the headers beyond the body's breaks it off."""
        kind = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        self.answers.append((status, kind | {k.replace("_", "-"): v for k, v in headers.items()}, body))


@pytest.fixture
def raw() -> Iterator[RawServer]:
    with listening() as server:
        yield server


@contextmanager
def listening(port: int = 0) -> Iterator[RawServer]:
    """A raw server on a port."""
    server = RawServer()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.asked.append(Asked(self.command, self.path, dict(self.headers), body))
            if not server.answers:
                server.held.set()
                server.hold.wait(PATIENCE_S)
                return
            status, headers, answer = server.answers[0]
            if len(server.answers) > 1:
                server.answers.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = _answer  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Silent."""

    listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.hold.set()
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def unused_url() -> str:
    """An address where nobody listens."""
    from snugvl.bench.measure import free_port  # which imports the SDK of OpenAI

    return f"http://127.0.0.1:{free_port()}"
