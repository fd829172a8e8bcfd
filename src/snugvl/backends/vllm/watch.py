"""A vLLM server as seen over HTTP: when it is ready, and when it no longer is."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from snugvl.backends.supervised import Supervision
from snugvl.backends.vllm.api import NobodyThere, NotVllm, Served, Unreachable, VllmApi
from snugvl.errors import SnugvlError
from snugvl.inputs.tools.forms import MARKERS

POLL_S = 0.25  # between two looks at a server that is starting
HUNG = "vLLM hung"
LOOK_S = 5.0  # a look at a server that is starting may take


async def until_ready(
    api: VllmApi,
    wanted: str,
    watchdog_s: float,
    waited: Callable[[float], Awaitable[None]] | None = None,
) -> Served:
    """Wait until vLLM serves the model. `waited` is told of every pause, in seconds, and may end it.

    A server that is loading refuses connections: one that takes them and says nothing hangs.

    Raises:
        NotVllm: something else answers.
        Unreachable: it has taken connections for so long without an answer.
    """
    silent_s = 0.0
    while True:
        try:
            if await api.healthy(min(LOOK_S, watchdog_s)):
                return await api.served(wanted)
        except NobodyThere:
            silent_s = 0.0
        except Unreachable:
            silent_s += min(LOOK_S, watchdog_s)
            if silent_s >= watchdog_s:
                raise
        await asyncio.sleep(POLL_S)
        if waited is not None:
            await waited(POLL_S)


async def marker_tokens(api: VllmApi) -> dict[str, int]:
    """Ids of the markers of tool calls, of any form, that are tokens of their own."""
    found = {}
    for text in MARKERS:
        ids = await api.tokens({"prompt": text, "add_special_tokens": False})
        if len(ids) == 1:
            found[text] = ids[0]
    return found


class Watchdog:
    """Looks at a server that is ready, until it isn't. Silence is counted in looks, not by the clock."""

    def __init__(
        self,
        api: VllmApi,
        supervision: Supervision,
        running: Callable[[], int],
        well: Callable[[], None] = lambda: None,
    ) -> None:
        """`running`: requests under way; `well` is called whenever it said that it is."""
        self._api = api
        self._supervision = supervision
        self._running = running
        self._well = well
        self._roused = asyncio.Event()
        self._silent_s = self._stalled_s = 0.0

    def alive(self) -> None:
        """A piece of an answer came."""
        self._stalled_s = 0.0

    async def doubted(self) -> bool:
        """An answer failed: whether the server itself is well. If it isn't, `bark` knows at once."""
        with suppress(SnugvlError):
            if await self._api.healthy(LOOK_S):
                return True
        self._roused.set()
        return False

    async def bark(self) -> str:
        """Wait until it hangs, is dead or gone; why, as half a sentence."""
        limit_s, ping_s = self._supervision.watchdog_s, self._supervision.ping_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ping_s):
                    await self._roused.wait()
            self._roused.clear()
            try:
                if not await self._api.healthy(min(LOOK_S, limit_s)):
                    return "vLLM's engine died"
                self._silent_s = 0.0
                self._well()
            except NotVllm as error:
                return str(error)
            except NobodyThere as error:
                return f"vLLM is gone: {error}"
            except Unreachable:
                self._silent_s += ping_s + min(LOOK_S, limit_s)
                if self._silent_s > limit_s:
                    return f"{HUNG}: it has not answered for {self._silent_s:.1f} s"
            self._stalled_s = self._stalled_s + ping_s if self._running() else 0.0
            if self._stalled_s > limit_s:
                return f"{HUNG}: nothing came of {self._running()} running requests for {limit_s:g} s"
