"""A server on a real socket in this process, for tests."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute

from snugvl.core.service import EngineService
from snugvl.server.app import create_app
from snugvl.server.connection import address_of, listen, uvicorn_config
from snugvl.server.context import Context
from snugvl.server.media.decoders import Decoders, memory_for_pictures
from snugvl.server.media.fetch import Fetcher
from snugvl.server.media.loading import MediaLoader, MediaSettings
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S


@cache
def decoders() -> Decoders:
    """For the pictures of every server in this process: each would start processes of its own."""
    settings = MediaSettings()
    return Decoders("pictures", settings.workers, memory_for_pictures(settings.image))


class Shared(MediaLoader):
    """Its decoders outlive it; what one of its own does at its end, `tests/server/media` sees."""

    def __init__(self, settings: MediaSettings | None = None, *, fetcher: Fetcher | None = None) -> None:
        super().__init__(settings, fetcher=fetcher)
        self._pictures.close()
        self._pictures = decoders()

    async def close(self) -> None:
        """All but the pictures' decoders."""
        self._pictures = Decoders("pictures", 1, 0)  # which never starts
        await super().close()


class Prompt(uvicorn.Server):
    """Ends when it is told to. Uvicorn's own looks each tenth of a second, and waits another for connections
    although there are none: a thousand tests would wait for minutes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # which tells the time in the headers, to the second
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            return await super().shutdown(sockets)
        for each in (*self.servers, *(sockets or ())):
            each.close()
        return await self.lifespan.shutdown()

    def end(self) -> None:
        """Called by another thread."""
        self.should_exit = True
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._told.set)


# By the identity of a router of `create_app`: its routes in the first app that had it.
_included: dict[int, BaseRoute] = {}


def _share_routes(app: FastAPI) -> None:
    """Let an app have the routes that FastAPI has made for another one of this process.

    It makes those of a router when the first request comes, from all their annotations: 25 ms of a server.
    """
    app.router.routes[:] = [
        _included.setdefault(id(route.original_router), route) if hasattr(route, "original_router") else route
        for route in app.router.routes
    ]


@contextmanager
def live(
    service: EngineService, settings: ServerSettings | None = None, *, app: FastAPI | None = None
) -> Iterator[str]:
    """The base URL ("http://127.0.0.1:PORT") of a server that runs in a thread until the block ends.

    `app`: in place of one that serves `service`.
    """
    settings = replace(settings or ServerSettings(), port=0)
    if app is None:
        app = create_app(Context(service, settings, Shared.from_settings(settings)))
        _share_routes(app)
    listener = listen(settings)
    server = Prompt(uvicorn_config(app, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.001)
        yield f"http://127.0.0.1:{address_of(listener)[1]}"
    finally:
        server.end()
        thread.join(PATIENCE_S)


@contextmanager
def asking(service: EngineService) -> Iterator[httpx.Client]:
    """A client of a live server of `service`, whose model is named pocket."""
    with (
        live(service, ServerSettings(names=("pocket",))) as base,
        httpx.Client(base_url=base, timeout=PATIENCE_S) as client,
    ):
        yield client
