"""Damaged files of every kind: a picture, or an error of ours, and the decoder lives on."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from snugvl.errors import ImageError
from snugvl.server.media.loading import MediaSettings
from tests.server.media.films import film
from tests.server.media.pictures import animation, encoded
from tests.server.media.single import Loader

EXTREMES = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f")


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [encoded(kind, (40, 30)) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")]


@pytest.fixture(scope="module")
def videos() -> list[bytes]:
    return [
        *(animation(kind) for kind in ("GIF", "PNG", "WEBP", "AVIF")),
        film("mp4", "libx264"),
        film("webm", "libvpx"),
        film("avi", "mjpeg", pixels="yuvj420p"),
    ]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, lost, added, or cut off."""
    result = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8, 30))):
        place, what = chance.randrange(len(result)), chance.random()
        if what < 0.6:
            result[place] = chance.randrange(256)
        elif what < 0.75:
            result[place : place + 4] = chance.choice(EXTREMES)
        elif what < 0.85:
            del result[place : place + chance.randrange(1, 20)]
        elif what < 0.95:
            result[place:place] = chance.randbytes(chance.randrange(1, 20))
        else:
            del result[place + 1 :]
        result = result or bytearray(b"x")
    return bytes(result)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample("0")
def test_damaged_files(seed: int, pictures: list[bytes], videos: list[bytes]) -> None:
    chance = random.Random(seed)

    async def opened(read: Callable[..., Coroutine[Any, Any, Any]], data: bytes) -> bool:
        try:
            await read(data, field="file")
        except ImageError as error:
            assert "failed on it" not in str(error), "the decoder crashed"  # noqa: PT017
            assert "took longer" not in str(error)  # noqa: PT017
            return False
        return True

    async def run() -> None:
        intake = Loader()
        try:
            jobs = [opened(intake.picture_bytes, damaged(d, chance)) for d in pictures * 15]
            jobs += [opened(intake.video_bytes, damaged(d, chance)) for d in videos * 5]
            outcomes = await asyncio.gather(*jobs)
            assert set(outcomes) == {True, False}
            assert len(intake._pictures._processes) <= MediaSettings().workers
            assert len(intake._videos._processes) == 1
        finally:
            await intake.close()

    asyncio.run(run())
