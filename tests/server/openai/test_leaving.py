"""A client that leaves gives its requests back to the engine; a document that describes what is served."""

import asyncio
from typing import Any

import httpx
import pytest

from snugvl.server.settings import ServerSettings
from tests.patience import until
from tests.server.fake import FakeService, Script
from tests.server.live import live
from tests.server.openai.test_chat import HI

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/responses", {"input": "hi"}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_leaving_ends_the_request(path: str, body: dict[str, Any], stream: bool) -> None:
    service = FakeService(script=Script(words=("a",) * 10_000, wait_s=3600))
    with live(service, ServerSettings()) as base:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=base) as client:
                asking = asyncio.ensure_future(client.post(path, json={**body, "stream": stream}))
                while len(service.running) < len(service.requests) or not service.requests:
                    await asyncio.sleep(0.01)
                asking.cancel()

        asyncio.run(leave())
        until(lambda: not service.running)


def test_the_document_is_complete(url: str) -> None:
    document = httpx.get(url + "/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        operation = document["paths"][path]["post"]
        assert {"200", "400", "401", "404", "413", "429", "500", "503", "504"} <= set(operation["responses"])
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "application/json" in operation["requestBody"]["content"]
    assert (
        "multipart/form-data" in document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    )
