"""The engine in a child process that is watched, and started again when it dies.

A CUDA fault, a segmentation fault or the system's out-of-memory killer takes the child, never the server;
and a new process gives every byte back. The server's side imports no torch.

What the first loading reports as an error is no death: nothing is tried again, and `failure` has it (see
`lives.py`). Once it was ready, whatever ends it is one.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from snugvl.backends.lives import Lives, LivingEngine, Supervision, watched
from snugvl.backends.process import wire
from snugvl.backends.process.launch import COMMAND, Launched
from snugvl.backends.process.life import EngineProcess, Notice
from snugvl.backends.process.wire import EngineChoice
from snugvl.core.messages import Message, Request, Stream, ToolUse
from snugvl.core.service import Health, Snapshot, Tokens
from snugvl.core.timeline import Timeline
from snugvl.errors import EngineError, SnugvlError

__all__ = ["EngineChoice", "SupervisedEngine", "Supervision"]

logger = logging.getLogger(__name__)


class SupervisedEngine(LivingEngine):
    """An `EngineService` whose engine lives in a child process."""

    def __init__(
        self,
        choice: EngineChoice,
        supervision: Supervision | None = None,
        command: Sequence[str] = COMMAND,
        launched: Launched | None = None,
    ) -> None:
        """`launched`: the process of the first life, where it was begun already."""
        supervision = supervision or Supervision()
        super().__init__(supervision, Lives(supervision, "the engine has not been started"))
        self._start = wire.Start(choice, supervision.snapshot_s)
        self._command = command
        self._launched = launched
        self._process: EngineProcess | None = None
        self._stalled_s = self._preparing_s = self._silent_s = 0.0
        self._launched_at = 0.0  # `time.time()` of the present child
        self._timeline: Timeline = ()

    @property
    def pid(self) -> int | None:
        """Process id of the present child."""
        return None if self._process is None else self._process.pid

    @property
    def health(self) -> Health:
        """Where the engine stands now."""
        return self._lives.health(timeline=self._timeline)

    async def start(self) -> None:
        """Begin to load and return."""
        self._lives.start("the engine process is starting", self._life)

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
        return await self._lives.drain(timeout_s, lambda: self._process and self._process.running)

    def _ready_process(self) -> EngineProcess:
        if self._lives.state != "ready" or self._process is None:
            raise self._lives.unavailable()
        return self._process

    async def _life(self) -> float | None:
        """One life of a child; the seconds until the next one."""
        reason = await self._live()
        if self._lives.over:
            return None
        logger.error("%s", reason)
        return self._lives.count_death(reason)

    async def _live(self) -> str:
        """One child from start to end, and why it ended."""
        self._lives.begin()
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
        watched(watch, lambda why: process.kill(f"the engine process can't be watched: {why}"))
        reason = "the server has shut down"
        try:
            reason = await process.run(self._notice)
        finally:
            watch.cancel()
            try:
                self._end_requests(process, reason)
            finally:
                self._snapshot = None
                await process.stop()
                self._process = None
        return reason

    def _end_requests(self, process: EngineProcess, reason: str) -> None:
        self._lives.lose(reason)
        text = self._lives.death_of_request(reason)
        process.fail(lambda: EngineError(text), self._lives.unavailable)

    def _notice(self, notice: Notice) -> None:
        match notice:
            case wire.Loading():
                self._lives.load(self._start.choice.model, notice.detail, notice.progress)
            case wire.Ready():
                self._became_ready(notice)
            case wire.Failed():
                self._loading_failed(notice.error)
            case wire.Pong():
                self._silent_s = 0.0
                self._stalled_s, self._preparing_s = notice.stalled_s, notice.preparing_s
            case Snapshot():
                self._snapshot = notice

    def _became_ready(self, notice: wire.Ready) -> None:
        self._capabilities = notice.capabilities
        self._timeline = (("process launched", self._launched_at), *notice.timeline)
        self._lives.become_ready(f"{notice.capabilities.model} is ready")

    def _loading_failed(self, error: SnugvlError) -> None:
        """What the first loading reports would come again. Once one has worked, it may pass: memory that
        another program holds now, a disk that doesn't answer."""
        assert self._process is not None
        if self._lives.count:
            self._process.kill(f"the engine could not load again: {error}")
            return
        self._lives.fail(error)
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
