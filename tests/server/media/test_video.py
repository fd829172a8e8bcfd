"""Videos and animations: the frames that the model's own processor would choose, at their times."""

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from snugvl.core.messages import Video
from snugvl.errors import ImageError, ImageTooLarge, RequestError
from snugvl.inputs import frames
from snugvl.inputs.frames import VideoLimits, decode_video, frame_indices, scaled_size
from snugvl.server.media.loading import MediaSettings
from tests.server.media.films import film, sound
from tests.server.media.pictures import animation, encoded, gif_claim
from tests.server.media.single import Loader

LIMITS = VideoLimits()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def intake(runner: asyncio.Runner) -> Iterator[Loader]:
    made = Loader()
    yield made
    runner.run(made.close())


def data_url(data: bytes) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


def level(image: Image.Image) -> int:
    pixel = image.getpixel((image.width // 2, image.height // 2))
    assert isinstance(pixel, tuple)
    return int(pixel[0])


@pytest.mark.parametrize(
    ("container", "codec", "pixels"),
    [
        ("mp4", "mpeg4", "yuv420p"),
        ("mp4", "libx264", "yuv420p"),
        ("mp4", "libx265", "yuv420p"),
        ("webm", "libvpx", "yuv420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("matroska", "libx264", "yuv420p"),
        ("avi", "mjpeg", "yuvj420p"),
    ],
)
def test_video_files(container: str, codec: str, pixels: str, intake: Loader, runner: asyncio.Runner) -> None:
    """50 frames in 5 s: two a second are kept, first and last among them."""
    video = runner.run(intake.video_bytes(film(container, codec, pixels=pixels), field="video"))
    indices = [0, 5, 11, 16, 22, 27, 33, 38, 44, 49]
    assert video.timestamps == pytest.approx([i / 10 for i in indices], abs=0.002)
    assert [frame.size for frame in video.frames] == [(64, 48)] * 10
    for frame, index in zip(video.frames, indices, strict=True):
        assert abs(level(frame) - 4 * index) <= 4


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "AVIF"])
def test_animations(kind: str, intake: Loader, runner: asyncio.Runner) -> None:
    """6 frames in 1.5 s: four, as few as there may be, first and last among them."""
    video = runner.run(intake.video(data_url(animation(kind)), field="video"))
    assert video.timestamps == pytest.approx([0.0, 0.5, 0.75, 1.25])
    assert [frame.mode for frame in video.frames] == ["RGB"] * 4
    for frame, index in zip(video.frames, (0, 2, 3, 5), strict=True):
        assert abs(level(frame) - 20 * index) <= 3


def test_an_animation_without_times_is_shown_as_browsers_do() -> None:
    video = decode_video(animation("GIF", delay_ms=0), LIMITS, 100.0, "the video")
    assert video.timestamps == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_fps_chooses_how_many(intake: Loader, runner: asyncio.Runner) -> None:
    data = film()
    many = runner.run(intake.video_bytes(data, fps=10, field="video"))
    few = runner.run(intake.video_bytes(data, fps=0.1, field="video"))
    assert len(many.frames) == 50
    assert len(few.frames) == LIMITS.min_frames


def test_no_more_frames_than_allowed_with_jumps_between_key_frames() -> None:
    data = film("mp4", "libx264", frames=1500, key_every=20)
    frames.preload()
    video = decode_video(data, LIMITS, 10.0, "the video")
    assert len(video.images) == 64
    assert video.timestamps[0] == 0.0
    assert video.timestamps[-1] == pytest.approx(149.9)
    for frame, seconds in zip(video.images, video.timestamps, strict=True):
        assert abs(level(frame) - 4 * round(10 * seconds) % 240) <= 4


def test_large_frames_are_scaled_to_the_limit_of_all_together() -> None:
    frames.preload()
    limits = replace(LIMITS, max_total_pixels=4 * 32 * 24)
    for data in (film(), animation("GIF", size=(64, 48))):
        video = decode_video(data, limits, 0.1, "the video")
        assert [frame.size for frame in video.images] == [(32, 24)] * 4


def test_phones_say_how_to_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    frames.preload()
    original = frames._frames_at

    class Turned:
        rotation = 90

        def __init__(self, frame: Any) -> None:
            self._frame = frame

        def __getattr__(self, name: str) -> Any:
            return getattr(self._frame, name)

    monkeypatch.setattr(frames, "_frames_at", lambda *args: map(Turned, original(*args)))
    video = decode_video(film(), LIMITS, 1.0, "the video")
    assert {frame.size for frame in video.images} == {(48, 64)}


@pytest.mark.parametrize("total", [1, 2, 3, 7, 50, 64, 65, 1000, 12345])
@pytest.mark.parametrize("rate", [7.0, 24.0, 30.0])
def test_frames_are_those_that_the_processor_would_choose(total: int, rate: float) -> None:
    """Without torchvision none of transformers' can be made; choosing frames needs three of its fields."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=64)
    video = SimpleNamespace(total_num_frames=total, fps=rate)
    theirs = Qwen3VLVideoProcessor.sample_frames(processor, video, fps=2)
    ours = frame_indices(total, total / rate, 2.0, replace(LIMITS, max_frames=64))
    assert ours == theirs.tolist()


def test_scaled_sizes_stay_within() -> None:
    assert scaled_size(640, 480, 10, LIMITS) == (640, 480)
    width, height = scaled_size(1920, 1080, 64, LIMITS)
    assert 0.98 * LIMITS.max_total_pixels < 64 * width * height <= LIMITS.max_total_pixels


def frame_url(size: tuple[int, int] = (8, 6)) -> str:
    return data_url(encoded("PNG", size))


def test_a_list_of_frames_is_taken_as_it_is(intake: Loader, runner: asyncio.Runner) -> None:
    plain = runner.run(intake.video([frame_url()] * 3, field="video"))
    timed = runner.run(intake.video([frame_url()] * 3, fps=4, field="video"))
    assert isinstance(plain, Video)
    assert plain.timestamps == (0.0, 0.5, 1.0)
    assert timed.timestamps == (0.0, 0.25, 0.5)
    assert len(timed.frames) == 3


def test_a_bad_frame_is_named(intake: Loader, runner: asyncio.Runner) -> None:
    with pytest.raises(ImageError, match=r"^the image at video\[1\] is not a picture"):
        runner.run(intake.video([frame_url(), data_url(b"text"), frame_url()], field="video"))


@pytest.mark.parametrize("count", [0, 1, 65])
def test_too_few_or_too_many_frames(count: int, intake: Loader, runner: asyncio.Runner) -> None:
    with pytest.raises(RequestError, match=f"the video has {count} frames; send from 2 to 64"):
        runner.run(intake.video([frame_url()] * count, field="video"))


def test_frames_of_too_many_pixels_in_all(runner: asyncio.Runner) -> None:
    async def run() -> None:
        settings = replace(MediaSettings(), video=replace(LIMITS, max_total_pixels=100))
        intake = Loader(settings)
        try:
            with pytest.raises(ImageTooLarge, match="has 144 pixels in all its frames, the limit is 100"):
                await intake.video([frame_url()] * 3, field="video")
        finally:
            await intake.close()

    runner.run(run())


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf"), 1001.0])
def test_impossible_rates(fps: float, intake: Loader, runner: asyncio.Runner) -> None:
    for source in (data_url(film()), [frame_url()] * 3):
        with pytest.raises(RequestError, match="give frames a second, above 0 and up to 1000"):
            runner.run(intake.video(source, fps=fps, field="video"))
    with pytest.raises(RequestError):
        runner.run(intake.video_bytes(b"", fps=fps, field="video"))


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
UNREADABLE = "is not a video or an animation that can be read; send MP4, WebM, AVI, Ogg, GIF, WebP, APNG or"
REFUSED = {
    "nothing": (b"", r"is empty \(0 bytes\)"),
    "playlist": (PLAYLIST, UNREADABLE),
    "concat": (b"ffconcat version 1.0\nfile /etc/passwd\n", UNREADABLE),
    "session description": (b"v=0\no=- 0 0 IN IP4 10.0.0.1\nm=video 9 RTP/AVP 96\n", UNREADABLE),
    "manifest": (b"<?xml version='1.0'?><MPD><BaseURL>file:///etc/</BaseURL></MPD>", UNREADABLE),
    "still": (encoded("PNG"), "is a still picture; send it as an image"),
    "phone's photo": (encoded("MPO"), "is a still picture; send it as an image"),
    "svg": (b"<svg></svg>", UNREADABLE),
    "sound": (sound(), "has no video in it"),
    "old codec": (film("avi", "mpeg2video"), "has the codec 'mpeg2video', which is not read"),
    "truncated": (film()[:900], "is damaged or incomplete"),
    "claim": (gif_claim(65_535, 65_535), "frames of far more than 100 million pixels"),
    "one frame": (film(frames=1), "fewer than two frames"),
    "only a header": (b"\0\0\0\x18ftypisom" + bytes(12), "is damaged or incomplete|no video"),
    "only a mark": (b"\x1aE\xdf\xa3" + bytes(40), "is damaged or incomplete|no video"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_video(name: str, intake: Loader, runner: asyncio.Runner) -> None:
    data, text = REFUSED[name]
    with pytest.raises(ImageError, match=text) as caught:
        runner.run(intake.video_bytes(data, field="video"))
    assert str(caught.value).startswith("the video ")


def test_limits_of_a_video() -> None:
    frames.preload()
    for data in (film(), animation("GIF", frames=12, size=(64, 48), delay_ms=400)):
        with pytest.raises(ImageTooLarge, match=r"frames of 64×48 = 3,072 pixels, the limit is 3,000"):
            decode_video(data, replace(LIMITS, max_frame_pixels=3000), None, "the video")
        with pytest.raises(ImageError, match=r"the video is \d+ s long, the limit is 3 s; cut it first"):
            decode_video(data, replace(LIMITS, max_duration_s=3.0), None, "the video")


def test_a_video_that_takes_too_long_is_given_up(runner: asyncio.Runner) -> None:
    async def run() -> None:
        intake = Loader(replace(MediaSettings(), video=replace(LIMITS, decode_s=0.01)))
        try:
            with pytest.raises(ImageError, match=r"took longer than 0\.01 s to decode"):
                await intake.video_bytes(film(frames=400, size=(640, 480)), fps=100, field="video")
        finally:
            await intake.close()

    runner.run(run())


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "av", None)
    with pytest.raises(ImageError, match=r"pip install 'snugvl\[video\]', or send its frames as a list"):
        decode_video(film(), LIMITS, None, "the video")
    assert len(decode_video(animation("GIF"), LIMITS, None, "the video").images) == 4


def test_too_many_bytes(runner: asyncio.Runner) -> None:
    async def run() -> None:
        intake = Loader(replace(MediaSettings(), video=replace(LIMITS, max_bytes=1000)))
        try:
            with pytest.raises(ImageTooLarge, match=r"^the video has [\d,]+ bytes, the limit is 1,000"):
                await intake.video_bytes(film(), field="video")
        finally:
            await intake.close()

    runner.run(run())


def test_limits_travel_as_json() -> None:
    assert VideoLimits(**asdict(LIMITS)) == LIMITS
