"""Nothing of a request outlives it, whatever its client did: no task, no file, no place in the building."""

import asyncio
import gc
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S, until
from tests.server.fake import FakeService, Script
from tests.server.live import live

CLIENTS = 200
ROUNDS = 5
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")


class Watched(FakeService):
    """Knows the event loop that it is started in."""

    loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()


def body(path: str, *, stream: bool) -> dict[str, object]:
    asked = {"input": "hi"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    limit = {"max_tokens": 9} if path == "/v1/messages" else {}
    return {"model": "pocket", "stream": stream, **asked, **limit}


async def visit(client: httpx.AsyncClient, dice: random.Random) -> str:
    """One client: reads to the end, leaves in the middle, leaves at once, or sends rubbish."""
    path, manner = dice.choice(PATHS), dice.choice(("read", "whole", "leave", "leave at once", "rubbish"))
    if manner == "rubbish":
        return str(
            (await client.post(path, content=b"{", headers={"Content-Type": "application/json"})).status_code
        )
    if manner == "whole":
        return str((await client.post(path, json=body(path, stream=False))).status_code)
    try:
        async with asyncio.timeout(0.02 if manner == "leave at once" else PATIENCE_S):
            async with client.stream("POST", path, json=body(path, stream=True)) as answer:
                async for _ in answer.aiter_bytes():
                    if manner == "leave":
                        break
    except TimeoutError:
        return "left"
    return str(answer.status_code)


async def crowd(base: str, seed: int) -> Counter[str]:
    dice = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_S, limits=limits) as client:
        return Counter(await asyncio.gather(*(visit(client, dice) for _ in range(CLIENTS))))


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.extended
def test_a_crowd_leaves_nothing_behind() -> None:
    service = Watched(Script(words=["word "] * 20, wait_s=0.002))
    with live(service, ServerSettings()) as base:
        asyncio.run(crowd(base, 0))
        until(lambda: not service.running)
        tasks, open_files = len(asyncio.all_tasks(service.loop)), files()
        statuses: Counter[str] = Counter()
        for seed in range(1, ROUNDS + 1):
            statuses += asyncio.run(crowd(base, seed))
        assert set(statuses) <= {"200", "400", "left"}, statuses
        assert min(statuses.values()) > CLIENTS / 10
        until(lambda: not service.running)
        until(lambda: len(asyncio.all_tasks(service.loop)) <= tasks)
        gc.collect()  # sockets of the clients above
        until(lambda: files() <= open_files)
        metrics = httpx.get(base + "/metrics").text
        assert "snugvl_requests_in_flight 1.0" in metrics  # this one
