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


@pytest.mark.parametrize(
    "data", [CHAT, gzip.compress(CHAT)[:-4], gzip.compress(CHAT) + b"x", b"\x1f\x8b"], ids=range(4)
)
def test_what_is_no_gzip_says_so(http: httpx.Client, data: bytes) -> None:
    answer = packed(http, data)
    assert answer.status_code == 400
    assert "Content-Encoding says gzip, but it isn't, or breaks off" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "zstd"])
def test_other_codings_are_refused_by_name(http: httpx.Client, coding: str) -> None:
    answer = packed(http, gzip.compress(CHAT), coding)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert f"Content-Encoding: {coding} isn't read here" in answer.json()["error"]["message"]


def test_a_byte_order_mark_is_left_out(http: httpx.Client) -> None:
    assert http.post(PATH, content=b"\xef\xbb\xbf" + CHAT).status_code == 200
