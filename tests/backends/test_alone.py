"""A child engine's service in a thread: whatever stops its loop, nobody who asks waits for ever."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from snugvl.backends.child.alone import ChildBackend
from snugvl.core.messages import Capabilities, Delta, Request, user
from snugvl.core.service import Health


class Answer:
    prompt_tokens = 1

    async def __aiter__(self) -> AsyncIterator[Delta]:
        yield Delta("hello")

    def close(self) -> None:
        """It has nothing."""


class Service:
    capabilities = Capabilities("fake", 100, True, True, 100, 10)
    health = Health("ready", "ready")

    async def start(self) -> None:
        """It is ready."""

    async def submit(self, request: Request) -> Any:
        return Answer()

    async def close(self) -> None:
        """It has nothing."""


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_loop_that_is_stopped_goes_on(error: type[BaseException]) -> None:
    def stop() -> None:
        raise error

    backend = ChildBackend(lambda: cast(Any, Service()))
    backend._loop.call_soon_threadsafe(stop)
    stream = backend.submit(Request((user("hello"),)))
    assert [delta.text for delta in stream] == ["hello"]
    backend.close()
    assert not backend._thread.is_alive()
