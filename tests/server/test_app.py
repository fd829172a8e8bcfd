"""The app as a whole: what every answer has, whoever gives it."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from snugvl.errors import DeadlineExceeded
from snugvl.server import streaming
from snugvl.server.app import create_app
from snugvl.server.context import Context, context_of
from snugvl.server.media.loading import MediaLoader
from snugvl.server.settings import ServerSettings
from snugvl.server.streaming import Event, event_stream, line_stream
from tests.server.fake import FakeService, Script
from tests.server.live import live
from tests.server.raw import connect, head, read_all

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_streams_are_not_held_up_on_the_way() -> None:
    with live(FakeService()) as base:
        answer = httpx.post(base + "/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    service = FakeService(script=Script(error=DeadlineExceeded("600 s are over")))
    with live(service) as base:
        text = httpx.post(base + "/v1/chat/completions", json={**CHAT, "stream": True}).text
    last = [line for line in text.splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["error"] == {
        "message": "600 s are over",
        "type": "server_error",
        "param": None,
        "code": "deadline_exceeded",
    }


def test_anthropics_errors_name_their_request_in_streams_too() -> None:
    service = FakeService(script=Script(error=DeadlineExceeded("600 s are over")))
    body = {**CHAT, "model": "fake", "max_tokens": 9}
    with live(service, ServerSettings(names=("fake",))) as base:
        refused = httpx.post(base + "/v1/messages", json={})
        broken = httpx.post(base + "/v1/messages", json={**body, "stream": True})
    assert refused.json()["request_id"] == refused.headers["request-id"]
    last = [line for line in broken.text.splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["request_id"] == broken.headers["request-id"]


def test_a_stream_in_which_nothing_happens_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    with live(FakeService(script=Script(wait_s=0.3))) as base:
        text = httpx.post(base + "/v1/chat/completions", json={**CHAT, "stream": True}).text
    assert ": keep-alive\n\n" in text
    assert text.endswith("data: [DONE]\n\n")


def test_nothing_of_a_stream_goes_on_when_it_has_ended() -> None:
    async def events() -> AsyncIterator[Event]:
        yield Event("1")

    async def left() -> set[asyncio.Task[Any]]:
        context: Any = SimpleNamespace(settings=ServerSettings())
        nobody: Any = None
        answer = event_stream(context, events())
        await answer({"type": "http"}, nobody, AsyncMock())
        await asyncio.sleep(0)  # the turn in which what was cancelled ends
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(left()) == set()


@pytest.mark.parametrize(
    ("path", "sse", "expected"),
    [
        ("/stream", True, 'data: 1\n\nevent: x\ndata: 2\n\ndata: {"error":{"message":"over","type":'),
        ("/v1/messages/stream", True, 'event: error\ndata: {"type":"error","error":{"type":"timeout_error"'),
        ("/api/stream", False, '1\n2\n{"error":"over"}\n'),
    ],
)
def test_streams_of_every_protocol(path: str, sse: bool, expected: str) -> None:
    closed = []

    async def events() -> object:
        try:
            yield Event("1")
            yield Event("2", "x" if sse else None)
            raise DeadlineExceeded("over")
        finally:
            closed.append(True)

    async def route(request: Request) -> Response:
        stream = event_stream if sse else line_stream
        return stream(context_of(request), events())  # type: ignore[arg-type]

    app = create_app(Context(FakeService(), ServerSettings(), MediaLoader()))
    app.router.add_route(path, route, methods=["GET"])
    with live(FakeService(), app=app) as base:
        assert expected in httpx.get(base + path).text
    assert closed


def test_the_engine_is_started_and_closed_with_the_app() -> None:
    service = FakeService()
    with live(service) as base:
        assert httpx.get(base + "/version").is_success
        assert not service.closed
    assert service.closed


def test_json_is_checked_before_any_route_sees_it() -> None:
    service = FakeService()
    with live(service) as base:
        for body in (b'{"messages": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"[" * 5000, b"{"):
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/vision/caption"):
                headers = {"content-type": "application/json"}
                answer = httpx.post(base + path, content=body, headers=headers)
                assert answer.status_code == 400, f"{path} {body[:20]!r}"
                assert "error" in answer.json()
    assert not service.requests


def test_ollamas_users_need_no_content_type() -> None:
    with live(FakeService()) as base:
        body = {"model": "pocket", "messages": [{"role": "user", "content": "hi"}], "stream": False}
        for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
            answer = httpx.post(
                base + "/api/chat", content=json.dumps(body), headers={"content-type": kind} if kind else {}
            )
            assert answer.status_code == 200, answer.text


def test_what_is_no_http_is_refused() -> None:
    with live(FakeService()) as base:
        for data in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"):
            with connect(base, data) as link:
                answer = read_all(link)
                assert answer.startswith(b"HTTP/1.1 400")
                assert (
                    json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
                )
        assert httpx.get(base + "/health").is_success


def test_two_requests_on_one_connection_at_once() -> None:
    with live(FakeService()) as base, connect(base) as link:
        body = b'{"prompt": "ab"}'
        link.sendall((head(len(body)) + body) * 2 + b"GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n")
        text = read_all(link)
        assert text.count(b"HTTP/1.1 200") == 3
        assert text.count(b'"count":2') == 2
