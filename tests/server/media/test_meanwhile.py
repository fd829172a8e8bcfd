"""What happens while a request's picture is fetched: its client leaves, the engine dies, the server stops."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from snugvl.server.app import create_app
from snugvl.server.context import Context
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService
from tests.server.live import Shared
from tests.server.media.pictures import encoded
from tests.server.media.test_let_go import BODIES


@dataclass
class Fetched:
    """The picture that a request waits for. `left`: whether nobody waits for it any more."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    come: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False

    async def bytes_of(self, *_: Any) -> bytes:
        self.begun.set()
        try:
            await self.come.wait()
        except asyncio.CancelledError:
            self.left = True
            raise
        return encoded("PNG", (40, 30))


Asked = Callable[[FakeService, Fetched, "asyncio.Task[httpx.Response]"], Awaitable[None]]


def meanwhile(path: str, work: Asked) -> None:
    """Do `work` while a request waits for its picture; then nothing of the request is left."""
    text = json.dumps(BODIES[path]).replace("URL", "https://a.example/b.png").replace("DATA", "aaaa")
    service, settings = FakeService(), ServerSettings(names=("fake",))

    async def asked() -> None:
        loader, fetched = Shared.from_settings(settings), Fetched()
        loader._bytes = fetched.bytes_of  # type: ignore[method-assign]
        app = create_app(Context(service, settings, loader))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            task = asyncio.create_task(http.post(path, json=json.loads(text), timeout=PATIENCE_S))
            await asyncio.wait_for(fetched.begun.wait(), PATIENCE_S)
            await work(service, fetched, task)
        assert (loader._encoded, loader._live.used, loader._at_work.used) == (0, 0, 0)
        assert not loader._live._demand
        assert not service.running
        await loader.close()

    asyncio.run(asked())


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_dies_meanwhile_is_told_with_when_to_come_back(path: str) -> None:
    async def dies(service: FakeService, fetched: Fetched, task: "asyncio.Task[httpx.Response]") -> None:
        dead = "the engine process died; it is starting again"
        service.health = replace(service.health, state="restarting", detail=dead, retry_after_s=7.0)
        fetched.come.set()
        answer = await task
        assert answer.status_code == 503, answer.text
        assert dead in answer.text
        assert answer.headers["retry-after"] == "7"
        assert not service.requests

    meanwhile(path, dies)


@pytest.mark.parametrize("path", BODIES)
def test_who_leaves_meanwhile_leaves_nothing(path: str) -> None:
    async def leaves(service: FakeService, fetched: Fetched, task: "asyncio.Task[httpx.Response]") -> None:
        task.cancel()
        await asyncio.wait([task])
        assert fetched.left
        assert not service.requests

    meanwhile(path, leaves)


def test_decoders_that_are_gone_meanwhile_are_the_servers_stop() -> None:
    """A server that stops at once closes them under the last requests."""

    async def work() -> None:
        loader, fetched = Shared(), Fetched()
        loader._bytes = fetched.bytes_of  # type: ignore[method-assign]
        app = create_app(Context(FakeService(), ServerSettings(names=("fake",)), loader))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            body = {"image": "https://a.example/b.png"}
            task = asyncio.create_task(http.post("/v1/vision/caption", json=body, timeout=PATIENCE_S))
            await asyncio.wait_for(fetched.begun.wait(), PATIENCE_S)
            await loader.close()
            fetched.come.set()
            answer = await task
        assert answer.status_code == 503, answer.text
        assert "the server is stopping" in answer.text
        assert loader._encoded == 0

    asyncio.run(work())
