"""Hostile HTTP over every protocol, each with its exact answer, and a server that lives on.

(Values inside of JSON: `test_hostile_values.py`; pictures and URLs: `media/test_corpus.py`.)
"""

import hmac
import re
from collections.abc import Iterator

import httpx
import pytest

from snugvl.server.settings import ServerSettings
from tests.server.fake import FakeService
from tests.server.hostile import (
    CHAT,
    COMPLETIONS,
    EVERY,
    JSON,
    MESSAGES,
    MIB,
    RESPONSES,
    attacked,
    of,
    said,
)
from tests.server.live import live
from tests.server.raw import answered, connect, read_all


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    with attacked() as base:
        yield base


@pytest.fixture(scope="module")
def http(hostile: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hostile) as client:
        yield client


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


BODIES = {  # not JSON that we take, whatever the route
    "200 lists": ('{"model": ' + nested(200) + "}", "deeper"),
    "100,000 lists": ('{"model": ' + nested(100_000) + "}", "deeper"),
    "500 objects": ('{"a":' * 500 + "1" + "}" * 500, "deeper"),
    "lists without end": ("[" * 50_000, "deeper"),
    "not UTF-8": (b'{"model": "\xff\xfe"}', "UTF-8"),
    "overlong UTF-8": (b'{"model": "\xc0\xaf"}', "UTF-8"),
    "UTF-16": ('{"model": "pocket"}'.encode("utf-16"), "UTF-8"),
    "an encoded surrogate": (b'{"model": "\xed\xa0\x80"}', "UTF-8"),
    "a lone surrogate": ('{"model": "\\ud800"}', "surrogate"),
    "a surrogate as a key": ('{"\\udc00": 1}', "surrogate"),
    "NaN": ('{"temperature": NaN}', "NaN"),
    "Infinity": ('{"temperature": Infinity}', "Infinity"),
    "-Infinity": ('{"temperature": -Infinity}', "Infinity"),
    "1e999": ('{"temperature": 1e999}', "finite"),
    "a number of 5,000 digits": ('{"seed": ' + "9" * 5000 + "}", "digits"),
    "a key twice": ('{"model": "a", "model": "b"}', "twice"),
    "a key twice inside": ('{"a": [{"b": 1, "b": 1}]}', "twice"),
    "half of it": ('{"messages": [', "JSON"),
    "two values": ("{} {}", "JSON"),
    "single quotes": ("{'model': 'pocket'}", "JSON"),
    "a comment": ('{"model": "pocket" /* a */}', "JSON"),
    "a zero byte": (b'{"model": "a\x00b"}', "JSON"),
    "400,000 values": ("[" + "0," * 400_000 + "0]", "values"),
}


@pytest.mark.parametrize(("body", "words"), BODIES.values(), ids=list(BODIES))
def test_what_is_no_json(http: httpx.Client, body: str | bytes, words: str) -> None:
    for path in EVERY:
        answer = http.post(path, content=body, headers=JSON)
        assert answer.status_code == 400, (path, answer.text)
        assert said(answer).find(of(path, "invalid_json", words)) >= 0, (path, answer.text)
        assert words in answer.text, path


TYPES = {
    "a list": b"[]",
    "a string": b'"hi"',
    "a number": b"7",
    "null": b"null",
    "true": b"true",
}


@pytest.mark.parametrize("body", TYPES.values(), ids=list(TYPES))
def test_json_that_is_no_object(http: httpx.Client, body: bytes) -> None:
    for path in EVERY:
        answer = http.post(path, content=body, headers=JSON)
        assert answer.status_code == 400, (path, answer.text)


def test_a_field_of_ten_megabytes(http: httpx.Client) -> None:
    body = b'{"model": "' + b"a" * (10 * MIB) + b'"}'
    for path in EVERY:
        answer = http.post(path, content=body, headers=JSON)
        assert answer.status_code == 413, path
        assert f"{4 * MIB:,}" in answer.text, path


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "image/png", "a/b/c", "\\"]
)
def test_a_foreign_type_of_content(http: httpx.Client, kind: str) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        answer = http.post(path, content=b'{"messages": []}', headers={"Content-Type": kind})
        assert answer.status_code == 400, (path, answer.text)
        assert "Content-Type: application/json" in answer.text, path


LINES = "Host: localhost\r\nConnection: close\r\n"
RAW = {
    "no request": (b"\x00\x01\x02\r\n\r\n", 400),
    "a TLS client": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200, 400),
    "an odd version": (b"GET /health HTTP/9.9\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", 403),
    "a foreign host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 403),
    "a host that begins like ours": (
        b"GET /health HTTP/1.1\r\nHost: localhost.evil.example\r\nConnection: close\r\n\r\n", 403),
    "a host with a user": (
        b"GET /health HTTP/1.1\r\nHost: localhost@evil.example\r\nConnection: close\r\n\r\n", 403),
    "a whole URL": (
        b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 403),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", 200),
    "two lengths": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}".encode(), 400),
    "the same length twice": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Length: 2\r\nContent-Length: 2\r\n\r\n{{}}".encode(), 400),
    "chunked twice": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"
        "0\r\n\r\n".encode(), 400),
    "two hosts": (f"GET /health HTTP/1.1\r\n{LINES}Host: evil.example\r\n\r\n".encode(), 400),
    "the same host twice": (f"GET /health HTTP/1.1\r\n{LINES}Host: localhost\r\n\r\n".encode(), 400),
    "two origins": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Origin: http://localhost\r\nOrigin: http://evil.example\r\n"
        "Content-Length: 2\r\n\r\n{}".encode(), 400),
    "two types of content": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Type: application/json\r\nContent-Type: text/plain\r\n"
        "Content-Length: 2\r\n\r\n{}".encode(), 400),
    "a negative length": (f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Length: -1\r\n\r\n".encode(), 400),
    "a length of letters": (f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Length: abc\r\n\r\n".encode(), 400),
    "a length of 2^70": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Length: {2**70}\r\n\r\n".encode(), 400),
    "a length and chunks": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
        "0\r\n\r\n".encode(), 400),
    "a chunk of a negative size": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n".encode(), 400),
    "chunks without end": (
        f"POST {CHAT} HTTP/1.1\r\n{LINES}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        "1\r\n{\r\n".encode(), 408),
    "a head without end": (b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 200_000, 431),
    "500 header lines": (
        b"GET /health HTTP/1.1\r\n" + LINES.encode()
        + b"".join(b"X-%d: a\r\n" % i for i in range(500)) + b"\r\n", 431),
    "a header line without a name": (
        f"GET /health HTTP/1.1\r\n{LINES}: a\r\n\r\n".encode(), 400),
    "a path with spaces": (b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a method of our own": (b"STEAL / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "CONNECT": (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400),
    "TRACE": (b"TRACE /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
}  # fmt: skip


@pytest.mark.parametrize(("data", "status"), RAW.values(), ids=list(RAW))
def test_http_by_hand(hostile: str, data: bytes, status: int) -> None:
    if status == 408:
        with attacked(read_timeout_s=0.5) as base:
            answer = answered(base, data)
    else:
        with connect(hostile, data) as link:
            answer = read_all(link)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:300]


def test_pipelined_requests_are_answered_in_order(hostile: str) -> None:
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(hostile, one * 5 + last) as link:
        answer = read_all(link)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200"] * 5 + [b"404"]


def test_what_comes_after_a_body_is_no_part_of_it(hostile: str) -> None:
    body = b'{"prompt": "a"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(hostile, head + b"Content-Length: %d\r\n\r\n" % len(body) + body + smuggled) as link:
        answer = read_all(link)
    assert b'"count":1' in answer.replace(b" ", b"")
    assert b"404 Not Found" in answer, "what follows is a request of its own"


@pytest.mark.parametrize(
    "path",
    [
        "/page/../../../../etc/passwd", "/page/%2e%2e/%2e%2e/etc/passwd", "/page/..%2f..%2fetc%2fpasswd",
        "/page/....//....//etc/passwd", "/page//etc/passwd", "/page/%00", "/page/app.js%00.html",
        "/v1/models/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page/..\\..\\etc\\passwd",
        "/v1/models/%ff%fe", "/" + "a/" * 5000, "//evil.example/", "/.git/config", "/.env",
    ],
)  # fmt: skip
def test_paths_that_lead_out(hostile: str, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("latin-1")
    with connect(hostile, request) as link:
        answer = read_all(link)
    assert answer.startswith(b"HTTP/1.1 404"), answer[:300]
    assert b"root:" not in answer


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
def test_other_methods(http: httpx.Client, method: str) -> None:
    for path in EVERY:
        answer = http.request(method, path)
        assert answer.status_code == 405, path
        assert answer.headers["allow"] == "POST", path


ORIGINS = [
    "http://evil.example",
    "null",
    "https://localhost",
    "http://localhost.evil.example",
    "file://",
    "\\",
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_pages_of_others(http: httpx.Client, origin: str) -> None:
    for path in EVERY:
        answer = http.post(path, json={}, headers={"Origin": origin})
        assert answer.status_code == 403, path
        assert "access-control-allow-origin" not in answer.headers, path


def test_a_preflight_gets_no_leave(hostile: str) -> None:
    asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(hostile + CHAT, headers=asks)
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


KEYS = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer secret wrong"},
    {"Authorization": "Basic c2VjcmV0"},
    {"Authorization": "Bearer SECRET"},
    {"Authorization": "Bearer secret\u00e9"},
    {"Authorization": "Bearer " + "s" * 60_000},
    {"x-api-key": ""},
    {"x-api-key": "secre"},
    {"x-api-key": "secret,secret"},
    {"Cookie": "api_key=secret"},
    {"Authorization": "Bearer wrong", "x-api-key": "secret"},
]


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with live(FakeService(), ServerSettings(api_keys=("secret",))) as base:
        yield base


@pytest.mark.parametrize("headers", KEYS, ids=range(len(KEYS)))
def test_keys_that_open_nothing(locked: str, headers: dict[str, str]) -> None:
    sent = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    for path in EVERY:
        answer = httpx.post(locked + path, json={}, headers=sent)
        assert answer.status_code == 401, (path, answer.text)
        assert "secret" not in answer.text, path
        assert said(answer) in ("invalid_api_key", "authentication_error") or path.startswith("/api/")
    assert httpx.get(f"{locked}/v1/models?api_key=secret", headers=sent).status_code == 401


def test_several_keys_in_one_request(locked: str) -> None:
    many = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer secret")]
    for headers in (many, many[::-1], [("x-api-key", "secret")] * 2):
        answer = httpx.get(f"{locked}/version", headers=headers)
        assert answer.status_code == 400
        assert "stands in the request 2 times; send one" in answer.json()["error"]["message"]


def test_keys_are_compared_in_constant_time(locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in ("s", "secre", "wrong", "secret"):
        httpx.get(f"{locked}/version", headers={"x-api-key": key})
    assert compared == [(32, 32)] * 4, "digests of one length, whatever was sent"
