"""The engine in a child process that is watched, and started again when it dies.

A CUDA fault, a segmentation fault or the system's out-of-memory killer takes the child, never the server;
and a new process gives every byte back. The server's side imports no torch.

What the first loading reports as an error is not a death: nothing is tried again, and `failure` has it (see
`supervisor.py`). Once it was ready, whatever ends it is one.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from snugvl.backends.process import wire
from snugvl.backends.process.launch import COMMAND, Launched
from snugvl.backends.process.life import EngineProcess, Notice
from snugvl.backends.process.wire import EngineChoice
from snugvl.backends.supervisor import Lives, Supervised, Supervision
from snugvl.core.messages import Request, Stream
from snugvl.core.service import Health, Snapshot, Timeline, Tokens
from snugvl.errors import SnugvlError

__all__ = ["EngineChoice", "SupervisedEngine", "Supervision"]

logger = logging.getLogger(__name__)


class SupervisedEngine(Supervised[EngineProcess]):
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
        lives = Lives(supervision, "the engine has not been started")
        super().__init__(supervision, lives, "the engine process", logger)
        self._start = wire.Start(choice, supervision.snapshot_s)
        self._command = command
        self._launched = launched
        self._stalled_s = self._preparing_s = self._silent_s = 0.0
        self._launched_at = 0.0  # `time.time()` of the present child
        self._timeline: Timeline = ()

    @property
    def pid(self) -> int | None:
        """Process id of the present child."""
        return None if self._life is None else self._life.pid

    @property
    def busy(self) -> bool:
        return self._life is not None and bool(self._life.running)

    @property
    def health(self) -> Health:
        """The engine's health now."""
        return self._lives.health(timeline=self._timeline)

    async def submit(self, request: Request) -> Stream:
        """Start a request; raises the engine's error where it refuses."""
        return await self._ready_process().submit(request)

    async def tokenize(self, request: Request) -> Tokens:
        """Token ids of a request's prompt: see `EngineService`."""
        return await self._ready_process().tokenize(request)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        return await self._ready_process().detokenize(ids)

    def _ready_process(self) -> EngineProcess:
        if self._lives.state != "ready" or self._life is None:
            raise self._lives.unavailable()
        return self._life

    async def _begin(self) -> EngineProcess:
        self._stalled_s = self._preparing_s = self._silent_s = 0.0
        launched, self._launched = self._launched or Launched(self._command), None
        self._launched_at = launched.at
        process = await EngineProcess.meet(launched, self._start, self._notice)
        # What was free when the first life began is not what the next one finds.
        self._start = replace(self._start, choice=replace(self._start.choice, machine=None))
        return process

    def _end_requests(
        self, of_streams: Callable[[], SnugvlError], of_others: Callable[[], SnugvlError]
    ) -> None:
        assert self._life is not None
        self._life.fail(of_streams, of_others)

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
        """Errors of the first loading would come again. Once one has worked, it may pass: memory that
        another program holds now, a disk that doesn't answer."""
        assert self._life is not None
        if self._lives.count:
            self._life.kill(f"the engine could not load again: {error}")
            return
        self._lives.fail(error)
        self._life.kill(str(error))

    async def _look_after(self, process: EngineProcess) -> None:
        """Kill a child that hangs, or that can't be watched."""
        try:
            await self._watch(process)
        except Exception as error:
            logger.exception("the engine process can't be watched")
            process.kill(f"the engine process can't be watched: {type(error).__name__}: {error}")

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
