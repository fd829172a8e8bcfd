"""Memory for decoded pictures: taken before one is decoded, until it is let go.

Requests take turns: one begins where all its pictures fit into what requests share, or where nobody holds
any. Until then it holds nothing, so no two hold half each and wait for each other. A request that doesn't fit
waits, first come, first served, for so long. A request that has begun and needs more than was known (a video)
takes it beyond what is shared, up to the limit, or is refused after that time.
"""

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count

from PIL import Image

from snugvl.errors import ImageTooLarge, QueueFull

PIXEL_BYTES = 3


class PixelBudget:
    """A budget of bytes (or of pixels). Used from one thread; pictures may be let go from any."""

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
        self._demand: Counter[str] = Counter()  # by requests: what they hold and wait for
        self._held: Counter[str] = Counter()  # by requests: what they hold
        self._waiting: dict[str, list[_Turn]] = {}  # by requests that hold nothing, in their order
        self._more: deque[_Turn] = deque()  # of requests that hold something
        self._holders: dict[int, tuple[weakref.ref[Image.Image], str, int]] = {}
        self._released: deque[int] = deque()

    @property
    def used(self) -> int:
        """Bytes of it that are used now."""
        self._settle()
        return self._used

    @asynccontextmanager
    async def reserve(self, count: int, file: int = 0, owner: str = "") -> AsyncIterator["PixelShare"]:
        """Memory for `count` while the block runs, and beyond it for the pictures that it keeps.

        One share always fits when there is no other.

        Args:
            file: that is taken beside it while the block runs, and never kept.
            owner: the request that asks; empty for one that stands alone.

        Raises:
            QueueFull: others held it all for too long.
            ImageTooLarge: the pictures of this request alone don't fit.
        """
        share = PixelShare(self, count, owner or f"alone {next(self._alone)}")
        self._settle()
        self.check(share.owner, count, file)
        self._demand[share.owner] += count + file
        try:
            await self._take(count + file, share.owner)
            try:
                yield share
            finally:
                self._give(share.count + file, share.owner)
        finally:
            self._forget(share.count + file, share.owner)

    def check(self, owner: str, count: int, file: int, *, alone: bool = True) -> None:
        """Refuse what never fits beside what its request has.

        Args:
            count, file: that are wanted, as of `reserve`.
            alone: whether that is one picture, which fits where its request has no other.

        Raises:
            ImageTooLarge: with the limit.
        """
        held = self._demand[owner]
        if (held or not alone) and held + count + file > self._limit:
            raise ImageTooLarge(
                f"the pictures of this request take more than {self._limit:,} bytes when they are decoded "
                f"({PIXEL_BYTES} for each pixel); send fewer, or scale them down"
            )

    async def _take(self, count: int, owner: str) -> None:
        if not count:
            return
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
        return begun + self._demand[owner] <= self._shared

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
                else:
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
                self._give(count, owner)  # first: what is used is also wanted
                self._forget(count, owner)


@dataclass(slots=True, eq=False)
class _Turn:
    """A request that waits until there is memory for so much; then `come` has a result."""

    come: "asyncio.Future[None]"
    count: int
    owner: str


class PixelShare:
    """A part of a budget. `count`: what of it is not kept by pictures."""

    def __init__(self, budget: PixelBudget, count: int, owner: str) -> None:
        self._budget = budget
        self.count = count
        self.owner = owner

    def keep(self, images: Iterable[Image.Image]) -> None:
        """Leave their part of the room to these images for as long as they are in use."""
        for image in images:
            count = min(PIXEL_BYTES * image.width * image.height, self.count)
            self.count -= count
            self._budget._keep(image, count, self.owner)
