"""Room for decoded pictures: taken before one is decoded, until nobody holds it.

Who finds none waits, first come, first served, for so long; and whoever holds pictures while it waits for
more is refused at the end of that, so two requests never wait for each other for ever.
"""

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from PIL import Image

from snugvl.errors import ImageTooLarge, QueueFull
from snugvl.server.record import REQUEST_RECORD

PIXEL_BYTES = 3


class PixelRoom:
    """So many bytes, or whatever is counted. Used from one thread; pictures may be let go from any."""

    def __init__(self, limit: int, wait_s: float | None) -> None:
        """`wait_s`: that somebody waits at most; None: as long as it takes, for what always ends, and
        whoever asks for more than there is gets it piece by piece.
        """
        self._limit = limit
        self._wait_s = wait_s
        self._used = 0
        self._demand: Counter[str] = Counter()  # by requests: what they have and what they wait for
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._holders: dict[int, tuple[weakref.ref[Image.Image], str, int]] = {}
        self._released: deque[int] = deque()

    @property
    def used(self) -> int:
        """Of it, now."""
        self._settle()
        return self._used

    @asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator["PixelShare"]:
        """Room for `count` while the block runs, and beyond it for the pictures that it keeps.

        One share always fits when there is no other.

        Raises:
            QueueFull: others held it all for too long.
            ImageTooLarge: the pictures of this request alone don't fit.
        """
        record = REQUEST_RECORD.get() if self._wait_s is not None else None
        share = PixelShare(self, count, record.id if record else "")
        await self._take(count, share.owner)
        try:
            yield share
        finally:
            self._give(share.count, share.owner)

    async def _take(self, count: int, owner: str) -> None:
        self._settle()
        demand = self._demand[owner]
        if owner and demand and demand + count > self._limit:
            raise ImageTooLarge(
                f"the pictures of this request take more than {self._limit:,} bytes when they are decoded "
                f"({PIXEL_BYTES} for each pixel); send fewer, or scale them down"
            )
        self._demand[owner] += count
        if not self._waiting and self._fits(count):
            self._used += count
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, count))
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._used -= count  # it came in the same moment
            else:
                self._waiting.remove((turn, count))
            self._forget(count, owner)
            self._admit()
            if not isinstance(error, TimeoutError):
                raise
            raise QueueFull(
                f"pictures of running requests hold {self._used:,} of {self._limit:,} bytes; "
                "try again shortly"
            ) from None

    def _fits(self, count: int) -> bool:
        return not self._used or self._used + count <= self._limit

    def _give(self, count: int, owner: str) -> None:
        self._used -= count
        self._forget(count, owner)
        self._admit()

    def _forget(self, count: int, owner: str) -> None:
        self._demand[owner] -= count
        if not self._demand[owner]:
            del self._demand[owner]

    def _admit(self) -> None:
        """Let in whoever fits, in their order."""
        while self._waiting:
            turn, count = self._waiting[0]
            if turn.done() or not self._fits(count):  # done: cancelled; whoever waited for it takes it out
                break
            self._waiting.popleft()
            self._used += count
            turn.set_result(None)

    def _keep(self, image: Image.Image, count: int, owner: str) -> None:
        loop = asyncio.get_running_loop()

        def let_go(reference: "weakref.ref[Image.Image]") -> None:
            self._released.append(id(reference))
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._settle)

        reference = weakref.ref(image, let_go)
        self._holders[id(reference)] = reference, owner, count

    def _settle(self) -> None:
        """Give back what pictures took that are gone."""
        while self._released:
            _, owner, count = self._holders.pop(self._released.popleft())
            self._give(count, owner)


class PixelShare:
    """A part of a room. `count`: what of it is not kept by pictures."""

    def __init__(self, room: PixelRoom, count: int, owner: str) -> None:
        self._room = room
        self.count = count
        self.owner = owner

    def keep(self, images: Iterable[Image.Image]) -> None:
        """Leave to these what they take, until nobody holds them."""
        for image in images:
            count = min(PIXEL_BYTES * image.width * image.height, self.count)
            self.count -= count
            self._room._keep(image, count, self.owner)
