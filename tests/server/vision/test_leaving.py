"""Clients that leave in the middle of an answer: the engine stops at once, whatever the protocol."""

from typing import Any

import httpx
import pytest

from tests.patience import until
from tests.server.fake import FakeService, Script
from tests.server.live import live

HI = [{"role": "user", "content": "Hi"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/vision/caption": {"stream": True},
    "/v1/vision/ask": {"stream": True, "question": "What is this?"},
    "/api/chat": {"model": "pocket", "messages": HI},
    "/api/generate": {"model": "pocket", "prompt": "Hi"},
    "/v1/messages": {"model": "pocket", "messages": HI, "max_tokens": 9, "stream": True},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_a_stream_frees_the_engine(path: str, data_url: str) -> None:
    body = {"image": data_url, **STREAMS[path]} if "vision" in path else STREAMS[path]
    service = FakeService(Script(["word "] * 100_000, wait_s=0.01))
    with live(service) as base:
        with httpx.stream("POST", base + path, json=body) as response:
            assert response.status_code == 200
            (stream,) = service.running
            pieces = response.iter_raw()  # dropping it would close the connection
            next(pieces)
            assert not stream.closed
        until(lambda: stream.closed)
