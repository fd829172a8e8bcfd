"""From start to end: loading, answers that nobody reads, draining, closing; and no process is left."""

import asyncio
from pathlib import Path

import psutil
import pytest

from snugvl.core.messages import Delta
from snugvl.core.service import EngineService
from snugvl.errors import EngineUnavailable
from tests.backends.contract.engines import CHILDREN, Running, closing_ends_every_answer, load_is, read, ready
from tests.backends.contract.requests import QUESTION, asked, picture, texts
from tests.patience import PATIENCE_S
from tests.patience import until_async as until

LONG = asked(max_tokens=600)
KEPT = asked(picture(), QUESTION, max_tokens=200)


@pytest.mark.parametrize("leave", ["close", "drop", "cancel"])
def test_an_answer_that_nobody_reads_ends(leave: str, running: Running) -> None:
    async def test() -> None:
        stream = await running.service.submit(LONG)
        reader = aiter(stream)
        assert isinstance(await anext(reader), Delta)
        match leave:
            case "close":
                stream.close()
                stream.close()
            case "drop":
                del stream, reader
            case "cancel":
                task = asyncio.ensure_future(read(stream))
                await asyncio.sleep(0.01)
                task.cancel()

    running.run(test())
    running.idle()
    assert running.text(asked(max_tokens=3))


def test_memory_is_told_and_counters_count(running: Running) -> None:
    before = running.service.snapshot
    assert before is not None
    running.text(asked(max_tokens=10))
    running.idle()

    async def counted() -> None:
        await until(lambda: tokens() >= before.load.generated_tokens + 10)

    def tokens() -> int:
        snapshot = running.service.snapshot
        return 0 if snapshot is None else snapshot.load.generated_tokens

    running.run(counted())
    ledger = before.ledger
    assert 0 < ledger.process_bytes < ledger.total_bytes
    assert any(row.measured_bytes for row in ledger.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHILDREN)
@pytest.mark.sample("native")
def test_a_life_from_loading_to_the_last_answer(name: str, checkpoint: Path, reference: Running) -> None:
    """One start for all of it: loading takes seconds."""
    child = CHILDREN[name](checkpoint)
    whole = [texts(reference.ask(request)) for request in (KEPT, asked())]
    pids: list[int] = []
    before = children()  # of tests that ran in this process

    async def test() -> None:
        await child.start()
        assert child.health.state == "starting"
        assert not child.health.ready
        with pytest.raises(EngineUnavailable) as early:
            await child.submit(asked())
        assert early.value.retry_after_s >= 1
        await ready(child)
        pids.extend(children() - before)
        assert child.capabilities is not None
        await until(lambda: load_is(child, 0))

        both = [await child.submit(KEPT), await child.submit(asked())]
        assert [texts(answer) for answer in await asyncio.gather(*map(read, both))] == whole

        abandoned = await child.submit(LONG)
        await anext(aiter(abandoned))
        await until(lambda: load_is(child, 1))
        abandoned.close()
        await until(lambda: load_is(child, 0))

        await drained(child)
        await closed(child)

    async def drained(service: EngineService) -> None:
        last = await service.submit(KEPT)
        waiting = asyncio.ensure_future(service.drain(PATIENCE_S))
        await until(lambda: service.health.state == "draining")
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await service.submit(asked())
        assert texts(await read(last)) == whole[0]
        assert await waiting

    async def closed(service: EngineService) -> None:
        await service.close()
        await service.close()
        with pytest.raises(EngineUnavailable):
            await service.submit(asked())

    asyncio.run(test())
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid) and pid in children()]


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.slow
def test_closing_ends_every_answer_with_an_error(checkpoint: Path) -> None:
    """Of our own engine; that of transformers where its child is killed, which has started twice already."""

    async def test() -> None:
        service = CHILDREN["native"](checkpoint)
        await service.start()
        await ready(service)
        await closing_ends_every_answer(service, LONG)

    asyncio.run(test())
