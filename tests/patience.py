"""How long a test waits for what must come.

Far longer than any busy machine takes: it only ends a hang, and no outcome depends on it.
"""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 600.0
# For watchdogs that must not bite, however long a busy machine leaves a process without time.
NEVER_S = 86_400.0


def until(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait in this thread until it holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(0.005)


async def until_async(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait in the event loop until it holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        await asyncio.sleep(0.005)
