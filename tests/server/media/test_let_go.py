"""Pictures make room once the engine has them, however long the answer takes."""

import asyncio
import gc
import json
from typing import Any

import httpx
import pytest

from snugvl.core.messages import Picture, Request
from snugvl.server.app import create_app
from snugvl.server.context import Context
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService, FakeStream, Script
from tests.server.live import Shared

CHAT = {"type": "image_url", "image_url": {"url": "URL"}}
INPUT = {"type": "input_image", "image_url": "URL"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "DATA"}}
MESSAGES = {"model": "fake", "max_tokens": 9}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [CHAT]}]},
    "/v1/responses": {"input": [{"role": "user", "content": [INPUT]}]},
    "/v1/messages": {**MESSAGES, "messages": [{"role": "user", "content": [BLOCK]}]},
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "a", "images": ["DATA"]}]},
    "/api/generate": {"model": "fake", "prompt": "a", "images": ["DATA"]},
    "/v1/vision/caption": {"image": "URL"},
    "/v1/vision/ask": {"image": "URL", "question": "a"},
    "/v1/vision/scene": {"image": "URL"},
    "/v1/vision/detect": {"image": "URL", "objects": ["cat"]},
}


class Forgetful(FakeService):
    """As a true one, it keeps no pictures; `came`: how many there were."""

    came = 0

    async def submit(self, request: Request) -> FakeStream:
        self.came += sum(isinstance(part, Picture) for each in request.messages for part in each.content)
        stream = await super().submit(request)
        self.requests.clear()
        return stream


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.sample(*(f"{path}-False" for path in BODIES), "/v1/chat/completions-True", "/api/chat-True")
def test_a_picture_makes_room_while_its_answer_is_made(path: str, stream: bool, data_url: str) -> None:
    if stream and path in ("/v1/vision/scene", "/v1/vision/detect"):
        pytest.skip("has no stream")
    text = json.dumps({**BODIES[path], "stream": stream}).replace("URL", data_url)
    body = json.loads(text.replace("DATA", data_url.partition(",")[2]))
    if path in ("/v1/vision/scene", "/v1/vision/detect"):
        del body["stream"]
    service = Forgetful(Script(wait_s=PATIENCE_S))
    settings = ServerSettings(names=("fake",))

    async def work() -> None:
        intake = Shared.from_settings(settings)
        app = create_app(Context(service, settings, intake))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            asked = asyncio.create_task(http.post(path, json=body, timeout=PATIENCE_S))
            while not service.running:
                await asyncio.sleep(0.01)
                assert not asked.done(), asked.result().text
            for _ in range(50):
                await asyncio.sleep(0)
            gc.collect()
            assert service.came == 1
            assert intake._live.used == 0
            asked.cancel()
            await asyncio.wait([asked])
        await intake.close()

    asyncio.run(work())
