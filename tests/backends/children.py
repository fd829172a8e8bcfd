"""What the tests of engines share that live in other processes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psutil

from snugvl.backends.supervisor import Supervised, Supervision
from tests.patience import NEVER_S

QUICK = Supervision(ping_s=0.05, snapshot_s=0.02, backoff_s=0.05, watchdog_s=NEVER_S)
Engine = TypeVar("Engine", bound=Supervised[Any])


def processes(service: Any) -> set[psutil.Process]:
    """Everything that belongs to the engine now."""
    if service.pid is None:
        return set()
    try:
        nanny = psutil.Process(service.pid)
        return {nanny, *nanny.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


@asynccontextmanager
async def started(service: Engine) -> AsyncIterator[Engine]:
    """Started; closed at the end, and nothing is left of it."""
    family: set[psutil.Process] = set()
    await service.start()
    try:
        yield service
        family |= processes(service)
    finally:
        family |= processes(service)
        await service.close()
        assert not [process for process in family if process.is_running()]
