"""Gives the GPU's memory back while nobody asks (vLLM's sleep mode), and takes it again for the next request.

    awake ── idle for so long ──► POST /sleep ──► asleep ── a request ──► POST /wake_up ──► awake

Level 1 keeps the weights in main memory. Level 2 drops them too; then waking reads them from disk again.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from snugvl.backends.vllm.api import VllmApi
from snugvl.errors import SnugvlError

logger = logging.getLogger("snugvl.vllm")

POLL_S = 1.0
MOVE_S = 600.0  # moving or reading all weights may take


class Sleeper:
    """Puts one server to sleep. `busy`: whether requests are under way or wait for it to wake."""

    def __init__(self, api: VllmApi, after_s: float, level: int, busy: Callable[[], bool]) -> None:
        self._api = api
        self._after_s = after_s
        self._level = level
        self._busy = busy
        self._lock = asyncio.Lock()
        self.asleep = False

    async def doze(self) -> None:
        """Sleep whenever nothing ran for long enough. Never ends, unless vLLM can't sleep."""
        busy_at = time.monotonic()
        pause_s = min(POLL_S, self._after_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            if self._busy() or self.asleep:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at >= self._after_s:
                try:
                    await self._sleep()
                except SnugvlError as error:
                    logger.warning("vLLM can't sleep, so it stays awake: %s", error)
                    return

    async def wake(self) -> None:
        """Return once it is awake.

        Raises:
            EngineError: it can't wake up.
        """
        async with self._lock:
            if not self.asleep:
                return
            if self._level == 1:
                await self._api.call("/wake_up", timeout_s=MOVE_S)
            else:
                await self._api.call("/wake_up?tags=weights", timeout_s=MOVE_S)
                await self._api.call("/collective_rpc", {"method": "reload_weights"}, timeout_s=MOVE_S)
                await self._api.call("/wake_up?tags=kv_cache", timeout_s=MOVE_S)
            self.asleep = False

    async def _sleep(self) -> None:
        async with self._lock:
            if self._busy():  # one came meanwhile
                return
            await self._api.call(f"/sleep?level={self._level}", timeout_s=MOVE_S)
            self.asleep = True
