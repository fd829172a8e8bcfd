"""Decoded pictures: never more at once than there is room for, whoever asks and however many."""

import asyncio
import gc
import weakref
import zlib
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from snugvl.errors import ImageError, ImageTooLarge, QueueFull
from snugvl.server.fields import together
from snugvl.server.media.budget import PixelBudget
from snugvl.server.media.decoders import Decoders
from snugvl.server.media.loading import MediaSettings
from tests.server.media.pictures import encoded, png
from tests.server.media.pool import LIMITS
from tests.server.media.single import Loader
from tests.server.media.web import turns

SIDE = 100
BYTES = 3 * SIDE * SIDE
PNG = encoded("PNG", (SIDE, SIDE))
PIXELS = zlib.compress(bytes(64))  # the first of any picture: only heads are read


def intake_of(pictures: float, wait_s: float = 10.0) -> Loader:
    return Loader(replace(MediaSettings(), max_live_bytes=int(pictures * BYTES) + len(PNG), wait_s=wait_s))


async def one(intake: Loader, request: str, data: bytes = PNG) -> Any:
    return await intake.picture_bytes(data, field="a", owner=request)


def run(work: Any, intake: Loader) -> None:
    async def closed() -> None:
        try:
            await work
        finally:
            await intake.close()

    asyncio.run(closed())


def test_room_is_taken_before_a_picture_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    intake, most, alive = intake_of(2), 0, 0
    decode = Decoders.picture

    async def watched(self: Decoders, *args: Any, **rest: Any) -> Any:
        nonlocal most, alive
        alive += 1
        most = max(most, alive)
        assert intake._live.used >= alive * BYTES
        try:
            return await decode(self, *args, **rest)
        finally:
            alive -= 1

    monkeypatch.setattr(Decoders, "picture", watched)

    async def work() -> None:
        async def user(index: int) -> tuple[int, int]:
            return (await one(intake, f"{index}")).image.size

        found = await asyncio.gather(*[asyncio.create_task(user(i)) for i in range(20)])
        assert found == [(SIDE, SIDE)] * 20
        assert most <= 2
        assert intake._live.used == 0

    run(work(), intake)


def test_who_waits_is_let_in_when_a_picture_is_let_go() -> None:
    intake = intake_of(1.5)

    async def work() -> None:
        held = [await one(intake, "1")]
        assert intake._live.used == BYTES
        waits = asyncio.create_task(one(intake, "2"))
        await asyncio.sleep(0.3)
        assert not waits.done()
        held.clear()
        assert (await waits).image.size == (SIDE, SIDE)

    run(work(), intake)


def test_requests_that_hold_pictures_do_not_wait_for_each_other_for_ever() -> None:
    intake = intake_of(3.5, wait_s=0.5)

    async def work() -> None:
        all_hold_one = asyncio.Barrier(3)

        async def user(index: int) -> int:
            first = await one(intake, f"{index}")
            await all_hold_one.wait()
            held = [first, await one(intake, f"{index}"), await one(intake, f"{index}")]
            return len(held)

        users = [asyncio.create_task(user(index)) for index in range(3)]
        found = await asyncio.gather(*users, return_exceptions=True)
        refused = [error for error in found if isinstance(error, QueueFull)]
        assert refused
        assert all("try again" in str(error) for error in refused)

    run(work(), intake)


def test_a_request_whose_pictures_never_fit_is_told_at_once() -> None:
    intake = intake_of(2.5)

    async def work() -> None:
        held = [await one(intake, "1"), await one(intake, "1")]
        with pytest.raises(ImageTooLarge, match="pictures of this request take more than 75,"):
            await one(intake, "1")
        held.clear()

    run(work(), intake)


def test_one_picture_alone_always_fits() -> None:
    intake = intake_of(0.1)

    async def work() -> None:
        assert (await one(intake, "1")).image.size == (SIDE, SIDE)

    run(work(), intake)


def test_who_leaves_while_waiting_leaves_nothing() -> None:
    async def work() -> None:
        room = PixelBudget(10, 10.0)
        async with room.reserve(8):
            waits = [asyncio.create_task(take(room, 5)) for _ in range(3)]
            await asyncio.sleep(0.01)
            waits[0].cancel()
            await asyncio.sleep(0.01)
        await asyncio.gather(*waits[1:])
        assert room.used == 0
        assert not room._demand
        assert not room._waiting

    async def take(room: PixelBudget, count: int) -> None:
        async with room.reserve(count):
            await asyncio.sleep(0.01)

    asyncio.run(work())


def test_requests_that_do_not_fit_together_take_turns_and_none_is_refused() -> None:
    """Four who want three quarters each: side by side each would hold some and wait for the others."""

    async def work() -> None:
        room, most, order = PixelBudget(1000, 30.0, 100), 0, list[str]()

        async def user(name: str, start: asyncio.Event) -> None:
            nonlocal most
            async with room.reserve(75, 2, name):
                most = max(most, room.used)
                await start.wait()
                await asyncio.sleep(0)
            order.append(name)

        starts = [asyncio.Event() for _ in range(4)]
        users = [asyncio.create_task(user(f"{i}", start)) for i, start in enumerate(starts)]
        for start in reversed(starts):  # the last could end first, were it its turn
            await turns()
            start.set()
        await asyncio.gather(*users)
        assert order == ["0", "1", "2", "3"]
        assert most == 75 + 2, "one request at a time"
        assert room.used == 0
        assert not any((room._demand, room._held, room._waiting, room._more))

    asyncio.run(work())


def test_a_picture_that_is_let_go_makes_room_for_as_much_and_no_more() -> None:
    """Pictures go when nobody has them any more, which is not when a block ends."""

    async def work() -> None:
        room, most, held = PixelBudget(160, 30.0, 100), 0, [Image.new("RGB", (30, 1))]

        async def user(name: str) -> None:
            nonlocal most
            async with room.reserve(75, 2, name):
                most = max(most, room.used)
                await turns()

        async with room.reserve(90, owner="first") as share:
            share.keep(held)
        users = [asyncio.create_task(user(f"{i}")) for i in range(5)]
        await turns()
        assert room.used == 90
        held.clear()
        await asyncio.gather(*users)
        assert most == 75 + 2, "one request at a time"
        assert not any((room.used, room._demand, room._held, room._waiting, room._more))

    asyncio.run(work())


def test_a_request_that_needs_more_than_is_shared_has_its_turn_alone() -> None:
    async def work() -> None:
        room, seen = PixelBudget(1000, 30.0, 100), list[int]()

        async def user(name: str, count: int) -> None:
            async with room.reserve(count, 0, name):
                await turns()
                seen.append(room.used)

        await asyncio.gather(user("small", 30), user("huge", 900), user("other", 40))
        assert seen == [30, 900, 40]
        assert room.used == 0

    asyncio.run(work())


def test_who_has_begun_is_not_behind_those_who_wait_for_it() -> None:
    """A video, whose size nobody knew, of a request whose picture is there."""

    async def work() -> None:
        room = PixelBudget(200, 30.0, 100)
        async with room.reserve(60, owner="1"):
            waits = asyncio.create_task(other(room))
            await turns()
            assert not waits.done()
            async with room.reserve(90, owner="1"):
                assert room.used == 150
            assert not waits.done()
        await waits

    async def other(room: PixelBudget) -> None:
        async with room.reserve(50, owner="2"):
            pass

    asyncio.run(work())


def test_who_leaves_while_waiting_for_more_is_in_nobodys_way() -> None:
    async def work() -> None:
        room, more = PixelBudget(200, 30.0, 100), asyncio.Event()

        async def user(name: str, first: int, second: int) -> None:
            async with room.reserve(first, owner=name):
                await more.wait()
                async with room.reserve(second, owner=name):
                    pass

        leaves, stays = (asyncio.create_task(user(*each)) for each in (("1", 60, 130), ("2", 40, 110)))
        await turns()
        more.set()
        await turns()
        assert len(room._more) == 2
        leaves.cancel()
        await stays
        assert room.used == 0
        assert not room._more

    asyncio.run(work())


def test_defaults_hold_what_all_share_below_256_mib_and_the_largest_picture_fits() -> None:
    settings = MediaSettings()
    assert 3 * settings.image.max_pixels <= settings.shared_bytes <= 192 << 20
    assert settings.max_live_bytes >= 512 << 20


def test_the_head_of_a_picture_tells_its_size(decoders: Decoders) -> None:
    async def work() -> None:
        for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"):
            assert await decoders.size(encoded(kind, (20, 10)), LIMITS, "it") == 200, kind
        assert await decoders.size(png(8000, 7936, PIXELS), LIMITS, "it") == 8000 * 7936
        assert await decoders.size(png(80000, 7936, PIXELS), LIMITS, "it") == 0, "which won't be decoded"
        assert await decoders.size(b"no picture", LIMITS, "it") == 0

    asyncio.run(work())


def test_a_picture_is_never_larger_than_its_head_said(decoders: Decoders) -> None:
    async def work() -> None:
        with pytest.raises(ImageError, match="could not be decoded"):
            await decoders.picture(PNG, LIMITS, 20.0, "it", SIDE * SIDE - 1)
        assert (await decoders.picture(PNG, LIMITS, 20.0, "it", SIDE * SIDE)).image.size == (SIDE, SIDE)

    asyncio.run(work())


def test_an_error_keeps_no_results_of_others() -> None:
    class Result:
        pass

    kept: list[weakref.ref[Result]] = []

    async def good() -> Result:
        result = Result()
        kept.append(weakref.ref(result))
        return result

    async def bad() -> Result:
        await asyncio.sleep(0.01)
        raise ImageError("no")

    async def work() -> None:
        with pytest.raises(ImageError) as caught:
            await together([good(), bad()])
        assert caught.value.__traceback__ is not None
        assert kept[0]() is None

    gc.disable()
    try:
        asyncio.run(work())
    finally:
        gc.enable()
