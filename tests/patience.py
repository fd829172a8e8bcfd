"""How long a test waits for what must come.

Far longer than any busy machine takes: no outcome depends on it, and no hang lasts as long, as
`tests/watchdog.py` ends a test in which nothing moves any more.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 600.0
# For watchdogs that must not bite, however long a busy machine leaves a process without time.
NEVER_S = 86_400.0


def _pauses(seconds: float) -> Iterator[float]:
    """Pauses between looks, ever longer, so that what waits long doesn't seem to work."""
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < seconds:
        yield min(max(0.005, waited / 50), 0.25)
    raise AssertionError(f"waited {seconds:g} s in vain")


def until(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait in this thread until it holds."""
    pauses = _pauses(seconds)
    while not true():
        time.sleep(next(pauses))


async def until_async(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait in the event loop until it holds."""
    pauses = _pauses(seconds)
    while not true():
        await asyncio.sleep(next(pauses))
