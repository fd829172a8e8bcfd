"""What uvicorn's parser takes without giving it to the app, each with its end."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService
from tests.server.hostile import CHAT, HI, attacked
from tests.server.live import live
from tests.server.raw import connect, read_all

CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n".encode()
AS_JSON = b"Content-Type: application/json\r\n\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    with attacked(read_timeout_s=20) as base:
        yield base


def sent_until_refused(link: socket.socket, piece: bytes, limit: int) -> int:
    """Bytes that were taken before the server ended the connection."""
    sent = 0
    link.settimeout(5)
    with suppress(OSError):
        while sent < limit:
            link.sendall(piece)
            sent += len(piece)
            time.sleep(0.002)
    return sent


@pytest.mark.parametrize(
    ("before", "piece"),
    [(b"1\r\n \r\n0\r\n", b"a: b\r\n" * 1000), (b"1;", b"a" * 6000), (b"1\r\n \r\n0\r\nname: ", b"a" * 6000)],
    ids=["trailers", "an extension of a chunk", "one trailer"],
)
@pytest.mark.sample("trailers")
def test_what_no_app_sees_is_bounded(hostile: str, before: bytes, piece: bytes) -> None:
    with connect(hostile, CHUNKED + AS_JSON + before) as link:
        assert sent_until_refused(link, piece, 8_000_000) < 8_000_000


def test_trailers_are_refused_by_name_and_are_no_headers(hostile: str) -> None:
    with connect(hostile, CHUNKED + AS_JSON + b"1\r\n \r\n0\r\n" + b"a: b\r\n" * 12_000) as link:
        answer = read_all(link)
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"65,536" in answer
    few = CHUNKED + b"Connection: close\r\n" + AS_JSON + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 200 + b"\r\n"
    with connect(hostile, few) as link:
        assert b"messages is missing" in read_all(link), "they don't count as its header lines"


def test_a_body_in_small_chunks_is_read(hostile: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"a" * 150_000)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    answer = httpx.post(hostile + CHAT, content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_small_chunks_are_handed_on_together(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app's part of a body is copied with each that is handed on: 43,000 chunks came in one read."""
    handed: list[int] = []
    hand_on = HttpToolsProtocol.on_body

    def counted(self: HttpToolsProtocol, body: bytes) -> None:
        handed.append(len(body))
        hand_on(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"a" * 100_000)
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body)
    with connect(hostile, CHUNKED + b"Connection: close\r\n" + AS_JSON + chunks + b"0\r\n\r\n") as link:
        assert read_all(link).startswith(b"HTTP/1.1 200")
    assert sum(handed) == len(body)
    assert len(handed) < 1000


def test_many_pipelined_requests_are_answered_in_order(hostile: str) -> None:
    last = GET.replace(b"/version", b"/nowhere").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with connect(hostile, GET * 300 + last) as link:
        answer = read_all(link)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200"] * 300 + [b"404"]


def test_few_of_the_pipelined_wait_in_the_server_and_too_many_end_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, released, left = 0, threading.Event(), threading.Event()
    parsed = HttpToolsProtocol.on_message_complete

    def watched(self: HttpToolsProtocol) -> None:
        nonlocal most
        parsed(self)
        most = max(most, len(self.pipeline))

    monkeypatch.setattr(HttpToolsProtocol, "on_message_complete", watched)

    async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def, type-arg]
        if scope["type"] != "http":
            return
        while (await receive())["type"] != "http.disconnect":
            released.set()
        left.set()

    with live(None, ServerSettings(), app=app) as base:  # type: ignore[arg-type]
        with connect(base, GET * 1200) as link:
            assert released.wait(PATIENCE_S)
            until(lambda: most > 0)
            assert not left.wait(0.3), "what fits waits"
            with suppress(OSError):
                link.sendall(GET * 10_000)
            assert left.wait(PATIENCE_S), "and the request that ran is told that its client is gone"
        assert most < 100


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
BODY = json.dumps({"messages": HI}).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


@pytest.mark.parametrize(
    "request_parts",
    [
        [HEAD + H2C + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY],
        [HEAD[:20], HEAD[20:] + H2C[:50], H2C[50:] + b"Content-Length: %d\r\n\r\n" % len(BODY), BODY],
        [HEAD + H2C + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)],
    ],
    ids=["at once", "in pieces", "in chunks"],
)
def test_an_offer_of_http_2_is_answered_in_http_1(hostile: str, request_parts: list[bytes]) -> None:
    """Java's HttpClient makes it with the first request of a connection, whose body comes all the same."""
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with connect(hostile) as link:
        for part in request_parts:
            link.sendall(part)
            time.sleep(0.02)
        link.sendall(last)
        answer = read_all(link)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200"]
    assert b"chat.completion" in answer


def test_offers_behind_one_another_and_a_tunnel(hostile: str) -> None:
    offer = GET.replace(b"\r\n\r\n", b"\r\n" + H2C + b"\r\n")
    tunnel = b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n"
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    for requests, statuses in ((offer * 3 + last, [b"200"] * 4), (tunnel, [b"400"])):
        with connect(hostile, requests) as link:
            assert re.findall(rb"HTTP/1\.1 (\d+)", read_all(link)) == statuses


def test_one_connection_leaves_time_for_others(hostile: str) -> None:
    with connect(hostile, GET * 1400) as link:
        assert httpx.get(f"{hostile}/health").status_code == 200
        assert link.recv(1)
    assert httpx.post(hostile + CHAT, json={"messages": HI}).status_code == 200


FORMS = {
    "/v1/messages": lambda answer: answer["type"] == "error" and answer["error"]["type"] == ANTHROPIC,
    "/v1/messages/count_tokens": lambda answer: (
        "request_id" in answer and answer["error"]["type"] == ANTHROPIC
    ),
    "/api/chat": lambda answer: list(answer) == ["error"] and isinstance(answer["error"], str),
    "/v1/chat/completions": lambda answer: answer["error"]["code"] and answer["error"]["type"] == ANTHROPIC,
}
ANTHROPIC = "invalid_request_error"  # OpenAI's word, too
MALFORMED = {
    "a header without a colon": "POST {path} HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n",
    "no method": "P?ST {path} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no version": "POST {path}?beta=true HTTP/x\r\nHost: localhost\r\n\r\n",
    "a wrong length": "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    "a wrong chunk": "POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    "a long head": "POST {path} HTTP/1.1\r\nHost: localhost\r\na: " + "b" * 70_000 + "\r\n\r\n",
    "bad JSON": "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    "Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{{",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", FORMS)
@pytest.mark.sample(
    "/v1/messages-a header without a colon",
    "/v1/messages-no method",
    "/v1/messages-no version",
    "/v1/messages-a wrong length",
    "/v1/messages-a wrong chunk",
    "/v1/messages-a long head",
    "/v1/messages-bad JSON",
    "/v1/messages/count_tokens-a header without a colon",
    "/v1/messages/count_tokens-no method",
    "/v1/messages/count_tokens-no version",
    "/v1/messages/count_tokens-a wrong length",
    "/v1/messages/count_tokens-a wrong chunk",
    "/v1/messages/count_tokens-a long head",
    "/api/chat-a header without a colon",
    "/api/chat-no method",
    "/api/chat-no version",
    "/api/chat-a wrong length",
    "/api/chat-a wrong chunk",
    "/api/chat-a long head",
    "/v1/chat/completions-a header without a colon",
    "/v1/chat/completions-no method",
    "/v1/chat/completions-no version",
    "/v1/chat/completions-a wrong length",
    "/v1/chat/completions-a wrong chunk",
    "/v1/chat/completions-a long head",
)
def test_malformed_requests_are_refused_in_the_form_of_their_protocol(
    hostile: str, path: str, name: str
) -> None:
    with connect(hostile, MALFORMED[name].format(path=path).encode()) as link:
        answer = read_all(link)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert FORMS[path](json.loads(body)), body


def test_what_has_no_path_gets_the_general_form(hostile: str) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01", b"\r\n\r\nnonsense\r\n\r\n", b"GET \xff\xfe HTTP/1.1\r\n\r\n"):
        with connect(hostile, data) as link:
            _, _, body = read_all(link).partition(b"\r\n\r\n")
        assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_client_of_http_1_0_gets_no_chunks(path: str, stream: bool) -> None:
    """It would take their lengths for a part of the answer. Its stream ends with the connection."""
    body = json.dumps({"model": "pocket", "max_tokens": 9, "messages": HI, "stream": stream}).encode()
    if path == "/api/chat":
        body = json.dumps({"model": "pocket", "messages": HI, "stream": stream}).encode()
    request = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode()
    with live(FakeService()) as base, connect(base, request + AS_JSON + body) as link:
        head, _, answer = read_all(link).partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"transfer-encoding" not in head.lower()
    assert (b"content-length" in head.lower()) != stream
    assert b"connection: close" in head.lower()
    assert b"there" in answer
    lines = [line for line in answer.decode().splitlines() if line]
    assert all(line.startswith(("data: ", "event: ", "{")) for line in lines), "no lengths of chunks"


def test_what_follows_a_request_and_is_no_other_ends_both_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """As a body whose length nobody names does: what it is refused with is the last that can be written."""
    caplog.set_level("INFO", "snugvl")
    body = json.dumps({"model": "pocket", "messages": HI}).encode()
    for length in (b"", b"Content-Length: 0\r\n", b"Content-Length: %d\r\n" % (len(body) - 2)):
        with live(FakeService()) as base:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode() + length
            with connect(base, head + AS_JSON + body) as link:
                answer = read_all(link)
            until(lambda: any(record.name == "snugvl.access" for record in caplog.records))
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b'"invalid_http"' in answer
        assert not [record for record in caplog.records if record.exc_info], length
        caplog.clear()
