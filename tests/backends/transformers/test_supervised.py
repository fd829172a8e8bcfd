"""transformers in a supervised child: the same answers, and back by itself after it was killed."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from PIL import Image

from snugvl.backends.process.supervised import SupervisedEngine, Supervision
from snugvl.backends.process.wire import EngineChoice
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError
from tests.backends.contract.engines import closing_ends_every_answer
from tests.backends.transformers.conftest import Opened
from tests.backends.waiting import ready, until

# Starts that import transformers. In every suite such a child has a whole life (contract/test_life.py),
# and our own engine's is killed, comes back, and fails for good (process/test_supervised_pocket.py).
pytestmark = pytest.mark.extended
ASKED = Request(
    (user(Image.new("RGB", (64, 64), "red"), "What is this?"),),
    SamplingParams(max_tokens=16, ignore_eos=True),
)
LONG = Request((user("Hi"),), SamplingParams(max_tokens=900, ignore_eos=True))


def test_a_killed_child_comes_back_with_the_same_answers(qwen: Opened) -> None:
    expected = "".join(delta.text for delta in qwen.backend.submit(ASKED))
    choice = EngineChoice(
        str(qwen.folder), device="cpu", dtype="float32", context=1024, engine="transformers"
    )

    async def test() -> None:
        service = SupervisedEngine(choice, Supervision(ping_s=0.2, snapshot_s=0.05))
        await service.start()
        await ready(service)
        assert service.capabilities is not None
        assert service.capabilities.engine == "transformers"

        async def answer() -> str:
            return "".join([delta.text async for delta in await service.submit(ASKED)])

        assert await answer() == expected
        running = aiter(await service.submit(LONG))
        await anext(running)
        first = service.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineError):
            async for _ in running:
                pass
        await until(service, lambda: service.health.ready and service.pid not in (None, first))
        assert service.health.restarts == 1
        assert await answer() == expected
        snapshot = service.snapshot
        assert snapshot is not None
        assert {"weights", "KV cache"} <= {row.name for row in snapshot.ledger.rows}
        second = service.pid
        assert second is not None
        # And its end, as the contract has it for our own engine: this child is there already.
        await closing_ends_every_answer(service, LONG)
        assert not psutil.pid_exists(second)

    asyncio.run(test())


def test_what_can_not_be_loaded_is_said_and_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "martian"}')

    async def test() -> None:
        service = SupervisedEngine(EngineChoice(str(tmp_path), device="cpu", engine="transformers"))
        await service.start()
        await until(service, lambda: service.health.state != "starting")
        assert service.health.state == "failed"
        assert "'martian'" in service.health.detail
        await service.close()

    asyncio.run(test())
