"""Bodies with `Content-Encoding`, and with a byte-order mark."""

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from snugvl.server.settings import ServerSettings
from tests.patience import until
from tests.server.fake import FakeService, Script
from tests.server.live import live

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with (
        live(FakeService(), ServerSettings(max_body_bytes=4 << 20)) as base,
        httpx.Client(base_url=base, headers=JSON, timeout=60) as client,
    ):
        yield client


def packed(client: httpx.Client, data: bytes, coding: str = "gzip") -> httpx.Response:
    return client.post(PATH, content=data, headers={"content-encoding": coding})


def test_gzip_is_read(http: httpx.Client) -> None:
    assert packed(http, gzip.compress(CHAT)).status_code == 200


@pytest.mark.parametrize("coding", ["x-gzip", "Deflate"])
def test_its_other_name_and_zlibs_own_form_are_read(http: httpx.Client, coding: str) -> None:
    compress = gzip.compress if coding == "x-gzip" else zlib.compress
    assert packed(http, compress(CHAT), coding).status_code == 200
    assert packed(http, CHAT, "identity").status_code == 200


@pytest.mark.parametrize("size", [5 << 20, 64 << 20])
def test_what_it_unpacks_to_is_bounded(http: httpx.Client, size: int) -> None:
    answer = packed(http, gzip.compress(b" " * size, 9))
    assert answer.status_code == 413
    assert "at most 4,194,304 are read" in answer.text


def test_what_is_unpacked_counts_among_all_bodies() -> None:
    """Each of these fits and is small as it comes; until an answer they hold more than bodies may."""
    message = {"role": "user", "content": "a" * (3 << 20)}
    body = gzip.compress(json.dumps({"messages": [message], "stream": True}).encode())
    service = FakeService(script=Script(wait_s=math.inf))
    with live(service, ServerSettings(max_body_bytes=4 << 20)) as base, ExitStack() as streams:
        headers = {**JSON, "content-encoding": "gzip"}
        statuses = [
            streams.enter_context(
                httpx.stream("POST", base + PATH, content=body, headers=headers)
            ).status_code
            for _ in range(3)
        ]
        assert statuses == [200, 200, 429]
        streams.close()
        service.script = Script()
        until(lambda: httpx.post(base + PATH, content=body, headers=headers).status_code == 200)


def test_gzip_in_several_parts_is_read(http: httpx.Client) -> None:
    parts = [CHAT[start : start + 7] for start in range(0, len(CHAT), 7)]
    assert packed(http, b"".join(map(gzip.compress, [b"", *parts, b""]))).status_code == 200
    assert packed(http, gzip.compress(b"", 9) * 999 + gzip.compress(CHAT)).status_code == 200


WHOLE = gzip.compress(CHAT)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (CHAT, "it isn't"),
        (b"\x1f\x8b", "it breaks off after 2 bytes"),
        (WHOLE[:-4], f"it breaks off after {len(WHOLE) - 4} bytes; send all of it"),
        (WHOLE + WHOLE[:-1], f"it breaks off after {2 * len(WHOLE) - 1} bytes"),
        (WHOLE + b"x" * 9, "it is damaged"),
        (WHOLE[:-8] + bytes(8), "it is damaged"),
        (WHOLE * 1001, "more than 1,000 of it stand one after the other"),
    ],
    ids=["json", "head", "broken off", "second broken off", "more", "sum", "many"],
)
def test_what_is_no_gzip_says_so(http: httpx.Client, data: bytes, why: str) -> None:
    answer = packed(http, data)
    assert answer.status_code == 400
    assert f"Content-Encoding says gzip, but {why}" in answer.json()["error"]["message"]


def test_deflate_is_one_part(http: httpx.Client) -> None:
    answer = packed(http, zlib.compress(CHAT) * 2, "deflate")
    assert answer.status_code == 400
    assert "says deflate, but more than 1 of it" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "zstd"])
def test_other_codings_are_refused_by_name(http: httpx.Client, coding: str) -> None:
    answer = packed(http, gzip.compress(CHAT), coding)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert f"Content-Encoding: {coding} isn't read here" in answer.json()["error"]["message"]


def test_a_byte_order_mark_is_left_out(http: httpx.Client) -> None:
    assert http.post(PATH, content=b"\xef\xbb\xbf" + CHAT).status_code == 200
