"""The supervisor of engines in other processes, ours and other programs': their lives, one after the other.

start ─► starting ─► ready ─ died ─► restarting ─► ready …        three deaths in a row: with pauses
              └─ a first start that must not be tried again ─► failed   `failure` says why

What a life is, an adapter says: of our own engine's process, over a socket, `process/supervised.py`; of a
server of another program, over HTTP, `child/service.py`. What both start as a process is in `spawned.py`.
"""

import asyncio
import errno
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from snugvl.core.messages import Capabilities
from snugvl.core.service import Health, Snapshot, State, Timeline
from snugvl.errors import EngineError, EngineUnavailable, SnugvlError

FIRST_LOAD_S = 10.0  # what loading may take, until it was seen once
GIVEN_UP_S = 60.0  # after which asking a server again that has failed for good
DRAIN_POLL_S = 0.05
CANCEL_S = 1.0  # until a cancellation that had no effect is repeated
SHUT_DOWN = "the server has shut down"
PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # a next start may have what it needs

logger = logging.getLogger("snugvl.engine")


@dataclass(frozen=True, slots=True)
class Supervision:
    """Settings of a child's supervision, in seconds.

    Attributes:
        watchdog_s: a step, or no answer at all, that lasts longer counts as a hang.
        ping_s: between two looks.
        snapshot_s: between two snapshots of memory and load.
        settle_s: a child that lived this long after it was ready doesn't count as crashing in a row.
        free_restarts: deaths in a row after which it starts again at once.
        backoff_s: the first pause, which doubles with every further death in a row.
        backoff_max_s: the longest pause.
    """

    watchdog_s: float = 120.0
    ping_s: float = 1.0
    snapshot_s: float = 0.5
    settle_s: float = 60.0
    free_restarts: int = 2
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0

    def pause_s(self, deaths: int) -> float:
        """Seconds to wait after `deaths` deaths in a row."""
        doublings = deaths - self.free_restarts - 1
        if doublings < 0:
            return 0.0
        return float(min(self.backoff_s * 2 ** min(doublings, 32), self.backoff_max_s))


class Lives:
    """The state of a child engine, over all of its lives. Belongs to one event loop.

    Attributes:
        state, detail, progress: as in `Health`.
        count: lives that became ready.
        deaths: number of deaths in a row.
        failure: why it doesn't run, once the state is "failed" for it.
    """

    def __init__(
        self,
        supervision: Supervision,
        detail: str,
        *,
        again: str = "it is starting again",
        after_pause: str = "it starts again",
    ) -> None:
        """`detail`: before the start; `again`: what comes after a death, `after_pause`: what comes later."""
        self._supervision = supervision
        self._again = again
        self._after_pause = after_pause
        self._task: asyncio.Task[None] | None = None
        self._load_s = FIRST_LOAD_S
        self._ready_by = 0.0  # monotonic seconds at which it should be ready
        self._began_at = self._ready_at = 0.0  # monotonic; of the present life; 0: not ready yet
        self._last_death = ""
        self.state: State = "starting"
        self.detail = detail
        self.progress: float | None = None
        self.count = 0
        self.deaths = 0
        self.failure: SnugvlError | None = None
        self.ending = False  # whether the present life's processes are being ended

    @property
    def over(self) -> bool:
        """Whether no other life follows the present one."""
        return self.state in ("failed", "draining")

    def health(self, *, asleep: str | None = None, timeline: Timeline = ()) -> Health:
        """The engine's health now. `asleep`: the detail to show for a ready engine that sleeps."""
        wait_s = None
        if self.state in ("starting", "restarting"):
            wait_s = max(1.0, round(self._ready_by - time.monotonic(), 1))
        elif self.state == "draining":
            wait_s = FIRST_LOAD_S  # a server that is started in its place needs as long
        detail = asleep if asleep is not None and self.state == "ready" else self.detail
        return Health(self.state, detail, self.progress, max(self.count - 1, 0), wait_s, timeline)

    def unavailable(self) -> EngineUnavailable:
        """The error for a request that comes while the engine isn't ready, with when to come back."""
        return EngineUnavailable(self.detail, retry_after_s=self.health().retry_after_s or GIVEN_UP_S)

    def start(self, detail: str, live: Callable[[], Awaitable[float | None]]) -> None:
        """Begin with the first life, in a task. `detail`: what it does now; `live`: one life from its start
        to its end; returns the seconds until the next one, or None where there is none."""
        assert self._task is None, "an engine is started once"
        self.expect("starting", detail)
        self._task = asyncio.create_task(self._run(live), name="snugvl-supervisor")

    def begin(self) -> None:
        """Note that a life begins."""
        self.ending = False
        self._ready_at, self._began_at = 0.0, time.monotonic()

    def load(self, model: str, detail: str, progress: float) -> None:
        """Note how far the start of a life is."""
        self.progress = progress
        if self.state == "starting":
            self.detail = f"{model} is loading: {detail}"
        elif self.state == "restarting":  # why it died stays visible while it comes back
            self.detail = f"{self._last_death} ({detail})"

    def become_ready(self, detail: str) -> None:
        """Note that the engine is ready and takes requests, unless the server is shutting down."""
        self._ready_at = time.monotonic()
        self._load_s = self._ready_at - self._began_at
        self.count += 1
        if self.state in ("starting", "restarting"):
            self.state, self.detail, self.progress = "ready", detail, None

    def lose(self, reason: str) -> None:
        """Note that the engine doesn't serve any more and will start again. `reason`: half a sentence."""
        if self.state in ("ready", "restarting"):
            self.expect("restarting", f"{reason}; {self._again}")

    def retry(self, reason: str) -> None:
        """Note that it starts once more with something changed, which doesn't count as a death."""
        self._last_death = reason
        self.expect("restarting", reason)

    def count_death(self, reason: str) -> float:
        """Count a death; seconds to wait before the next life."""
        settled = self._ready_at and time.monotonic() - self._ready_at >= self._supervision.settle_s
        self.deaths = 1 if settled else self.deaths + 1
        pause_s = self._supervision.pause_s(self.deaths)
        detail = f"{reason}; {self._again}"
        if pause_s:
            reason = f"{reason}; that was {self.deaths} times in a row"
            detail = f"{reason}, {self._after_pause} in {pause_s:g} s"
        self._last_death = f"{reason}; {self._again}"
        self.expect("restarting", detail, pause_s)
        return pause_s

    def fail(self, error: SnugvlError) -> None:
        """Note that it won't run, for this reason: the state is "failed" for good."""
        self.failure = error
        self.state, self.detail, self.progress = "failed", str(error), None

    def expect(self, state: State, detail: str, pause_s: float = 0.0) -> None:
        """Set the state, and expect to be ready after the pause and the seconds that the last load took."""
        self.state, self.detail, self.progress = state, detail, 0.0
        self._ready_by = time.monotonic() + pause_s + self._load_s

    def death_of_request(self, reason: str) -> str:
        """The message of the error that ends running requests when the present life has ended."""
        return self.detail if self.state != "draining" else f"{reason}; {self.detail}"

    async def drain(self, timeout_s: float, busy: Callable[[], object]) -> bool:
        """Refuse what is new, wait for what runs. Whether everything finished in time."""
        if self.state != "failed":
            self.state, self.progress = "draining", None
            self.detail = "the server is shutting down and takes no new requests"
        end = time.monotonic() + timeout_s
        while busy():
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    async def close(self) -> None:
        """End the present life, and start no other. Safe to call twice."""
        self.state, self.progress = "failed", None
        self.detail = SHUT_DOWN if self.failure is None else str(self.failure)
        task = self._task
        if task is not None and not task.cancelling():
            task.cancel()
        while task is not None and not task.done():
            await asyncio.wait([task], timeout=CANCEL_S)
            # anyio, by which httpx speaks TCP, drops one that comes with an answer. Once the life is ending
            # another would keep it from ending the engine's processes.
            if not self.ending:
                task.cancel()

    async def _run(self, live: Callable[[], Awaitable[float | None]]) -> None:
        while (pause_s := await self._one(live)) is not None:
            await asyncio.sleep(pause_s)

    async def _one(self, live: Callable[[], Awaitable[float | None]]) -> float | None:
        """One life; seconds until the next one. What fails in the first one would come again."""
        try:
            return await live()
        except SnugvlError as caught:
            error = caught
        except Exception as bug:  # of ours: no request may wait for an engine that won't come
            logger.exception("the supervisor failed")
            error = EngineError(f"the supervisor failed: {type(bug).__name__}: {bug}")
        if self.count and not self.over:
            return self.count_death(str(error))
        self.fail(error)
        return None


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one life of an engine.

    Attributes:
        reason: half a sentence.
        lines: last lines of its log.
        was_ready: whether it served before.
        error: what to say where the reason is known and waiting won't help; None: the log may know.
    """

    reason: str
    lines: tuple[str, ...] = ()
    was_ready: bool = False
    error: SnugvlError | None = None


class LivingEngine(Protocol):
    """One life of an engine, which has been begun."""

    async def run(self) -> Ending:
        """Return when it has ended."""

    async def stop(self) -> None:
        """End it and wait; nothing is left of what was started for it."""


L = TypeVar("L", bound=LivingEngine)


class Supervised(ABC, Generic[L]):
    """An `EngineService` whose engine lives in other processes. Belongs to one event loop."""

    def __init__(self, supervision: Supervision, lives: Lives, process: str, log: logging.Logger) -> None:
        """`process`: name of the engine's process within a sentence; `log`: logger of deaths."""
        self._supervision, self._lives = supervision, lives
        self._called, self._logger = process, log
        self._life: L | None = None
        self._capabilities: Capabilities | None = None
        self._snapshot: Snapshot | None = None

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities of the served model; None until it was ready once."""
        return self._capabilities

    @property
    def failure(self) -> SnugvlError | None:
        """Why it doesn't run, once `health.state` is "failed" for it."""
        return self._lives.failure

    @property
    def snapshot(self) -> Snapshot | None:
        """The last one of the present life; None while there is none."""
        return self._snapshot

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether requests are under way."""

    async def start(self) -> None:
        """Begin to start the engine and return."""
        self._lives.start(f"{self._called} is starting", self._next_life)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse what is new, wait for what runs. Whether everything finished in time."""
        return await self._lives.drain(timeout_s, lambda: self.busy)

    async def close(self) -> None:
        """End everything, child processes included. Safe to call twice."""
        await self._lives.close()

    @abstractmethod
    async def _begin(self) -> L:
        """Begin a life.

        Raises:
            OSError: its process can't be started.
        """

    @abstractmethod
    async def _look_after(self, life: L) -> None:
        """Do background work beside a life. Cancelled when it ends."""

    @abstractmethod
    def _end_requests(
        self, of_streams: Callable[[], SnugvlError], of_others: Callable[[], SnugvlError]
    ) -> None:
        """End the requests of a life that is over, with the one error where an answer had begun."""

    def _pause_s(self, ending: Ending) -> float | None:
        """Seconds until the next life, after one that ended with `ending`; None where there is none."""
        self._logger.error("%s", ending.reason)
        return self._lives.count_death(ending.reason)

    async def _next_life(self) -> float | None:
        """One life from start to end; the seconds until the next one, or None where there is none."""
        self._lives.begin()
        try:
            life = self._life = await self._begin()
        except OSError as error:
            ending = Ending(f"{self._called} can't be started: {error}")
            if not self._lives.count and error.errno not in PASSING:
                raise EngineError(ending.reason) from None
        else:
            ending = await self._live(life)
        return None if self._lives.over else self._pause_s(ending)

    async def _live(self, life: L) -> Ending:
        beside = asyncio.create_task(self._look_after(life))
        reason = SHUT_DOWN
        try:
            ending = await life.run()
            reason = ending.reason
        finally:
            self._lives.ending = True
            beside.cancel()
            try:
                self._lives.lose(reason)
                text = self._lives.death_of_request(reason)
                kind = EngineUnavailable if reason is SHUT_DOWN else EngineError  # no failure: it was told to
                self._end_requests(lambda: kind(text), self._lives.unavailable)
            finally:
                self._snapshot = None
                await life.stop()
                self._life = None
        return ending
