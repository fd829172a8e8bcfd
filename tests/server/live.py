"""A server on a real socket in this process, for tests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from snugvl.backends.service import EngineService
from snugvl.server.app import create_app
from snugvl.server.context import Context
from snugvl.server.intake.intake import Intake
from snugvl.server.settings import ServerSettings


@contextmanager
def live(service: EngineService, settings: ServerSettings | None = None) -> Iterator[str]:
    """The base URL ("http://127.0.0.1:PORT") of a server that runs in a thread until the block ends."""
    context = Context(service, settings or ServerSettings(), Intake())
    server = uvicorn.Server(
        uvicorn.Config(create_app(context), port=0, log_level="warning", lifespan="on", ws="none")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
