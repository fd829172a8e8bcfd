"""Signals: the first finishes what runs, the second stops at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest

from snugvl.core.service import Health
from snugvl.errors import CheckpointError, EngineError, SnugvlError
from snugvl.server import run as run_module
from snugvl.server.connection import LEAST_FILES, PortTaken, address_of, listen
from snugvl.server.run import run
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService
from tests.server.raw import connect, head, read_all

STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@contextmanager
def served(wait_s: float, drain_s: float) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A running server and its base URL."""
    command = [sys.executable, "-m", "tests.server.serving", str(wait_s), str(drain_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            base = f"http://127.0.0.1:{process.stdout.readline().strip()}"
            assert httpx.get(base + "/health", timeout=PATIENCE_S).is_success  # waits in the socket's queue
            yield process, base
        finally:
            process.kill()


@contextmanager
def chat(base: str) -> Iterator[httpx.Response]:
    """A stream that has begun; its first line comes with the first piece."""
    with httpx.stream("POST", base + "/v1/chat/completions", json=STREAM, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        yield answer


def test_a_decoder_is_there_before_the_first_picture() -> None:
    with served(wait_s=0.0, drain_s=1) as (process, _):
        until(lambda: bool(psutil.Process(process.pid).children()))


@pytest.mark.parametrize(
    ("left", "could"),
    [
        ((), ""),
        (
            ("run programs", "signal them"),
            "one that a picture has taken over could run programs, signal them",
        ),
    ],
)
def test_the_decoder_is_started_while_the_engine_loads(
    left: tuple[str, ...], could: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And what is left to it, where the system doesn't confine it, is said."""
    warmed = asyncio.Event()

    class MediaLoader:
        async def warm(self) -> tuple[str, ...]:
            warmed.set()
            return left

    async def test() -> None:
        service = FakeService(health=Health("starting", "starting torch", 0.0))
        context: Any = SimpleNamespace(service=service, media=MediaLoader())
        warmer = asyncio.ensure_future(run_module._warm(context))
        await asyncio.sleep(3 * run_module.POLL_S)
        assert not warmed.is_set()  # torch is being imported
        service.health = Health("starting", "reading headers", 0.03)
        await asyncio.wait_for(warmer, PATIENCE_S)
        assert warmed.is_set()

    asyncio.run(test())
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"no seccomp filter confines decoders here: {could}"] * bool(left)


def test_a_server_hides_its_memory_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(run_module, "hide", lambda: done.append("hidden"))
    monkeypatch.setattr("uvloop.run", lambda serving: (serving.close(), done.append("run")))
    service: Any = FakeService()
    run_module.run(service, ServerSettings(), cast(Any, None), lambda _: None)
    assert done == ["hidden", "run"]


def test_what_runs_is_finished_and_what_is_new_refused() -> None:
    """At SIGTERM; that SIGINT drains too, the test of a second one shows."""
    with served(wait_s=3600, drain_s=3600) as (process, base), chat(base) as running:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        while process.stdout.readline().strip() != "draining":
            pass
        refused = httpx.post(base + "/v1/chat/completions", json=STREAM)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert httpx.get(base + "/health").status_code == 503
        assert httpx.get(base + "/health/live").status_code == 200
        process.send_signal(signal.SIGUSR1)  # and on
        assert "data: [DONE]" in list(running.iter_lines())
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/v1/chat/completions", {}, b'"code":"engine_unavailable"'),
        (
            "/v1/responses",
            {"input": "hi"},
            b'"code":"server_error"',
        ),  # the one word of OpenAI's list that fits
        ("/v1/messages", {"model": "pocket", "max_tokens": 9}, b'"type":"overloaded_error"'),
        ("/api/chat", {"model": "pocket"}, b'{"error":"the server has shut down"}'),
    ],
)
def test_a_second_signal_stops_at_once(path: str, fields: dict[str, Any], told: bytes) -> None:
    """What runs ends with an error that is no failure of the engine."""
    asked = {**STREAM, **fields}
    with served(wait_s=3600, drain_s=3600) as (process, base):
        body = json.dumps({k: asked[k] for k in asked if path != "/v1/responses" or k != "messages"}).encode()
        with connect(base, head(len(body), path) + body) as link:
            assert link.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            while process.stdout.readline().strip() != "draining":
                pass
            process.send_signal(signal.SIGINT)
            answer = read_all(link)
            assert told in answer
            assert b"the server has shut down" in answer
            assert process.wait(PATIENCE_S) == 130


def test_a_drain_ends_when_its_time_is_over() -> None:
    with served(wait_s=3600, drain_s=0.2) as (process, base):
        body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
        with connect(base, head(len(body), "/v1/chat/completions") + body) as link:
            assert link.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            assert b"shut down" in read_all(link)
        assert process.wait(PATIENCE_S) == 0


def test_an_engine_that_never_loads_ends_the_server_with_its_error() -> None:
    class Broken(FakeService):
        failure = None

    settings = ServerSettings(port=0)
    service = Broken(health=Health("failed", "no weights"), capabilities=None)
    with listen(settings) as listener, pytest.raises(EngineError, match="no weights"):
        run(service, settings, listener, lambda health: None)
    assert service.closed
    service.failure = CheckpointError("model.safetensors is truncated")  # type: ignore[assignment]
    with listen(settings) as listener, pytest.raises(CheckpointError, match="truncated"):
        run(service, settings, listener, lambda health: None)


def test_told_to_stop_before_anybody_saw_it_ready() -> None:
    """The engine goes from loading to closed between two looks at it: that is no failure to load."""

    class Stopped(FakeService):
        async def start(self) -> None:
            self.task = asyncio.ensure_future(self._signal())

        async def _signal(self) -> None:
            before = signal.getsignal(signal.SIGTERM)
            while signal.getsignal(signal.SIGTERM) is before:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        async def drain(self, timeout_s: float) -> bool:
            self.health = Health("failed", "the server has shut down")
            await asyncio.sleep(0.2)  # long enough for it to be seen
            return True

    settings = ServerSettings(port=0)
    service = Stopped(health=Health("starting", "loading"), capabilities=None)
    with listen(settings) as listener:
        assert run(service, settings, listener, lambda health: None) == 0


def test_a_port_that_is_taken() -> None:
    with listen(ServerSettings(port=0)) as first:
        port = address_of(first)[1]
        with pytest.raises(PortTaken, match=f"--port {port + 1}"):
            listen(ServerSettings(port=port))


@pytest.mark.parametrize("most", [8, LEAST_FILES - 1, LEAST_FILES, -1])
def test_too_few_open_files(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 12 asyncio failed at its start, with tracebacks; with 8 libuv aborted the process."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (most, most))
    if 0 <= most < LEAST_FILES:
        with pytest.raises(SnugvlError, match=f"open {most} files; a server needs 64.*ulimit -n"):
            listen(ServerSettings(port=0))
    else:
        listen(ServerSettings(port=0)).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(Exception, match=host.replace(".", r"\.")):
        listen(ServerSettings(host=host, port=0))


def test_draining_that_fails_ends_all_the_same() -> None:
    """Nobody waits for that task; the server went on for ever, and took no more signals but to be killed."""

    class Broken(FakeService):
        async def start(self) -> None:
            self.task = asyncio.ensure_future(self._signal())

        async def _signal(self) -> None:
            before = signal.getsignal(signal.SIGTERM)
            while signal.getsignal(signal.SIGTERM) is before:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        async def drain(self, timeout_s: float) -> bool:
            raise ZeroDivisionError("a bug")

    settings = ServerSettings(port=0)
    with listen(settings) as listener:
        assert run(Broken(), settings, listener, lambda health: None) == 0
