"""A child server behind the protocol of engines in this process, for commands and `snugvl.load`.

Its service runs in an event loop of its own, in a thread.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, TypeVar

from snugvl.backends.child.service import ChildEngine
from snugvl.backends.mailbox import OneAnswer
from snugvl.core.messages import Capabilities, Delta, GoOn, Request, Stream, going_on
from snugvl.core.options import Progress
from snugvl.errors import EngineError

logger = logging.getLogger(__name__)

POLL_S: Final = 0.02

T = TypeVar("T")


class ChildBackend:
    """A server that is started, and ended with `close`."""

    def __init__(self, make: Callable[[], ChildEngine], progress: Progress | None = None) -> None:
        """Start it and wait until it serves. `make`: makes the service, in its loop; `progress`: as in
        `snugvl.load`.

        Raises:
            EngineError, DoesNotFit: it doesn't start.
        """
        self._loop = asyncio.new_event_loop()
        self._ended = self._closed = False
        self._thread = threading.Thread(target=self._serve, name="snugvl-child", daemon=True)
        self._thread.start()
        try:
            self._service = self._run(_started(make, progress))
        except BaseException:
            self._end()
            raise

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the loaded model."""
        assert self._service.capabilities is not None
        return self._service.capabilities

    def submit(self, request: Request, go_on: GoOn = going_on) -> Stream:
        """Start a request; see `Backend`."""
        if self._closed:
            raise EngineError("the engine has been closed")
        return _Stream(self._run(self._service.submit(request)), self._loop)

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        snapshot = self._service.snapshot
        rows = () if snapshot is None else snapshot.ledger.rows
        return {row.name: row.measured_bytes for row in rows if row.measured_bytes is not None}

    def close(self) -> None:
        """End the server and all that runs. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._run(self._service.close())
            self._end()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _serve(self) -> None:
        """Run the loop until it is to end: whatever stops it before, others wait for what it does."""
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException:
                logger.exception("the loop of the engine's service stopped, and goes on")

    def _end(self) -> None:
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _started(make: Callable[[], ChildEngine], progress: Progress | None) -> ChildEngine:
    service = make()
    await service.start()
    try:
        while not (health := service.health).ready:
            if health.state == "failed":
                raise service.failure or EngineError(health.detail)
            if progress is not None:
                progress(health.detail, health.progress or 0.0)
            await asyncio.sleep(POLL_S)
    except BaseException:
        await service.close()
        raise
    return service


class _Stream(OneAnswer):
    """A stream of the service's loop, for threads and for other loops."""

    def __init__(self, stream: Stream, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(stream.prompt_tokens, stream.close)
        self._loop = loop
        self._deltas = aiter(stream)

    def __iter__(self) -> Iterator[Delta]:
        while (delta := asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()) is not None:
            yield delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            waiting = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            if (delta := await asyncio.wrap_future(waiting)) is None:
                return
            yield delta

    async def _next(self) -> Delta | None:
        return await anext(self._deltas, None)
