"""Room for decoded pictures: taken before one is decoded, until nobody holds it.

Who finds none waits, first come, first served, for so long; and whoever holds pictures while it waits for
more is refused at the end of that, so two requests never wait for each other for ever.

Pictures that one request fetches at once are announced first. None takes room before the sizes of all of them
are known, so that those that don't fit together are refused before the first is decoded. Whoever waits for
that holds no room, and whoever fails, leaves or turns out to be none is no longer waited for.
"""

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

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
        self._siblings: dict[str, _Siblings] = {}  # by requests of which pictures are coming
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._holders: dict[int, tuple[weakref.ref[Image.Image], str, int]] = {}
        self._released: deque[int] = deque()

    @property
    def used(self) -> int:
        """Of it, now."""
        self._settle()
        return self._used

    @contextmanager
    def announce(self) -> Iterator["Coming"]:
        """Let the request's other pictures wait for the size of one that is coming.

        They do until it has asked for room, says that it won't, or the block ends. `together` announces all
        in one turn of the event loop, or as many as it is nested (three); a size, which a thread asks a
        process for, comes later than that, so all are announced before the first is known.
        """
        owner = self._owner()
        siblings = self._siblings.setdefault(owner, _Siblings()) if owner else _Siblings()
        coming = Coming(siblings)
        try:
            yield coming
        finally:
            coming.arrived()
            siblings.count -= 1
            if not siblings.count:
                self._siblings.pop(owner, None)

    @asynccontextmanager
    async def reserve(
        self, count: int, file: int = 0, coming: "Coming | None" = None
    ) -> AsyncIterator["PixelShare"]:
        """Room for `count` while the block runs, and beyond it for the pictures that it keeps.

        One share always fits when there is no other.

        Args:
            file: that is taken beside it while the block runs, and never kept.
            coming: what was announced; it takes room when the sizes of all others are known.

        Raises:
            QueueFull: others held it all for too long.
            ImageTooLarge: the pictures of this request alone don't fit.
        """
        share = PixelShare(self, count, self._owner())
        self._want(share, file)
        try:
            if coming is not None:
                coming.arrived()
                await self._all_known(coming.siblings)
            await self._take(count + file)
            try:
                yield share
            finally:
                self._give(share.count + file)
        finally:
            self._forget(share.count, share.owner)

    def _owner(self) -> str:
        """The request that asks; empty where whoever asks stands alone."""
        record = REQUEST_RECORD.get() if self._wait_s is not None else None
        return record.id if record else ""

    def _want(self, share: "PixelShare", file: int) -> None:
        """Count it to what its request has and waits for, as soon as its size is known."""
        self._settle()
        owner, siblings = share.owner, self._siblings.get(share.owner) or _Siblings()
        # Files go when their pictures are decoded: there must be room for the largest beside all pictures.
        siblings.file = max(siblings.file, file)
        demand = self._demand[owner]
        if owner and demand and demand + share.count + siblings.file > self._limit:
            siblings.refuse()
        if siblings.refused:
            raise self._too_large()
        self._demand[owner] += share.count

    async def _all_known(self, siblings: "_Siblings") -> None:
        while siblings.unknown and not siblings.refused:
            await siblings.changed.wait()
        if siblings.refused:
            raise self._too_large()

    def _too_large(self) -> ImageTooLarge:
        return ImageTooLarge(
            f"the pictures of this request take more than {self._limit:,} bytes when they are decoded "
            f"({PIXEL_BYTES} for each pixel); send fewer, or scale them down"
        )

    async def _take(self, count: int) -> None:
        self._settle()
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
            self._admit()
            if not isinstance(error, TimeoutError):
                raise
            raise QueueFull(
                f"pictures of running requests hold {self._used:,} of {self._limit:,} bytes; "
                "try again shortly"
            ) from None

    def _fits(self, count: int) -> bool:
        return not self._used or self._used + count <= self._limit

    def _give(self, count: int) -> None:
        self._used -= count
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
            self._forget(count, owner)
            self._give(count)


class _Siblings:
    """Pictures of one request that were announced, from the first until the last of them has ended.

    Attributes:
        count, unknown: how many are there; of how many nobody knows the size as yet.
        file: bytes of their largest file.
        refused: one of them didn't fit beside the others, so none is decoded any more.
        changed: set while there is nothing to wait for.
    """

    def __init__(self) -> None:
        self.count = 0
        self.unknown = 0
        self.file = 0
        self.refused = False
        self.changed = asyncio.Event()

    def refuse(self) -> None:
        self.refused = True
        self.changed.set()


class Coming:
    """A picture that was announced."""

    def __init__(self, siblings: _Siblings) -> None:
        self.siblings = siblings
        self._waited_for = True
        siblings.count += 1
        siblings.unknown += 1
        siblings.changed.clear()

    def arrived(self) -> None:
        """Its size is known, or it has none: nobody waits for it any more. May be said twice."""
        if self._waited_for:
            self._waited_for = False
            self.siblings.unknown -= 1
            if not self.siblings.unknown:
                self.siblings.changed.set()


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
