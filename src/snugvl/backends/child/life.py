"""One life of a child server: launched here and ended with its processes, or found running and left running.

begin ──► ready ──► end       a `Life` tells of the first two (`Listener`) and returns the `Ending`

A server that is launched stands behind a reaper (`reaper.py`), so that all that it starts ends with it.
"""

import asyncio
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import psutil

from snugvl.backends.child import watch
from snugvl.backends.child.http import UNIX, ChildApi, Foreign, NobodyThere, Served, Unreachable
from snugvl.backends.child.settings import ChildChoice
from snugvl.backends.child.watch import Activity, Stalled
from snugvl.backends.process.launch import without_secrets
from snugvl.backends.spawned import Log, LogForm, SpawnedProcess, Stage
from snugvl.backends.supervisor import Ending, Supervision
from snugvl.core.resources import Scratch
from snugvl.errors import EngineError, SnugvlError
from snugvl.hardware import nvml

SOCKET_NAME: Final = "engine.sock"
MAX_PATH_BYTES: Final = 107  # of an address of a Unix socket
DEATH_S: Final = 5.0  # until a server whose engine died has ended by itself
GRACE_S: Final = 5.0  # from SIGTERM to SIGKILL
REAP_S: Final = 12.0  # more than the reaper takes to give up
REAPER: Final = Path(__file__).with_name("reaper.py")

_HUB: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # an engine downloads what isn't there
# Lines reach us as they are written; vLLM sends no statistics of its use.
_OURS: Final = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def environment(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine: snugvl's variables without its secrets, and `own`."""
    return without_secrets(environ, but=_HUB) | _OURS | dict(own)


class ChildProcess(SpawnedProcess):
    """A running server and everything it started."""

    def __init__(
        self,
        words: Sequence[str],
        own: Mapping[str, str],
        name: str,
        form: LogForm,
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it. `name`: the engine's, for people; `seen` is called whenever its log has grown.

        Raises:
            OSError: it can't be started.
        """
        popen = subprocess.Popen(  # noqa: S603 (what the user asked for)
            [sys.executable, "-I", "-S", str(REAPER), str(GRACE_S), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(os.environ, own),
            process_group=0,  # Ctrl+C in a terminal is the server's business
        )
        super().__init__(popen, name, form)
        self._form, self._seen = form, seen
        self._logger = logging.getLogger(f"snugvl.{name.lower().replace('.', '')}")

    def family(self) -> list[psutil.Process]:
        """Every process of the engine: all descend from the reaper, whose id is `pid`."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _take(self, text: str) -> None:
        super()._take(text)
        self._seen()

    def _heard(self, line: str) -> None:
        """Log a line of its output: errors always, usual lines only until it serves."""
        if self._form.is_error(line):
            level = logging.WARNING
        else:
            level = logging.DEBUG if self.log.was_well or self._form.chatty else logging.INFO
        self._logger.log(level, "%s", line)

    def _end(self) -> None:
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()
        if self._popen.poll() is None:  # a process that was forked meanwhile may also hold the pipe
            self._popen.terminate()

    def _ways_to_end(self) -> Sequence[tuple[Callable[[], object], float | None]]:
        return (self._end, GRACE_S + REAP_S), (self._kill_all, None)

    def _kill_all(self) -> None:
        """Kill all processes, for the case that the reaper itself hangs."""
        for process in self.family():
            with suppress(psutil.Error):
                process.kill()
        self._popen.kill()


class Listener(Protocol):
    """Learns of the steps of a life."""

    @property
    def running(self) -> int:
        """Number of requests that the server has."""

    def on_loading(self, stage: Stage) -> None:
        """Called when a start got further."""

    async def on_ready(self, life: "Life", served: Served, marker_tokens: Mapping[str, int]) -> None:
        """Called when the server takes requests. `marker_tokens`: ids of tokens that mark tool calls."""

    def on_lost(self, reason: str) -> None:
        """Called when the server no longer answers; `reason`: half a sentence. `Ending` may say more."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is launched, or with `attach` found.

    Attributes:
        choice: settings of the server.
        start: the command by which people start such a server.
        api: makes the client from an address and a key.
        form: the form of its log.
        words: makes the command from the path of the socket that it is to listen on.
        environment: makes its variables from the API key that it is to ask for.
        stalled: makes the error of a stalled start from the time since when, and its log.
    """

    choice: ChildChoice
    start: str
    api: Callable[[str, str | None], ChildApi]
    form: LogForm
    words: Callable[[str], tuple[str, ...]]
    environment: Callable[[str], Mapping[str, str]]
    stalled: Callable[[str, Log], EngineError]

    @property
    def model(self) -> str:
        """The model's name over HTTP; empty for the first one that an attached server has."""
        return self.choice.model if self.choice.attach else self.choice.name


class Life:
    """One life of the engine's server. `watchdog` watches it, with signs of life from answers."""

    def __init__(
        self,
        api: ChildApi,
        launch: Launch,
        supervision: Supervision,
        listener: Listener,
        on_healthy: Callable[[], None] = lambda: None,
    ) -> None:
        self.api = api
        self._launch, self._supervision, self._listener = launch, supervision, listener
        self.watchdog = watch.Watchdog(api, supervision, lambda: listener.running, on_healthy)

    @property
    def log(self) -> tuple[str, ...]:
        """The lines that it has written so far; empty where it writes elsewhere."""
        return ()

    def family(self) -> list[psutil.Process]:
        """The server's processes; empty where snugvl didn't start them."""
        return []

    async def run(self) -> Ending:
        """From start to end."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End all that was started for it; nothing is left."""
        await self.api.close()


class LaunchedServer(Life):
    """A server that is launched, and gone with all its processes after `stop`."""

    def __init__(self, launch: Launch, supervision: Supervision, listener: Listener) -> None:
        self._room = Scratch("engine")
        address = _socket_path(self._room)
        key = secrets.token_urlsafe(24)
        api = launch.api(f"{UNIX}{address}", key)
        super().__init__(api, launch, supervision, listener, self._mark_healthy)
        self._process: ChildProcess | None = None
        self._words = launch.words(address)
        self._environment = launch.environment(key)
        self._ready = False

    @property
    def log(self) -> tuple[str, ...]:
        return () if self._process is None else self._process.log.lines

    @property
    def pid(self) -> int | None:
        """Process id of the reaper, the ancestor of all others."""
        return None if self._process is None else self._process.pid

    def family(self) -> list[psutil.Process]:
        return [] if self._process is None else self._process.family()

    async def run(self) -> Ending:
        try:
            process = self._process = ChildProcess(
                self._words, self._environment, self.api.name, self._launch.form, self._heard
            )
        except OSError as error:
            return Ending(f"it can't be started: {error}")
        gone = asyncio.create_task(process.why_gone())
        serving = asyncio.create_task(self._serve(process))
        try:
            await asyncio.wait({gone, serving}, return_when=asyncio.FIRST_COMPLETED)
            final = serving.result() if serving.done() else None
            return Ending(await gone, process.log.lines, self._ready, final)
        finally:
            serving.cancel()
            gone.cancel()
            await asyncio.wait([serving, gone])

    async def stop(self) -> None:
        """End the server with all its processes."""
        if self._process is not None:
            await self._process.stop()
        await super().stop()
        self._room.remove()

    @property
    def _hung(self) -> str:
        return watch.HUNG.format(name=self.api.name)

    def _mark_healthy(self) -> None:
        if self._process is not None:
            self._process.log.all_is_well()

    def _heard(self) -> None:
        stage = None if self._process is None else self._process.log.stage
        if stage is not None and not self._ready:
            self._listener.on_loading(stage)

    async def _serve(self, process: ChildProcess) -> SnugvlError | None:
        """Wait until it is ready, then until it no longer is; whatever is wrong ends the process.

        Returns an error that another try won't cure, or None.
        """
        try:
            async with asyncio.timeout(self._launch.choice.startup_s):
                served = await self._until_ready(process)
                markers = await watch.marker_tokens(self.api)
        except Foreign as foreign:
            process.kill(str(foreign))
            return Foreign(f"{foreign}; what was launched: {' '.join(self._words[:4])} …")
        except Stalled as idle:
            error = self._launch.stalled(str(idle), process.log)
            process.kill(str(error))
            return error
        except TimeoutError:
            reason = f"{self._hung} at its start: it was not ready after {self._launch.choice.startup_s:g} s"
            process.kill(f'{reason} (its last line: "{process.log.last}")')
            return EngineError(f'{reason}; its last line: "{process.log.last}"')
        except Unreachable as silent:
            process.kill(f"{self._hung} at its start: {silent}")
            return EngineError(f"{self._hung} at its start: {silent}")
        except SnugvlError as failed:
            process.kill(str(failed))
            return failed
        self._ready = True
        await self._listener.on_ready(self, served, markers)
        reason = await self.watchdog.wait_for_failure()
        self._listener.on_lost(reason)
        if not reason.startswith(self._hung):
            await asyncio.sleep(DEATH_S)  # it ends by itself, with last words that say more
        process.kill(reason)
        return None

    async def _until_ready(self, process: ChildProcess) -> Served:
        activity = Activity(process.family, self._launch.choice.idle_s, await asyncio.to_thread(nvml.started))

        async def waited(seconds: float) -> None:
            await asyncio.to_thread(activity.look, process.log.last, seconds)

        watchdog_s = self._supervision.watchdog_s
        return await watch.until_ready(self.api, self._launch.model, watchdog_s, waited)


def _socket_path(room: Scratch) -> str:
    """Path of the socket that it listens on, in a folder that only this user can read.

    A port wouldn't do: some routes ask for no key, and any user of this machine reaches a port.

    Raises:
        EngineError: the system's limit on such paths is exceeded.
    """
    address = str(room.path / SOCKET_NAME)
    if len(os.fsencode(address)) > MAX_PATH_BYTES:
        room.remove()
        raise EngineError(
            f"the folder for temporary files has too long a path for the engine's socket ({address}); set "
            "the environment variable TMPDIR to a shorter one, such as /tmp"
        )
    return address


class AttachedServer(Life):
    """A server that runs already. `again`: it served before, so it is waited for."""

    def __init__(self, launch: Launch, supervision: Supervision, listener: Listener, *, again: bool) -> None:
        assert launch.choice.attach is not None
        api = launch.api(launch.choice.attach, launch.choice.api_key)
        super().__init__(api, launch, supervision, listener)
        self._again = again

    async def run(self) -> Ending:
        """Wait until it is found, then until it no longer answers; returns why."""
        where = self.api.where
        try:
            if not self._again:
                await self.api.healthy(min(watch.LOOK_S, self._supervision.watchdog_s))
            async with asyncio.timeout(None if self._again else self._launch.choice.startup_s):
                served = await watch.until_ready(self.api, self._launch.model, self._supervision.watchdog_s)
                markers = await watch.marker_tokens(self.api)
        except NobodyThere as error:
            hint = f"start it ({self._launch.start}), or correct the address (--attach {where})"
            return Ending(str(error), error=EngineError(f"--attach: {error}; {hint}"))
        except (Foreign, Unreachable) as error:
            return Ending(
                str(error),
                error=EngineError(f"--attach: {error}; give the address of a {self.api.name} server"),
            )
        except TimeoutError:
            reason = f"the {self.api.name} at {where} was not ready after {self._launch.choice.startup_s:g} s"
            return Ending(reason, error=EngineError(f"--attach: {reason}"))
        except SnugvlError as error:
            return Ending(str(error), error=error)
        await self._listener.on_ready(self, served, markers)
        reason = await self.watchdog.wait_for_failure()
        self._listener.on_lost(reason)
        return Ending(reason, was_ready=True)
