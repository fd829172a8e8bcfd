"""One life of a vLLM server: launched here and ended with its processes, or found running and left running.

begin ──► ready ──► end       a `Life` tells of the first two (`Listener`) and returns the `Ending`
"""

import asyncio
import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import psutil

from snugvl.backends.lives import Supervision, read_output, wait_for_exit
from snugvl.backends.process import postmortem
from snugvl.backends.vllm import flags, watch
from snugvl.backends.vllm.api import UNIX, NobodyThere, NotVllm, Served, Unreachable, VllmApi
from snugvl.backends.vllm.command import VllmCommand
from snugvl.backends.vllm.failure import Ending, stall_error
from snugvl.backends.vllm.log import Log, Stage, exception_lines, is_error, plain
from snugvl.backends.vllm.measure import start_nvml
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.backends.vllm.watch import Activity, Stalled
from snugvl.errors import EngineError, SnugvlError

logger = logging.getLogger("snugvl.vllm")

GRACE_S: Final = 5.0  # from SIGTERM to SIGKILL
REAP_S: Final = 12.0  # more than the reaper takes to give up
LAST_WORDS_S: Final = 0.5
REAPER: Final = Path(__file__).with_name("reaper.py")

_SECRET: Final = re.compile(r"(KEY|KEYS|TOKEN|SECRET|PASSWORD)$", re.I)
_HUB: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # vLLM downloads what isn't there
# Lines reach us as they are written; nobody is told that vLLM was started.
_OURS: Final = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def environment(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """What vLLM sees: our variables without secrets of ours, and `own`."""
    kept = {name: value for name, value in environ.items() if name in _HUB or not _SECRET.search(name)}
    return kept | _OURS | dict(own)


class VllmProcess:
    """A running `vllm serve` and everything it started. Lives in one event loop."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self._killed_because: str | None = None
        self.log = Log()

    @classmethod
    def spawn(cls, words: Sequence[str], own: Mapping[str, str]) -> "VllmProcess":
        """Start it behind a reaper (see `reaper.py`)."""
        popen = subprocess.Popen(  # noqa: S603 (what the user asked for)
            [sys.executable, "-I", "-S", str(REAPER), str(GRACE_S), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(os.environ, own),
            process_group=0,  # Ctrl+C in a terminal is the server's business
        )
        return cls(popen)

    @property
    def pid(self) -> int:
        """Of the reaper: every process of vLLM descends from it."""
        return self._popen.pid

    def family(self) -> list[psutil.Process]:
        """Every process of vLLM."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    async def run(self, seen: Callable[[], None]) -> str:
        """Read its log until it is gone; then why it went, as half a sentence.

        `seen` is called whenever the log has grown.
        """
        assert self._popen.stdout is not None

        def take(text: str) -> None:
            for line in self.log.feed(text):
                logger.log(self._level(line), "%s", line)
            seen()

        listener = asyncio.create_task(read_output(self._popen.stdout, take))
        try:
            await wait_for_exit(self._popen)
            await asyncio.wait([listener], timeout=LAST_WORDS_S)
            return self._killed_because or self._describe()
        finally:
            listener.cancel()
            await asyncio.wait([listener])

    def kill(self, because: str) -> None:
        """Begin to end it. `because`: what `run` will say, as half a sentence."""
        self._killed_because = self._killed_because or because
        self._hang_up()

    async def stop(self) -> None:
        """End it and wait; nothing is left of it."""
        self._hang_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S + REAP_S):
                await wait_for_exit(self._popen)
        if self._popen.poll() is None:  # the reaper itself hangs
            for process in self.family():
                with suppress(psutil.Error):
                    process.kill()
            self._popen.kill()
            await wait_for_exit(self._popen)
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def _level(self, line: str) -> int:
        """Errors always; what is usual only until it serves."""
        if is_error(line):
            return logging.WARNING
        return logging.DEBUG if self.log.was_well else logging.INFO

    def _hang_up(self) -> None:
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()
        if self._popen.poll() is None:  # a process that was forked meanwhile may hold the pipe, too
            self._popen.terminate()

    def _describe(self) -> str:
        # An error may be followed by a page of what else ended because of it.
        lines = self.log.fresh
        words = exception_lines(lines) or [plain(line) for line in lines]
        text = postmortem.describe(self._popen.poll(), tuple(words)[-postmortem.KEPT_LINES :])
        return text.replace("the engine process", "vLLM")


SOCKET_NAME: Final = "vllm.sock"
MAX_PATH_BYTES: Final = 107  # of an address of a Unix socket
DEATH_S: Final = 5.0  # until a server whose engine died has ended by itself


class Listener(Protocol):
    """Whoever has to know."""

    @property
    def running(self) -> int:
        """Requests that it has."""
        ...

    def on_loading(self, stage: Stage) -> None:
        """A start got further."""
        ...

    async def on_ready(self, life: "Life", served: Served, marker_tokens: Mapping[str, int]) -> None:
        """It serves."""
        ...

    def on_lost(self, reason: str) -> None:
        """It no longer does; `reason`: half a sentence. Its `Ending` may say more."""
        ...


class Life(Protocol):
    """One life."""

    @property
    def api(self) -> VllmApi: ...

    @property
    def log(self) -> tuple[str, ...]:
        """What it has written so far, where that can be read."""
        ...

    @property
    def watchdog(self) -> watch.Watchdog:
        """Watches it, and is told what answers show."""
        ...

    def family(self) -> list[psutil.Process]:
        """Its processes, where they are ours."""
        ...

    async def live(self) -> Ending:
        """From start to end."""
        ...


@dataclass(slots=True)
class _Progress:
    """What a life has come to."""

    ready: bool = False
    served: Served | None = None


class LaunchedServer:
    """A server that is launched, and gone with all its processes when `live` returns or is cancelled."""

    def __init__(
        self, choice: VllmChoice, command: VllmCommand, supervision: Supervision, listener: Listener
    ) -> None:
        self._room = tempfile.TemporaryDirectory(prefix="snugvl-vllm-", ignore_cleanup_errors=True)
        address = _socket_path(self._room)
        key = secrets.token_urlsafe(24)
        self.api = VllmApi(f"{UNIX}{address}", key)
        self._choice = choice
        self._supervision = supervision
        self._listener = listener
        self.watchdog = watch.Watchdog(self.api, supervision, lambda: listener.running, self._mark_healthy)
        self._process: VllmProcess | None = None
        sleeps = choice.sleep_after_s is not None
        added = flags.common(choice.name, address, sleeps)
        self._words = command.serve(choice.folder, (*added, *choice.arguments))
        self._environment = {"VLLM_API_KEY": key, **({"VLLM_SERVER_DEV_MODE": "1"} if sleeps else {})}
        self._environment |= dict(choice.environment)
        self._progress = _Progress()

    @property
    def log(self) -> tuple[str, ...]:
        """What it has written so far."""
        return () if self._process is None else self._process.log.lines

    @property
    def pid(self) -> int | None:
        """The process that holds all others together."""
        return None if self._process is None else self._process.pid

    def family(self) -> list[psutil.Process]:
        """Its processes."""
        return [] if self._process is None else self._process.family()

    async def live(self) -> Ending:
        """From start to end."""
        try:
            process = self._process = VllmProcess.spawn(self._words, self._environment)
        except OSError as error:
            await self._leave()
            return Ending(f"it can't be started: {error}")
        gone = asyncio.create_task(process.run(self._heard))
        serving = asyncio.create_task(self._serve(process))
        try:
            await asyncio.wait({gone, serving}, return_when=asyncio.FIRST_COMPLETED)
            final = serving.result() if serving.done() else None
            reason = await gone
            return Ending(reason, process.log.lines, self._progress.ready, final)
        finally:
            serving.cancel()
            gone.cancel()
            await process.stop()
            await asyncio.wait([serving, gone])
            await self._leave()

    async def _leave(self) -> None:
        await self.api.close()
        self._room.cleanup()

    def _mark_healthy(self) -> None:
        if self._process is not None:
            self._process.log.all_is_well()

    def _heard(self) -> None:
        assert self._process is not None
        stage = self._process.log.stage
        if stage is not None and not self._progress.ready:
            self._listener.on_loading(stage)

    async def _serve(self, process: VllmProcess) -> SnugvlError | None:
        """Wait until it is ready, then until it no longer is; whatever is wrong ends the process.

        Returns the error that trying again won't cure.
        """
        try:
            async with asyncio.timeout(self._choice.startup_s):
                served = await self._until_ready(process)
                markers = await watch.marker_tokens(self.api)
        except NotVllm as foreign:
            process.kill(str(foreign))
            return NotVllm(f"{foreign}; what was launched: {' '.join(self._words[:4])} …")
        except Stalled as idle:
            error = stall_error(str(idle), process.log, self._choice)
            process.kill(str(error))
            return error
        except TimeoutError:
            reason = f"vLLM hung at its start: it was not ready after {self._choice.startup_s:g} s"
            process.kill(f'{reason} (its last line: "{process.log.last}")')
            return EngineError(f'{reason}; its last line: "{process.log.last}"')
        except Unreachable as silent:
            process.kill(f"vLLM hung at its start: {silent}")
            return EngineError(f"vLLM hung at its start: {silent}")
        except SnugvlError as failed:
            process.kill(str(failed))
            return failed
        self._progress.ready = True
        await self._listener.on_ready(self, served, markers)
        reason = await self.watchdog.wait_for_failure()
        self._listener.on_lost(reason)
        if not reason.startswith(watch.HUNG):
            await asyncio.sleep(DEATH_S)  # it ends by itself, with last words that say more
        process.kill(reason)
        return None

    async def _until_ready(self, process: VllmProcess) -> Served:
        activity = Activity(process.family, self._choice.idle_s, await asyncio.to_thread(start_nvml))

        async def waited(seconds: float) -> None:
            await asyncio.to_thread(activity.look, process.log.last, seconds)

        watchdog_s = self._supervision.watchdog_s
        return await watch.until_ready(self.api, self._choice.name, watchdog_s, waited)


def _socket_path(room: "tempfile.TemporaryDirectory[str]") -> str:
    """Path of the socket that vLLM listens on, in a folder that is this user's alone.

    It is no port: some of vLLM's routes ask for no key, and any user of this machine reaches a port.

    Raises:
        EngineError: the system's limit on such paths is exceeded.
    """
    address = str(Path(room.name) / SOCKET_NAME)
    if len(os.fsencode(address)) > MAX_PATH_BYTES:
        room.cleanup()
        raise EngineError(
            f"the folder for temporary files has too long a path for vLLM's socket ({address}); set the "
            "environment variable TMPDIR to a shorter one, such as /tmp"
        )
    return address


class AttachedServer:
    """A server that runs already. `again`: it served before, so it is waited for."""

    def __init__(
        self, choice: VllmChoice, supervision: Supervision, listener: Listener, *, again: bool
    ) -> None:
        assert choice.attach is not None
        self.api = VllmApi(choice.attach, choice.api_key)
        self._choice = choice
        self._supervision = supervision
        self._listener = listener
        self._again = again
        self.watchdog = watch.Watchdog(self.api, supervision, lambda: listener.running)

    @property
    def log(self) -> tuple[str, ...]:
        """Nothing: it writes elsewhere."""
        return ()

    def family(self) -> list[psutil.Process]:
        """None of ours."""
        return []

    async def live(self) -> Ending:
        """From when it is found until it no longer answers."""
        try:
            return await self._live()
        finally:
            await self.api.close()

    async def _live(self) -> Ending:
        where = self.api.where
        try:
            if not self._again:
                await self.api.healthy(min(watch.LOOK_S, self._supervision.watchdog_s))
            async with asyncio.timeout(None if self._again else self._choice.startup_s):
                served = await watch.until_ready(self.api, self._choice.model, self._supervision.watchdog_s)
                markers = await watch.marker_tokens(self.api)
        except NobodyThere as error:
            hint = f"start it (vllm serve MODEL), or correct the address (--attach {where})"
            return Ending(str(error), error=EngineError(f"--attach: {error}; {hint}"))
        except (NotVllm, Unreachable) as error:
            return Ending(
                str(error), error=EngineError(f"--attach: {error}; give the address of a vLLM server")
            )
        except TimeoutError:
            reason = f"the vLLM at {where} was not ready after {self._choice.startup_s:g} s"
            return Ending(reason, error=EngineError(f"--attach: {reason}"))
        except SnugvlError as error:
            return Ending(str(error), error=error)
        await self._listener.on_ready(self, served, markers)
        reason = await self.watchdog.wait_for_failure()
        self._listener.on_lost(reason)
        return Ending(reason, was_ready=True)
