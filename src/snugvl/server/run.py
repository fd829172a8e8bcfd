"""A server from its start to its end: load, serve, drain.

    SIGTERM, Ctrl+C ─► drain: running requests finish, new ones get 503 and `Connection: close` ─► exit 0
    a second one    ─► everything is dropped ─► exit 130

The engine begins to load before the app is imported: on two cores both take their time at once.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from snugvl.core.resources import keep_freed_memory
from snugvl.core.service import EngineService, Health
from snugvl.errors import EngineError
from snugvl.server.connection import uvicorn_config
from snugvl.server.media.confine import hide
from snugvl.server.settings import ServerSettings

if TYPE_CHECKING:
    from snugvl.server.context import Context

log = logging.getLogger("snugvl.server")

POLL_S = 0.05
# Threads that read and check large bodies let the event loop go on this soon: it takes Python's lock several
# times for each answer. Python's own 5 ms were half a second of /health on a busy machine.
SWITCH_S = 0.0005
DONE = 0
INTERRUPTED = 130

Watch = Callable[[Health], None]


class Server(uvicorn.Server):
    """uvicorn, that drains before it stops."""

    def __init__(self, config: uvicorn.Config, service: EngineService, settings: ServerSettings) -> None:
        super().__init__(config)
        self.stopped_hard = False
        self._service = service
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for as long as the server runs."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops."""
        self._loop.call_soon_threadsafe(self.stop)

    @property
    def stopping(self) -> bool:
        """Whether the server is stopping."""
        return self._draining is not None

    def stop(self) -> None:
        """Drain; called again: stop at once."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.stopped_hard = self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        try:
            drained = await self._service.drain(self._settings.drain_s)
            if not drained:
                log.warning("%g s are over: what still runs is ended", self._settings.drain_s)
                await self._service.close()  # what still runs ends with an error that says so
        except Exception:  # this task is never awaited: the sender of the signal waits for the end
            log.exception("draining failed; what still runs is dropped")
        self.should_exit = True


async def serve(
    service: EngineService, settings: ServerSettings, listener: socket.socket, watch: Watch
) -> int:
    """Load and serve until a signal; the exit code.

    Args:
        watch: called with the engine's health whenever it changes, from the start on.

    Raises:
        SnugvlError: the engine could not load; its own error, where it has one.
    """
    try:
        await service.start()
        watcher = asyncio.ensure_future(_watch(service, watch))
        try:
            config, context = await asyncio.to_thread(_config, service, settings)
            warmer = asyncio.ensure_future(_warm(context))
            try:
                return await _run(Server(config, service, settings), service, listener, watcher)
            finally:
                warmer.cancel()
        finally:
            watcher.cancel()
    finally:
        await service.close()


def _config(service: EngineService, settings: ServerSettings) -> "tuple[uvicorn.Config, Context]":
    """The app, imported here and now: it takes most of a second."""
    from snugvl.server.app import create_app
    from snugvl.server.context import Context
    from snugvl.server.media.loading import MediaLoader

    context = Context(service, settings, MediaLoader.from_settings(settings))
    config = uvicorn_config(create_app(context, started=True), settings)
    config.load()
    return config, context


async def _warm(context: "Context") -> None:
    """Start what decodes the first picture while weights are loaded: before that it would only slow the
    imports down, and once the engine is ready the first picture would wait for it. Say what confines it less
    than it should."""
    while not ((health := context.service.health).ready or health.progress):
        await asyncio.sleep(POLL_S)
    if left := await context.media.warm():
        log.warning(
            "no seccomp filter confines decoders here: one that a picture has taken over could %s",
            ", ".join(left),
        )


async def _run(
    server: Server, service: EngineService, listener: socket.socket, watcher: "asyncio.Future[None]"
) -> int:
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await asyncio.wait({serving, watcher}, return_when=asyncio.FIRST_COMPLETED)
    failure = None
    if watcher.done() and not serving.done():
        failure = watcher.exception()
        server.should_exit = True
    await serving
    if failure is not None and not server.stopping:  # told to stop, it that it did is not a failure
        raise failure
    return INTERRUPTED if server.stopped_hard else DONE


async def _watch(service: EngineService, watch: Watch) -> None:
    """Call `watch` at every change of health; raise where the engine never becomes ready."""
    seen, was_ready = None, False
    while True:
        health = service.health
        if health != seen:
            watch(health)
            seen = health
        was_ready = was_ready or health.ready
        if health.state == "failed" and not was_ready:
            raise getattr(service, "failure", None) or EngineError(health.detail)
        await asyncio.sleep(POLL_S)


def run(service: EngineService, settings: ServerSettings, listener: socket.socket, watch: Watch) -> int:
    """`serve` in an event loop of its own."""
    import uvloop

    sys.setswitchinterval(SWITCH_S)
    keep_freed_memory()
    hide()
    return uvloop.run(serve(service, settings, listener, watch))
