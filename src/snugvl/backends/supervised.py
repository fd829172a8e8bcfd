"""The engine in a child process that is watched, and started again when it dies.

A CUDA fault, a segmentation fault or the system's out-of-memory killer takes the child, never the server;
and a new process gives every byte back. The server's side imports no torch.

    start ─► starting ─► ready ─ died ─► restarting ─► ready …        three deaths in a row: with pauses
                  └─ loading reported an error ─► failed              `failure` has it; nothing is tried again
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from snugvl.backends import wire
from snugvl.backends.launch import COMMAND, Launched
from snugvl.backends.process import EngineProcess, Notice
from snugvl.backends.protocol import Capabilities, Message, Request, Stream, ToolUse
from snugvl.backends.service import Health, Snapshot, State, Tokens
from snugvl.backends.wire import EngineChoice
from snugvl.errors import DoesNotFit, EngineError, EngineUnavailable, SnugvlError
from snugvl.timeline import Timeline

__all__ = ["EngineChoice", "SupervisedEngine", "Supervision"]

FIRST_LOAD_S = 10.0  # what loading may take, until it was seen once
GIVEN_UP_S = 60.0  # after which asking a server again that has failed for good
DRAIN_POLL_S = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supervision:
    """How the child is watched, in seconds.

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
        """Seconds to wait after so many deaths in a row."""
        doublings = deaths - self.free_restarts - 1
        if doublings < 0:
            return 0.0
        return float(min(self.backoff_s * 2 ** min(doublings, 32), self.backoff_max_s))


class SupervisedEngine:
    """An `EngineService` whose engine lives in a child process."""

    def __init__(
        self,
        choice: EngineChoice,
        supervision: Supervision | None = None,
        command: Sequence[str] = COMMAND,
        launched: Launched | None = None,
    ) -> None:
        """`launched`: the process of the first life, where it was begun already."""
        self._start = wire.Start(choice, (supervision or Supervision()).snapshot_s)
        self._supervision = supervision or Supervision()
        self._command = command
        self._launched = launched
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._state: State = "starting"
        self._detail = "the engine has not been started"
        self._progress: float | None = None
        self._ready_by = 0.0  # monotonic seconds at which it should be ready
        self._load_s = FIRST_LOAD_S
        self._started_at = self._ready_at = 0.0  # monotonic; of the present child; 0: not ready yet
        self._stalled_s = self._preparing_s = 0.0
        self._silent_s = 0.0
        self._lives = 0  # children that became ready
        self._deaths = 0  # in a row
        self._last_death = ""
        self._capabilities: Capabilities | None = None
        self._snapshot: Snapshot | None = None
        self._launched_at = 0.0  # `time.time()` of the present child
        self._timeline: Timeline = ()
        self._failure: SnugvlError | None = None

    @property
    def capabilities(self) -> Capabilities | None:
        """Of the loaded model; None until it was ready once."""
        return self._capabilities

    @property
    def failure(self) -> SnugvlError | None:
        """What loading reported, once `health.state` is "failed" for it."""
        return self._failure

    @property
    def pid(self) -> int | None:
        """Process id of the present child."""
        return None if self._process is None else self._process.pid

    @property
    def snapshot(self) -> Snapshot | None:
        """The last that the present child sent; None while there is none."""
        return self._snapshot

    @property
    def health(self) -> Health:
        """Where the engine stands now."""
        wait_s = None
        if self._state in ("starting", "restarting"):
            wait_s = max(1.0, round(self._ready_by - time.monotonic(), 1))
        elif self._state == "draining":
            wait_s = FIRST_LOAD_S  # whoever starts a server in its place needs that, too
        restarts = max(self._lives - 1, 0)
        return Health(self._state, self._detail, self._progress, restarts, wait_s, self._timeline)

    async def start(self) -> None:
        """Begin to load and return."""
        assert self._task is None, "an engine is started once"
        self._expect_ready("starting", "the engine process is starting", 0.0)
        self._task = asyncio.create_task(self._supervise(), name="snugvl-supervisor")

    async def submit(self, request: Request) -> Stream:
        """Start a request; raises what the engine refuses it with."""
        return await self._ready_process().submit(request)

    async def tokenize(self, prompt: str | tuple[Message, ...], tools: ToolUse | None = None) -> Tokens:
        """Token ids of a text as it is, or of a conversation through the chat template."""
        return await self._ready_process().tokenize(prompt, tools)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        return await self._ready_process().detokenize(ids)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse what is new, wait for what runs. Whether everything finished in time."""
        if self._state != "failed":
            self._state, self._progress = "draining", None
            self._detail = "the server is shutting down and takes no new requests"
        end = time.monotonic() + timeout_s
        while self._process is not None and self._process.running:
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    async def close(self) -> None:
        """End everything, the child process included. Safe to call twice."""
        self._state, self._progress = "failed", None
        self._detail = self._failure_text() or "the server has shut down"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ready_process(self) -> EngineProcess:
        if self._state != "ready" or self._process is None:
            raise self._unavailable()
        return self._process

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(self._detail, retry_after_s=self.health.retry_after_s or GIVEN_UP_S)

    def _failure_text(self) -> str | None:
        return None if self._failure is None else str(self._failure)

    def _expect_ready(self, state: State, detail: str, pause_s: float) -> None:
        self._state, self._detail, self._progress = state, detail, 0.0
        self._ready_by = time.monotonic() + pause_s + self._load_s

    async def _supervise(self) -> None:
        """One life of a child after the other."""
        try:
            while True:
                reason = await self._live()
                if self._state in ("failed", "draining"):
                    return
                logger.error("%s", reason)
                await asyncio.sleep(self._count_death(reason))
        except Exception as error:  # a bug of ours: nobody may wait for an engine that won't come
            logger.exception("the supervisor failed")
            self._failure = EngineError(f"the supervisor failed: {type(error).__name__}: {error}")
            self._state, self._detail, self._progress = "failed", str(self._failure), None

    def _count_death(self, reason: str) -> float:
        """Seconds to wait before the next life."""
        settled = self._ready_at and time.monotonic() - self._ready_at >= self._supervision.settle_s
        self._deaths = 1 if settled else self._deaths + 1
        pause_s = self._supervision.pause_s(self._deaths)
        if pause_s:
            reason = f"{reason}; that was {self._deaths} times in a row"
            detail = f"{reason}, it starts again in {pause_s:g} s"
        else:
            detail = f"{reason}; it is starting again"
        self._last_death = f"{reason}; it is starting again"
        self._expect_ready("restarting", detail, pause_s)
        return pause_s

    async def _live(self) -> str:
        """One child from start to end, and why it ended."""
        self._ready_at, self._started_at = 0.0, time.monotonic()
        self._stalled_s = self._preparing_s = self._silent_s = 0.0
        try:
            launched, self._launched = self._launched or Launched(self._command), None
            self._launched_at = launched.at
            process = self._process = await EngineProcess.meet(launched, self._start)
            # What was free when the first life began is not what the next one finds.
            self._start = replace(self._start, choice=replace(self._start.choice, machine=None))
        except OSError as error:
            return f"the engine process can't be started: {error}"
        watch = asyncio.create_task(self._watch(process))
        reason = "the server has shut down"
        try:
            reason = await process.run(self._notice)
        finally:
            watch.cancel()
            self._end_requests(process, reason)
            self._snapshot = None
            await process.stop()
            self._process = None
        return reason

    def _end_requests(self, process: EngineProcess, reason: str) -> None:
        if self._state == "ready":
            self._expect_ready("restarting", f"{reason}; it is starting again", 0.0)
        text = self._detail if self._state != "draining" else f"{reason}; {self._detail}"
        process.fail(lambda: EngineError(text), self._unavailable)

    def _notice(self, notice: Notice) -> None:
        match notice:
            case wire.Loading():
                self._loading(notice)
            case wire.Ready():
                self._became_ready(notice)
            case wire.Failed():
                self._loading_failed(notice.error)
            case wire.Pong():
                self._silent_s = 0.0
                self._stalled_s, self._preparing_s = notice.stalled_s, notice.preparing_s
            case Snapshot():
                self._snapshot = notice

    def _loading(self, notice: wire.Loading) -> None:
        self._progress = notice.progress
        if self._state == "starting":
            self._detail = f"{self._start.choice.model} is loading: {notice.detail}"
        elif self._state == "restarting":  # why it died stays visible while it comes back
            self._detail = f"{self._last_death} ({notice.detail})"

    def _became_ready(self, notice: wire.Ready) -> None:
        self._ready_at = time.monotonic()
        self._load_s = self._ready_at - self._started_at
        self._capabilities = notice.capabilities
        self._timeline = (("process launched", self._launched_at), *notice.timeline)
        self._lives += 1
        if self._state in ("starting", "restarting"):
            self._state, self._progress = "ready", None
            self._detail = f"{notice.capabilities.model} is ready"

    def _loading_failed(self, error: SnugvlError) -> None:
        """An error that loading reports would come again; memory that another program holds now may not."""
        assert self._process is not None
        if self._lives and isinstance(error, DoesNotFit):
            self._process.kill(f"the engine could not load again: {error}")
            return
        self._failure = error
        self._state, self._detail, self._progress = "failed", str(error), None
        self._process.kill(str(error))

    async def _watch(self, process: EngineProcess) -> None:
        """Kill a child that hangs.

        Silence is counted in looks, not by the clock: a server that was itself held up sees no hang.
        """
        limit_s = self._supervision.watchdog_s
        while True:
            process.ping()
            await asyncio.sleep(self._supervision.ping_s)
            self._silent_s += self._supervision.ping_s
            if self._silent_s > limit_s:
                process.kill(f"the engine process hung: it has not answered for {self._silent_s:.1f} s")
            elif self._stalled_s > limit_s:
                process.kill(f"the engine hung: a step lasted more than {limit_s:g} s")
            elif self._preparing_s > limit_s:
                process.kill(f"the engine hung: a prompt took more than {limit_s:g} s to prepare")
