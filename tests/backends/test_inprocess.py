"""The engine in this process behind the server's interface."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from snugvl.backends.native.backend import NativeBackend
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineUnavailable, RequestError
from tests.backends.inprocess import InProcessEngine


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


ENDLESS = Request((user("a red circle"),), SamplingParams(max_tokens=500, ignore_eos=True))


def test_serves_and_measures(backend: NativeBackend) -> None:
    async def test() -> None:
        service = InProcessEngine(backend)
        await service.start()
        assert service.health.ready
        stream = await service.submit(ENDLESS)
        deltas = aiter(stream)
        await anext(deltas)
        ledger, load = service.snapshot.ledger, service.snapshot.load
        assert load.running == 1
        cache = ledger.row("KV cache")
        assert cache is not None
        assert cache.used_bytes
        assert cache.measured_bytes == backend.memory()["kv_cache"]
        weights = ledger.row("weights")
        assert weights is not None
        assert weights.measured_bytes == backend.memory()["weights"]
        assert 0 < ledger.process_bytes < ledger.total_bytes
        stream.close()
        tokens = await service.tokenize(Request(prompt="a red circle"))
        assert await service.detokenize(tokens.ids) == "a red circle"
        for unknown in (10**9, -1):
            with pytest.raises(RequestError, match=f"a token id must be .*, not {unknown}"):
                await service.detokenize((*tokens.ids, unknown))

    run(test())


def test_drains_and_closes(backend: NativeBackend) -> None:
    async def test() -> None:
        service = InProcessEngine(backend)
        stream = await service.submit(ENDLESS)
        assert not await service.drain(0.0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await service.submit(ENDLESS)
        stream.close()
        assert await service.drain(30)
        assert service.health.state == "draining"
        await service.close()
        await service.close()
        assert service.health.state == "failed"

    run(test())
