"""Room for decoded pictures: taken before one is decoded, until it is let go.

Requests take turns: one begins where all its pictures fit into what requests share, or where nobody holds
any; then all of them may come. Until then it holds nothing, so no two hold half each and wait for each
other. Who finds no room waits, first come, first served, for so long. Whoever has begun and needs more than
was known (a video, pictures one by one) takes it beyond what is shared, up to the limit, or is refused
after that time.

Pictures that one request fetches at once are announced first. None takes room before the sizes of all of them
are known, so that those that don't fit together are refused before the first is decoded. Whoever waits for
that holds no room, and whoever fails, leaves or turns out to be none is no longer waited for.
"""

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from PIL import Image

from snugvl.errors import ImageTooLarge, QueueFull
from snugvl.server.record import REQUEST_RECORD

PIXEL_BYTES = 3


class PixelRoom:
    """So many bytes, or whatever is counted. Used from one thread; pictures may be let go from any."""

    def __init__(self, limit: int, wait_s: float | None, shared: int | None = None) -> None:
        """`limit`: of one request; `shared`: of several together, `limit` if None.

        Args:
            wait_s: seconds that a picture waits at most; None: as long as it takes, for work that always
                ends, where more than the limit is had piece by piece.
        """
        self._limit = limit
        self._shared = limit if shared is None else min(shared, limit)
        self._wait_s = wait_s
        self._used = 0
        self._alone = count()
        # By requests: what they hold and wait for; what they hold; the largest of their files.
        self._demand: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._files: dict[str, int] = {}
        self._siblings: dict[str, _Siblings] = {}  # by requests of which pictures are coming
        self._waiting: dict[str, list[_Turn]] = {}  # by requests that hold nothing, in their order
        self._more: deque[_Turn] = deque()  # of requests that hold something
        self._holders: dict[int, tuple[weakref.ref[Image.Image], str, int]] = {}
        self._released: deque[int] = deque()

    @property
    def used(self) -> int:
        """Bytes of it that are used now."""
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
        share = PixelShare(self, count, self._owner() or f"alone {next(self._alone)}")
        self._want(share, file)
        try:
            if coming is not None:
                coming.arrived()
                await self._all_known(coming.siblings)
            await self._take(count + file, share.owner)
            try:
                yield share
            finally:
                self._give(share.count + file, share.owner)
        finally:
            self._forget(share.count, share.owner)

    def _owner(self) -> str:
        """Id of the request that asks; empty where pictures aren't counted by request."""
        record = REQUEST_RECORD.get() if self._wait_s is not None else None
        return record.id if record else ""

    def _want(self, share: "PixelShare", file: int) -> None:
        """Count it to what its request has and waits for, as soon as its size is known."""
        self._settle()
        owner, siblings = share.owner, self._siblings.get(share.owner) or _Siblings()
        # Files go when their pictures are decoded: there must be room for the largest beside all pictures.
        siblings.file = max(siblings.file, file)
        demand = self._demand[owner]
        if demand and demand + share.count + siblings.file > self._limit:
            siblings.refuse()
        if siblings.refused:
            raise self._too_large()
        self._demand[owner] += share.count
        self._files[owner] = max(self._files.get(owner, 0), file)

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

    async def _take(self, count: int, owner: str) -> None:
        self._settle()
        begun = self._held[owner] > 0
        if self._fits(count) if begun else not self._waiting and self._may_begin(owner):
            self._let_in(count, owner)
            return
        turn = _Turn(asyncio.get_running_loop().create_future(), count, owner)
        (self._more if begun else self._waiting.setdefault(owner, [])).append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn.come
        except BaseException as error:
            if turn.come.done() and not turn.come.cancelled():
                self._give(count, owner)  # it came in the same moment
            else:
                self._leave(turn)
            if not isinstance(error, TimeoutError):
                raise
            raise QueueFull(
                f"pictures of running requests hold {self._used:,} of {self._shared:,} bytes; "
                "try again shortly"
            ) from None

    def _fits(self, count: int) -> bool:
        return not self._used or self._used + count <= self._limit

    def _may_begin(self, owner: str) -> bool:
        """Whether all that a request wants fits beside what those want who have begun."""
        if not self._used:
            return True
        begun = sum(self._demand[each] for each in self._held)
        return begun + self._demand[owner] + self._files[owner] <= self._shared

    def _let_in(self, count: int, owner: str) -> None:
        self._used += count
        self._held[owner] += count

    def _give(self, count: int, owner: str) -> None:
        self._used -= count
        self._held[owner] -= count
        if not self._held[owner]:
            del self._held[owner]
        self._admit()

    def _forget(self, count: int, owner: str) -> None:
        self._demand[owner] -= count
        if not self._demand[owner]:
            del self._demand[owner]
            self._files.pop(owner, None)
        self._admit()

    def _leave(self, turn: "_Turn") -> None:
        if turn in self._more:
            self._more.remove(turn)
        elif turn in (turns := self._waiting.get(turn.owner, [])):
            turns.remove(turn)
            if not turns:
                del self._waiting[turn.owner]
        self._admit()

    def _admit(self) -> None:
        """Admit waiting pictures that fit, those of requests that have begun first, or none might ever
        end."""
        while self._more and not self._more[0].come.done() and self._fits(self._more[0].count):
            self._come(self._more.popleft())
        while self._waiting and self._may_begin(owner := next(iter(self._waiting))):
            for turn in self._waiting.pop(owner):
                if self._fits(turn.count) and not self._more:
                    self._come(turn)
                else:  # its file: it has room when those of others are decoded
                    self._more.append(turn)

    def _come(self, turn: "_Turn") -> None:
        if not turn.come.done():  # done: cancelled, and about to leave
            self._let_in(turn.count, turn.owner)
            turn.come.set_result(None)

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
            _, owner, count = self._holders.pop(self._released.popleft(), (None, "", 0))
            if owner:  # else it was let go before
                self._forget(count, owner)
                self._give(count, owner)


@dataclass(slots=True, eq=False)
class _Turn:
    """Somebody who waits until there is room for so much; then `come` has a result."""

    come: "asyncio.Future[None]"
    count: int
    owner: str


class _Siblings:
    """Pictures of one request that were announced, from the first until the last of them has ended.

    Attributes:
        count, unknown: number of them; number of those whose size isn't known yet.
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
        """Note that its size is known, or that it has none: it is no longer waited for. May be called
        twice."""
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
        """Leave their part of the room to these images for as long as they are in use."""
        for image in images:
            count = min(PIXEL_BYTES * image.width * image.height, self.count)
            self.count -= count
            self._room._keep(image, count, self.owner)
