"""A fake engine in a real process, for tests of its supervisor."""

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine, Supervision
from snugvl.core.messages import Delta, Request, Stream, Text, user
from snugvl.core.sampling import SamplingParams
from tests.patience import NEVER_S

FOREVER = 100_000_000  # tokens: far more than come while a test waits
COMMAND = (sys.executable, str(Path(__file__).parent / "fake_child.py"))
QUICK = Supervision(ping_s=0.05, snapshot_s=0.02, backoff_s=0.05, watchdog_s=NEVER_S)


@asynccontextmanager
async def engine(model: str = "echo", supervision: Supervision = QUICK) -> AsyncIterator[SupervisedEngine]:
    service = SupervisedEngine(EngineChoice(model), supervision, COMMAND)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def say(text: str, tokens: int = 5) -> Request:
    return Request((user(Text(text)),), SamplingParams(max_tokens=tokens))


async def read(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]
