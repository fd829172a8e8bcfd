"""A server on a real socket in this process, for tests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import uvicorn
from fastapi import FastAPI

from snugvl.core.service import EngineService
from snugvl.server.app import create_app
from snugvl.server.connection import address_of, listen, uvicorn_config
from snugvl.server.context import Context
from snugvl.server.intake.intake import Intake
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S


@contextmanager
def live(
    service: EngineService, settings: ServerSettings | None = None, *, app: FastAPI | None = None
) -> Iterator[str]:
    """The base URL ("http://127.0.0.1:PORT") of a server that runs in a thread until the block ends.

    `app`: in place of one that serves `service`.
    """
    settings = replace(settings or ServerSettings(), port=0)
    app = app or create_app(Context(service, settings, Intake.from_settings(settings)))
    listener = listen(settings)
    server = uvicorn.Server(uvicorn_config(app, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{address_of(listener)[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


@contextmanager
def asking(service: EngineService) -> Iterator[httpx.Client]:
    """A client of a live server of `service`, whose model is named pocket."""
    with (
        live(service, ServerSettings(names=("pocket",))) as base,
        httpx.Client(base_url=base, timeout=PATIENCE_S) as client,
    ):
        yield client
