"""Pictures of one request: none is decoded before it is known that all of them fit together."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from snugvl.core.messages import Picture, Video
from snugvl.errors import ImageError, ImageTooLarge, QueueFull, RequestError
from snugvl.server.fields import together
from snugvl.server.media import loading as module
from snugvl.server.media.budget import PIXEL_BYTES, PixelBudget
from snugvl.server.media.decoders import Decoders
from snugvl.server.media.loading import MediaRef
from snugvl.server.metrics import RequestNotes
from tests.server.media.pictures import png
from tests.server.media.single import Loader
from tests.server.media.test_budget import PIXELS
from tests.server.media.web import FILES, LIMIT, Web, name_of, run, turns

WORD = "take more than"
begin = asyncio.create_task


def all_of(intake: Loader, *urls: str, owner: str = "1") -> Coroutine[Any, Any, list[Any]]:
    return intake.all_of(*(MediaRef(f"http://{url}", url[0]) for url in urls), owner=owner)


@pytest.mark.parametrize("order", ["abcde", "edcba", "cadbe"])
def test_of_five_huge_pictures_none_is_decoded_however_they_come(order: str) -> None:
    async def work(intake: Loader, web: Web) -> None:
        task = begin(all_of(intake, "a/40", "b/40", "c/40", "d/40", "e/40"))
        await turns()
        for name in order[:2]:
            await web.let(name)
            assert not task.done()
        await web.let(order[2])
        with pytest.raises(ImageTooLarge, match=WORD):
            await task
        assert web.decoded == []

    run(work)


def test_who_is_known_last_is_counted_with_all_others() -> None:
    async def work(intake: Loader, web: Web) -> None:
        task = begin(all_of(intake, "a/30", "b/30", "c/30", "d/30"))
        await turns()
        await web.let("a", "c", "d")
        assert not task.done()
        await web.let("b")
        with pytest.raises(ImageTooLarge, match=WORD) as caught:
            await task
        assert caught.value.field == "b"
        assert web.decoded == []

    run(work)


def test_pictures_wait_for_the_sizes_of_their_siblings() -> None:
    async def work(intake: Loader, web: Web) -> None:
        task = begin(all_of(intake, "a/30", "b/30", "c/30"))
        await turns()
        await web.let("a")
        await web.let("c")
        assert web.decoded == []
        assert intake._live.used == 0
        assert intake._at_work.used == 0
        await web.let("b")
        assert sorted(web.decoded) == ["a", "b", "c"]
        assert [picture.image.width for picture in await task] == [30, 30, 30]

    run(work)


def test_a_failure_ends_the_others_before_they_are_decoded() -> None:
    async def work(intake: Loader, web: Web) -> None:
        task = begin(all_of(intake, "a/30", "b/30", "c/30"))
        await turns()
        await web.let("a", "b")
        await web.fail("c")
        with pytest.raises(ImageError, match="c did not come"):
            await task
        assert web.decoded == []

    run(work)


def test_a_refusal_at_once_ends_the_others() -> None:
    def refuse(field: str) -> None:
        if field == "c":
            raise RequestError("no")

    async def work(intake: Loader, web: Web) -> None:
        intake.before = refuse
        with pytest.raises(RequestError, match="no"):
            await all_of(intake, "b/30", "c/30")
        await web.let("b")
        assert web.decoded == []

    run(work)


def test_a_request_that_leaves_leaves_nothing() -> None:
    async def work(intake: Loader, web: Web) -> None:
        task = begin(all_of(intake, "a/30", "b/30", "c/30"))
        await turns()
        await web.let("a")
        task.cancel()
        await turns()
        assert task.cancelled()
        assert web.decoded == []

    run(work)


def test_one_after_the_other_none_waits() -> None:
    async def in_turn(intake: Loader, *urls: str) -> list[Picture]:
        return [await intake.picture(f"http://{url}", field="a", owner="1") for url in urls]

    async def work(intake: Loader, web: Web) -> None:
        await web.let("a", "b", "c")
        assert len(await begin(in_turn(intake, "a/40", "b/30", "c/30"))) == 3
        assert web.decoded == ["a", "b", "c"]
        with pytest.raises(ImageTooLarge, match=WORD):
            await begin(in_turn(intake, "a/40", "b/30", "c/60"))
        assert web.decoded == ["a", "b", "c", "a", "b"]

    run(work)


def test_requests_do_not_wait_for_each_other() -> None:
    async def work(intake: Loader, web: Web) -> None:
        slow = begin(all_of(intake, "a/60", "b/60"))
        quick = begin(all_of(intake, "c/60", "d/30", owner="2"))
        await turns()
        await web.let("a")
        await web.let("c", "d")
        assert sorted(web.decoded) == ["c", "d"]
        assert len(await quick) == 2
        await web.let("b")
        with pytest.raises(ImageTooLarge, match=WORD):
            await slow
        assert sorted(web.decoded) == ["c", "d"]

    run(work)


def test_without_a_request_each_picture_stands_alone() -> None:
    async def work(intake: Loader, web: Web) -> None:
        task = begin(together(intake.picture(f"http://{url}", field="a") for url in ("a/60", "b/30")))
        await turns()
        await web.let("a")
        assert web.decoded == ["a"]
        await web.let("b")
        assert len(await task) == 2

    run(work)


def test_nobody_waits_for_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_video", lambda data: data.startswith(b"http://v/"))

    async def work(intake: Loader, web: Web) -> None:
        limits = replace(intake._settings.video, max_total_pixels=30)
        intake._settings = replace(intake._settings, video=limits)

        def seen(*urls: str) -> Coroutine[Any, Any, list[Picture | Video]]:
            return intake.all_of(*(MediaRef(f"http://{url}", "f", "either") for url in urls), owner="1")

        task = begin(seen("a/60", "v/0"))
        await turns()
        await web.let("a")
        assert web.decoded == []
        await web.let("v")
        assert sorted(web.decoded) == ["a", "v"]
        await web.let("frames")
        assert [type(each) for each in await task] == [Picture, Video]

        web.decoded.clear()
        with pytest.raises(ImageTooLarge, match=WORD):
            await begin(seen("v/0", "a/80"))  # the video counts, too

    run(work)


def test_a_video_that_waits_for_memory_keeps_no_other_video_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests the later one waits until the earlier one, which has a video too, is done."""
    monkeypatch.setattr(module, "is_video", lambda data: data.startswith((b"http://v/", b"http://w/")))

    async def work(intake: Loader, web: Web) -> None:
        limits = replace(intake._settings.video, max_total_pixels=30)
        intake._settings = replace(intake._settings, video=limits)
        intake._live = PixelBudget(PIXEL_BYTES * LIMIT + FILES, 30.0, PIXEL_BYTES * 80)

        def seen(owner: str, *urls: str) -> "asyncio.Task[list[Any]]":
            refs = (MediaRef(f"http://{url}", "f", "either") for url in urls)
            return begin(intake.all_of(*refs, owner=owner))

        await web.let("a", "b", "v", "w")
        holds = [await intake.picture("http://a/80", field="a", owner="1")]
        earlier, later = seen("2", "b/60", "v/0"), seen("3", "w/0")
        await turns()
        assert web.decoded == ["a"]
        holds.clear()
        await turns()
        assert sorted(web.decoded) == ["a", "b", "v"]
        await web.let("frames")
        assert len(await earlier) == 2
        del earlier
        assert len(await later) == 1

    run(work)


def test_the_videos_of_a_request_are_decoded_one_after_the_other() -> None:
    """Each keeps what it has, so the most that one may have is reserved once."""

    async def work(intake: Loader, web: Web) -> None:
        limits = replace(intake._settings.video, max_total_pixels=60)
        intake._settings = replace(intake._settings, video=limits)
        films = (MediaRef(f"http://{name}/0", name, "video") for name in "vw")
        task = begin(intake.all_of(*films, owner="1"))
        await web.let("v", "w")
        assert web.decoded == ["v"]
        await web.let("frames")
        assert [type(each) for each in await task] == [Video, Video]

    run(work)


def test_frames_of_a_list_are_siblings_of_pictures() -> None:
    async def work(intake: Loader, web: Web) -> None:
        def shown(pixels: int) -> Coroutine[Any, Any, list[Any]]:
            frames = MediaRef(["http://f/20", "http://g/20"], "video", "video")
            return intake.all_of(frames, MediaRef(f"http://a/{pixels}", "a"), owner="1")

        task = begin(shown(60))
        await turns()
        await web.let("a")
        await web.let("f")
        assert web.decoded == []
        await web.let("g")
        assert sorted(web.decoded) == ["a", "f", "g"]
        video, picture = await task
        assert (len(video.frames), picture.image.width) == (2, 60)
        web.decoded.clear()
        with pytest.raises(ImageTooLarge, match=WORD):
            await begin(shown(90))
        assert web.decoded == []

    run(work)


def test_frames_that_are_too_large_together_are_not_decoded() -> None:
    async def work(intake: Loader, web: Web) -> None:
        limits = replace(intake._settings.video, max_total_pixels=30)
        intake._settings = replace(intake._settings, video=limits)
        frames = MediaRef(["http://f/20", "http://g/20"], "video", "video")
        await web.let("f", "g")
        with pytest.raises(ImageTooLarge, match="has 40 pixels in all its frames, the limit is 30"):
            await intake.all_of(frames, owner="1")
        assert web.decoded == []

    run(work)


@pytest.mark.parametrize(("largest", "fits"), [(FILES, True), (FILES + 1, False)])
def test_files_need_room_beside_all_pictures_one_by_one(largest: int, fits: bool) -> None:
    """The largest may come first: what follows has no room beside it all the same."""

    async def work(intake: Loader, web: Web) -> None:
        urls = [f"a/{LIMIT - 70}/".ljust(largest - len("http://"), "."), "b/40/".ljust(50, "."), "c/30"]
        task = begin(all_of(intake, *urls))
        await turns()
        for name in "abc":
            await web.let(name)
        if fits:
            assert len(await task) == 3
        else:
            with pytest.raises(ImageTooLarge, match=WORD):
                await task
            assert web.decoded == []

    run(work)


def test_true_decoders_are_given_no_picture_of_a_request_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads alone are read."""

    async def decode(*_: object, **__: object) -> Picture:
        raise AssertionError("a picture was decoded")

    async def work(intake: Loader) -> None:
        data = png(8000, 7936, PIXELS)
        try:
            with pytest.raises(ImageTooLarge, match=WORD):
                await intake.all_of(*[MediaRef(data, "a")] * 3, owner="1")
        finally:
            await intake.close()

    monkeypatch.setattr(Decoders, "picture", decode)
    asyncio.run(work(Loader()))


def test_warnings_come_in_the_order_of_the_request_whichever_is_decoded_first() -> None:
    class Late(Web):
        """The first picture is decoded last."""

        async def picture(self, data: bytes, *rest: object, **more: object) -> Picture:
            name = name_of(data.decode())
            for _ in range({"a": 20, "b": 10, "c": 0}[name]):
                await asyncio.sleep(0)
            note: Any = more["note"]
            note(f"not all of {name} was looked at")
            return await super().picture(data)

    async def work(intake: Loader, web: Web) -> None:
        notes, late = RequestNotes(), Late()
        intake._pictures = late  # type: ignore[assignment]
        refs = {name: MediaRef(f"http://{name}/3", name) for name in "abc"}
        refs |= {"film": MediaRef(["http://b/3", "http://a/3"], "film", "video")}
        await web.let("c", "b", "a")
        await intake.load(refs, "1", notes)
        assert late.decoded[0] == "c"
        assert [note.split()[3] for note in notes.warnings] == ["a", "b", "c"]

    run(work)


def test_the_files_of_one_request_have_a_limit_and_who_asks_again_is_not_told_to() -> None:
    """Files beyond it can't be had however often they are asked for: no "try again"."""

    async def work(intake: Loader, web: Web) -> None:
        names = [f"{index:03}" for index in range(40)]  # of 12 bytes each
        await web.let(*names)
        with pytest.raises(
            ImageTooLarge, match=r"files of this request.* take more than 364 bytes; send fewer"
        ):
            await all_of(intake, *(f"{name}/0" for name in names))
        half = all_of(intake, *(f"{name}/0" for name in names[:25]))
        assert len(await half) == 25

    run(work)


def test_files_that_other_requests_hold_are_worth_another_try() -> None:
    async def work(intake: Loader, web: Web) -> None:
        names = [f"{index:03}" for index in range(60)]
        waiting = begin(all_of(intake, *(f"{name}/0" for name in names[:29]), "late/0"))
        await turns()
        await web.let(*names)
        with pytest.raises(QueueFull, match="try again shortly"):
            await all_of(intake, *(f"{name}/0" for name in names[30:]), owner="2")
        await web.let("late")
        assert len(await waiting) == 30

    run(work)
