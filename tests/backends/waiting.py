"""Waiting for a child engine: until something holds, or until it is plain that it only ever dies."""

from collections.abc import Callable
from typing import Protocol

from snugvl.backends.supervisor import Lives
from snugvl.core.service import Health
from tests.patience import until_async

HOPELESS = 4  # deaths in a row: a child that can't even be imported starts again and again, for ever


class Living(Protocol):
    """Our supervised engine, or vLLM's."""

    _lives: Lives

    @property
    def health(self) -> Health: ...


async def until(service: Living, true: Callable[[], object]) -> None:
    """Wait in the event loop until it holds; a child that dies again and again meanwhile is a failure.

    Deaths before this wait, which a test caused, don't count.
    """
    most = service._lives.deaths + HOPELESS
    await until_async(lambda: true() or service._lives.deaths >= most)
    assert true(), f"the child died {HOPELESS} times in a row: {service.health.detail}"


async def ready(service: Living) -> None:
    """Wait until it serves; what ends it for good is a failure at once."""
    await until(service, lambda: service.health.state in ("ready", "failed"))
    assert service.health.ready, service.health.detail
