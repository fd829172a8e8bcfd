"""A request's pictures that come when a test lets them, in place of the fetcher and the decoders."""

import asyncio
import gc
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from PIL import Image

from snugvl.core.messages import Picture
from snugvl.errors import ImageError
from snugvl.server.media.budget import PIXEL_BYTES
from snugvl.server.media.loading import MediaSettings
from tests.server.media.single import Loader

LIMIT = 100  # pixels of all pictures
FILES = 64  # bytes beside them


class Web:
    """`http://NAME/PIXELS` comes when the test lets it.

    Attributes:
        decoded: names of what was given to a decoder, in that order.
    """

    def __init__(self) -> None:
        self._gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._broken: set[str] = set()
        self.decoded: list[str] = []

    async def let(self, *names: str) -> None:
        """These come, and all that follows of it happens."""
        for name in names:
            self._gates[name].set()
        await turns()

    async def fail(self, name: str) -> None:
        """Of this nothing comes."""
        self._broken.add(name)
        await self.let(name)

    def turns(self) -> None:
        """Everything at once."""

    async def fetch(self, url: str, *, max_bytes: int, **_: object) -> bytes:
        name = name_of(url)
        await self._gates[name].wait()
        if name in self._broken:
            raise ImageError(f"{name} did not come")
        return url.encode()

    async def size(self, data: bytes, *_: object) -> int:
        return pixels_of(data)

    async def picture(self, data: bytes, *_: object, **__: object) -> Picture:
        self.decoded.append(name_of(data.decode()))
        await asyncio.sleep(0)
        return Picture(Image.new("RGB", (pixels_of(data), 1)))

    async def video(self, data: bytes, *_: object) -> tuple[list[Image.Image], list[float]]:
        self.decoded.append(name_of(data.decode()))
        await self._gates["frames"].wait()
        return [Image.new("RGB", (1, 1))], [0.0]

    def close(self) -> None:
        """Nothing is open."""


def name_of(url: str) -> str:
    return url.split("/")[2]


def pixels_of(data: bytes) -> int:
    return int(data.decode().split("/")[3])


async def turns() -> None:
    """All that can happen now has happened, but for hashes, which a thread makes."""
    for _ in range(50):
        await asyncio.sleep(0)


def run(work: Callable[[Loader, Web], Awaitable[None]]) -> None:
    """Runs it, and sees that nothing is left behind."""

    async def clean() -> None:
        web = Web()
        settings = replace(MediaSettings(), max_live_bytes=PIXEL_BYTES * LIMIT + FILES)
        intake = Loader(settings, fetcher=web)  # type: ignore[arg-type]
        intake._pictures = intake._videos = web  # type: ignore[assignment]
        await work(intake, web)
        await turns()  # until then the loop holds what was awaited last
        gc.collect()  # errors that a test has seen hold its frame, and all pictures in it
        room = intake._live
        assert room.used == 0
        assert not room._demand
        assert not room._waiting
        assert not intake._encoded

    asyncio.run(clean())
