"""How much may come in, how fast, and what happens to a client that leaves or sleeps."""

import asyncio
import json
import math
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Send

from snugvl.core.messages import Text
from snugvl.server import receiving
from snugvl.server.access import Bucket
from snugvl.server.metrics import RequestRecord, begin_record
from snugvl.server.receiving import BodyBudget, Receiving, RequestBody
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService, Script
from tests.server.live import live
from tests.server.raw import answered, connect, head, read_all, read_to

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
FOREVER = Script(words=("never",), wait_s=math.inf)


def test_a_body_that_is_too_long_is_refused_with_the_numbers() -> None:
    with live(FakeService(), ServerSettings(max_body_bytes=1000)) as base:
        body = json.dumps({"prompt": "x" * 2000})
        answer = httpx.post(base + "/tokenize", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert error["code"] == "request_too_large"
        assert f"{len(body):,}" in error["message"]
        assert "1,000" in error["message"]
        assert httpx.post(base + "/api/chat", content=body).json().keys() == {"error"}


def test_the_rest_of_a_form_that_was_refused_is_not_waited_for() -> None:
    form = b"--b\r\nContent-Disposition: form-data\r\n\r\n"  # a part without a name
    start = (
        b"POST /v1/vision/detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    with live(FakeService()) as base, connect(base, start + form) as link:
        answer = read_all(link)  # which ends when the server ends the connection
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", "no-such-thing"])
def test_text_of_a_form_is_utf_8_whatever_it_is_called(charset: str) -> None:
    request = json.dumps({"messages": [{"role": "user", "content": "Größe?"}]}, ensure_ascii=False)
    form = f'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n{request}\r\n--b--\r\n'
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    service = FakeService()
    with live(service) as base:
        answer = httpx.post(base + "/v1/chat/completions", content=form.encode(), headers=headers)
    assert answer.status_code == 200, answer.text
    assert service.requests[0].messages[0].content == (Text("Größe?"),)


def test_a_body_without_a_length_is_counted_as_it_comes() -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    with live(FakeService(), ServerSettings(max_body_bytes=1000)) as base:
        for kind in ("application/json", "multipart/form-data; boundary=a"):
            try:
                answer = httpx.post(base + "/tokenize", content=pieces(), headers={"content-type": kind})
            except (httpx.ReadError, httpx.WriteError):
                continue  # dropped while it was still sending
            assert answer.status_code == 413 if kind == "application/json" else 400


def test_a_body_that_never_ends_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.server.app.LINGER_S", 0.1)
    with live(FakeService(), ServerSettings(read_timeout_s=0.2)) as base:
        answer = answered(base, head(100))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"too slowly" in answer
        assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/vision/caption"])
@pytest.mark.parametrize("wrong", [b"{bad", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff"])
def test_a_body_that_is_no_json_ends_no_connection(path: str, wrong: bytes) -> None:
    """It was read whole, so the next request follows it on the same connection."""
    asked = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with live(FakeService()) as base, connect(base, head(len(wrong), path) + wrong + asked) as link:
        answer = read_all(link)
    assert answer.count(b"HTTP/1.1 400") == answer.count(b"HTTP/1.1 200") == 1


def test_a_head_that_never_ends_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.server.connection.LINGER_S", 0.1)
    with live(FakeService(), ServerSettings(read_timeout_s=0.2)) as base:
        with connect(base) as link:
            assert read_all(link) == b"", "it may only have been opened ahead, as browsers do"
        with connect(base, b"POST /v1/messages HTTP/1.1\r\nHost: lo") as link:
            first, _, body = read_all(link).partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"connection: close" in first
        said = json.loads(body)
        assert said["error"]["message"] == "the head of the request came too slowly: 36 bytes in 0.2 s"
        assert said["type"] == "error", "in the form of the path's protocol"


def test_a_slow_head_behind_a_request_that_is_answered_takes_no_answer_from_it() -> None:
    """Its refusal would be read as the answer of the request before it."""
    body = b'{"model": "pocket", "messages": [{"role": "user", "content": "x"}]}'
    asked = head(len(body), "/v1/chat/completions") + body
    service = FakeService(Script(wait_s=math.inf))
    with live(service, ServerSettings(read_timeout_s=0.5)) as base, connect(base, asked) as link:
        until(lambda: bool(service.requests))
        link.sendall(b"GET /version HT")
        assert read_all(link) == b""


def test_a_connection_that_rests_between_requests_is_kept() -> None:
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with live(FakeService(), ServerSettings(read_timeout_s=0.1)) as base:
        while True:
            with connect(base, request) as link:
                if not (first := read_to(link, b"}")):
                    continue  # we were slower than that
                assert first.startswith(b"HTTP/1.1 200")
                time.sleep(0.3)
                link.sendall(request)
                assert read_to(link, b"}").startswith(b"HTTP/1.1 200")
                break


@pytest.mark.parametrize(
    "extra", ["".join(f"X-{i}: 1\r\n" for i in range(200)), f"X: {'y' * 3000}\r\n", f"X: {'y' * 300_000}\r\n"]
)
def test_long_heads_are_refused(extra: str) -> None:
    with live(FakeService(), ServerSettings(max_header_bytes=2000)) as base:
        with connect(base, head(2, extra=extra) + b"{}") as link:
            answer = read_all(link)
        assert answer.startswith(b"HTTP/1.1 431")
        assert b"headers_too_large" in answer


def test_an_endless_head_is_refused_before_it_ends() -> None:
    with live(FakeService(), ServerSettings(max_header_bytes=2000)) as base:
        with connect(base, b"GET / HTTP/1.1\r\nX: " + b"y" * 5000) as link:
            assert read_all(link).startswith(b"HTTP/1.1 431")
        assert httpx.get(base + "/version").is_success


def test_too_many_at_once() -> None:
    service = FakeService(script=FOREVER)
    with live(service, ServerSettings(max_concurrent=2)) as base, ExitStack() as open_streams:
        for _ in range(2):
            open_streams.enter_context(httpx.stream("POST", base + "/v1/chat/completions", json=STREAM))
        answer = httpx.post(base + "/v1/chat/completions", json=CHAT)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(base + "/health").is_success
        open_streams.close()
        until(lambda: not service.running)
        service.script = Script()
        until(lambda: httpx.post(base + "/v1/chat/completions", json=CHAT).is_success)


def test_all_keys_together_are_too_many_at_once() -> None:
    service = FakeService(script=FOREVER)
    settings = ServerSettings(api_keys=("one", "two", "three"), max_concurrent=2)
    with live(service, settings) as base, ExitStack() as open_streams:
        url, keys = base + "/v1/chat/completions", [{"x-api-key": key} for key in settings.api_keys]
        for key in keys[:2]:
            open_streams.enter_context(httpx.stream("POST", url, json=STREAM, headers=key))
        answer = open_streams.enter_context(httpx.stream("POST", url, json=STREAM, headers=keys[2]))
        assert answer.status_code == 429
        assert json.loads(answer.read())["error"]["code"] == "queue_full"


def test_one_key_does_not_take_the_place_of_another() -> None:
    service = FakeService(script=FOREVER)
    settings = ServerSettings(api_keys=("one", "two"), key_concurrent=1)
    one, two = {"x-api-key": "one"}, {"x-api-key": "two"}
    with live(service, settings) as base:
        url = base + "/v1/chat/completions"
        with httpx.stream("POST", url, json=STREAM, headers=one):
            refused = httpx.post(url, json=CHAT, headers=one)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            with httpx.stream("POST", url, json=STREAM, headers=two) as other:
                assert other.status_code == 200
        until(lambda: not service.running)


def test_requests_a_minute_of_each_key() -> None:
    settings = ServerSettings(api_keys=("one", "two"), key_requests_per_minute=2)
    with live(FakeService(), settings) as base:
        for key, statuses in (("one", [200, 200, 429]), ("two", [200])):
            for status in statuses:
                answer = httpx.post(base + "/tokenize", json={"prompt": "a"}, headers={"x-api-key": key})
                assert answer.status_code == status
                if status == 429:
                    assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert httpx.get(base + "/version", headers={"x-api-key": "one"}).is_success


def test_a_bucket_fills_up_evenly() -> None:
    bucket = Bucket(60, now=0.0)
    assert [bucket.take(0.0) for _ in range(60)] == [0.0] * 60
    assert bucket.take(0.0) == pytest.approx(1.0)
    assert bucket.take(0.5) == pytest.approx(0.5)
    assert bucket.take(1.0) == 0.0
    assert [bucket.take(1000.0) for _ in range(61)][-1] > 0  # never more than a minute's worth


@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_a_client_that_leaves_frees_its_place(body: dict[str, object]) -> None:
    service = FakeService(script=FOREVER)
    data = json.dumps(body).encode()
    with live(service) as base:
        link = connect(base, head(len(data), "/v1/chat/completions") + data)
        until(lambda: len(service.running) == 1)
        link.close()
        until(lambda: not service.running)
        until(lambda: b"snugvl_clients_left_total 1.0" in httpx.get(base + "/metrics").content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait_s", [0.0, 0.6])
def test_a_client_that_sends_no_more_gets_its_answer(stream: bool, wait_s: float) -> None:
    """As `nc -N` does, at once. What tells it from one that has left comes before the answer."""
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "pocket", "messages": messages, "stream": stream}).encode()
    asked = head(len(body), "/v1/chat/completions") + body
    with live(FakeService(Script(wait_s=wait_s))) as base, connect(base, asked[:-1]) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # its last byte and the end come together
        link.sendall(asked[-1:])
        link.shutdown(socket.SHUT_WR)
        answer = read_all(link)
    before, _, rest = answer.partition(b"HTTP/1.1 200 OK\r\n")
    assert before.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    assert b" there" in rest


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_client_that_sends_no_more_gets_the_rest_of_its_stream(path: str) -> None:
    """The stream has begun; what tells it from one that has left comes between two events."""
    messages = "input" if path == "/v1/responses" else "messages"
    asked = {"model": "pocket", messages: CHAT["messages"], "stream": True}
    data = json.dumps(asked | ({"max_tokens": 9} if path == "/v1/messages" else {})).encode()
    with live(FakeService(Script(("Hello", " there"), wait_s=0.8))) as base:
        whole = httpx.post(base + path, json=json.loads(data), timeout=PATIENCE_S).text
        with connect(base, head(len(data), path) + data) as link:
            before = link.recv(65536)
            link.shutdown(socket.SHUT_WR)
            answer = before + read_all(link)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n0\r\n\r\n")
    pieces = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    skipped = b" " if path == "/api/chat" else b":\n\n"
    assert skipped in pieces
    text = b"".join(piece for piece in pieces if piece != skipped).decode()
    assert len(text.splitlines()) == len(whole.splitlines())
    if path == "/api/chat":
        assert [json.loads(line) for line in b"".join(pieces).splitlines()]  # as clients read them


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_client_that_leaves_a_stream_in_which_nothing_comes(path: str) -> None:
    service = FakeService(script=FOREVER)
    data = json.dumps({"model": "pocket", **STREAM}).encode()
    with live(service) as base:
        link = connect(base, head(len(data), path) + data)
        link.recv(65536)
        link.close()
        until(lambda: not service.running)


def test_a_client_that_sends_no_more_and_has_sent_half_gets_nothing() -> None:
    with live(FakeService()) as base, connect(base, head(100, "/v1/chat/completions") + b"{") as link:
        link.shutdown(socket.SHUT_WR)
        assert read_all(link) == b""


def test_a_client_that_leaves_while_its_request_is_taken_in() -> None:
    service = FakeService(script=Script(words=("never",), wait_s=math.inf, submit_s=0.3))
    # Left while it is taken in or, on a machine that is slow, a little later: nothing runs in the end.
    data = json.dumps(CHAT).encode()
    with live(service) as base:
        link = connect(base, head(len(data), "/v1/chat/completions") + data)
        until(lambda: len(service.requests) == 1)
        link.close()
        until(lambda: b"snugvl_clients_left_total 1.0" in httpx.get(base + "/metrics").content)
        time.sleep(0.4)  # until the engine has taken it in
        until(lambda: not service.running)


def test_a_client_that_reads_nothing_is_dropped() -> None:
    words = ["x" * 60_000] * 2000
    service = FakeService(script=Script(words=words))
    data = json.dumps(STREAM).encode()
    with live(service, ServerSettings(write_timeout_s=0.3)) as base:
        with connect(base, head(len(data), "/v1/chat/completions") + data):
            until(lambda: len(service.requests) == 1)
            until(lambda: not service.running)
        assert httpx.get(base + "/health").is_success


def test_a_client_that_breaks_its_body_off_is_no_error() -> None:
    service = FakeService()
    with live(service) as base:
        connect(base, head(1000) + b"{").close()
        until(lambda: b'status="499"' in httpx.get(base + "/metrics").content)
        assert httpx.get(base + "/health").is_success
    assert not service.requests


def test_the_deadline_reaches_the_engine() -> None:
    service = FakeService()
    with live(service, ServerSettings(deadline_s=12.5)) as base:
        assert httpx.post(base + "/v1/chat/completions", json=CHAT).is_success
    left_s = service.requests[0].deadline_s
    assert left_s is not None
    assert 0 < left_s < 12.5, "what is left of it"


def test_what_a_request_has_taken_is_taken_off_its_deadline() -> None:
    middleware = Receiving(FakeService(), ServerSettings(deadline_s=600.0))  # type: ignore[arg-type]
    scope: dict[str, Any] = {"type": "http", "method": "POST"}
    begin_record(scope, RequestRecord("a", started=time.monotonic() - 500))
    left_s = middleware._remaining_s(scope)
    assert left_s is not None
    assert left_s <= 100
    assert middleware._remaining_s({**scope, "method": "GET"}) is None


def test_an_answer_that_has_begun_is_not_ended_by_the_deadline_of_its_beginning() -> None:
    sent: list[str] = []

    async def app(scope: object, receive: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.05)  # longer than there is
        await send({"type": "http.response.body", "body": b"all of it"})

    async def send(message: Message) -> None:
        sent.append(message["type"])

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/vision/ask", "headers": []}
        begin_record(scope, RequestRecord("a", started=time.monotonic() - 600))
        await Receiving(app, ServerSettings(deadline_s=600.0))(scope, receive, send)

    asyncio.run(answer())
    assert sent == ["http.response.start", "http.response.body"]


def _body(sent: int, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> RequestBody:
    """A body of which so many bytes came at the time 0, whose next piece comes when `clock` says."""
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": [
        (b"content-type", b"application/json"), (b"content-length", b"%d" % (sent + 2))]}  # fmt: skip
    pieces = [b" " * sent, b"{", b"}"]

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.01 if len(pieces) < 3 else 0)  # what is too late is ended here
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    monkeypatch.setattr(receiving, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return RequestBody(scope, receive, ServerSettings(read_timeout_s=30.0), BodyBudget(1 << 30))  # type: ignore[arg-type]


@pytest.mark.parametrize(("sent", "after_s", "refused"), [
    (10, 29.0, False), (10, 31.0, True),
    (16 << 20, 30.0 + 1023, False), (16 << 20, 30.0 + 1025, True),
])  # fmt: skip
def test_a_body_may_take_the_longer_the_more_of_it_came(
    sent: int, after_s: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 s, and one more for each 16 KiB that came."""
    clock = [0.0]
    body = _body(sent, clock, monkeypatch)

    async def read() -> None:
        await body.receive()
        clock[0] = after_s
        await body.receive()

    if not refused:
        asyncio.run(read())
        return
    with pytest.raises(HTTPException, match=f"the body came too slowly: {sent:,} bytes in"):
        asyncio.run(read())


def test_real_kv_blocks_come_back(pocket: object, url: str, data_url: str) -> None:
    def used() -> int:
        load = httpx.get(url + "/memory").json()["load"]
        return int(load["running"] + load["waiting"])

    text = [{"type": "text", "text": "Describe."}, {"type": "image_url", "image_url": {"url": data_url}}]
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, "ignore_eos": True}
    for stream in (True, False):
        data = json.dumps({**body, "stream": stream}).encode()
        link = connect(url, head(len(data), "/v1/chat/completions") + data)
        until(lambda: used() == 1)
        link.close()
        until(lambda: used() == 0)
