"""From what a request calls a picture to a decoded picture.

    data:  ──► base64 or percent-encoded ┐
    http(s) ─► fetch.py                  ├─► bytes ─► decoders.py: type by content, size before decoding,
    file:  ──► urls.py, where allowed    ┘            decoded in a process of its own ─► RGB, upright

What follows a picture in the same file (a ZIP archive, a script) is never looked at: only pixels leave the
decoder. What begins as anything else is refused, whatever its media type or ending says.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from hashlib import sha256
from typing import Self, cast

from PIL import Image

from snugvl.core.messages import Picture, Size, Video
from snugvl.errors import ImageError, ImageTooLarge, QueueFull, RequestError
from snugvl.inputs.frames import is_video
from snugvl.server.media.budget import PIXEL_BYTES, Coming, PixelBudget
from snugvl.server.media.decoders import Decoders, memory_for_pictures, memory_for_videos
from snugvl.server.media.fetch import Fetcher, is_foreign
from snugvl.server.media.settings import MediaSettings
from snugvl.server.media.urls import Address, check_folder, read_data_url, read_file_url, scheme_of
from snugvl.server.record import current
from snugvl.server.settings import ServerSettings
from snugvl.server.together import together

LOW_DETAIL_PIXELS = 512 * 512
_IMAGES = "image/*"
_VIDEOS = "video/*, image/*"


_SIZES: ContextVar[bool | None] = ContextVar("sizes", default=None)  # None: an answer is asked for


@contextmanager
def only_sizes(yes: bool) -> Iterator[None]:
    """Pictures that come in within the block are only counted, as many as there are.

    Args:
        yes: whether they are let go of again, all but their sizes.
    """
    token = _SIZES.set(yes)
    try:
        yield
    finally:
        _SIZES.reset(token)


class MediaLoader:
    """Fetches, checks and decodes. One instance a server; `close` stops its workers.

    Attributes:
        before: called with the field of every picture and video before it is fetched; may refuse it.
        before_all: called with the fields of all of a conversation that is to be answered; may refuse them.
    """

    def __init__(self, settings: MediaSettings | None = None, *, fetcher: Fetcher | None = None) -> None:
        """`fetcher`: in place of the one that the settings describe.

        Raises:
            InputError: `settings.local_folder` is not a folder.
        """
        self._settings = settings = settings or MediaSettings()
        self._folder = check_folder(settings.local_folder) if settings.local_folder else None
        self._fetcher = fetcher or Fetcher(
            settings.fetch,
            allowed=_anywhere if settings.allow_private else is_foreign,
            domains=settings.domains,
        )
        self._pictures = Decoders("pictures", settings.workers, memory_for_pictures(settings.image))
        self._videos = Decoders("videos", 1, memory_for_videos(settings.video))
        self._live = PixelBudget(settings.max_live_bytes, settings.wait_s, settings.shared_bytes)
        # While it is decoded a picture takes several times what it takes then: few large ones at once.
        self._at_work = PixelBudget(settings.image.max_pixels, None)
        self._one_video = asyncio.Lock()
        self._encoded = 0
        self.before: Callable[[str], None] = lambda _field: None
        self.before_all: Callable[[Sequence[str]], None] = lambda _fields: None

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> Self:
        """As a server was told.

        Raises:
            InputError: `settings.allow_local_media` is not a folder.
        """
        return cls(
            MediaSettings(
                local_folder=settings.allow_local_media,
                allow_private=settings.allow_private_media,
                domains=settings.allowed_media_domains,
            )
        )

    def check_all(self, fields: Sequence[str]) -> None:
        """Refuse the pictures and videos of a conversation before the first of them is fetched.

        Raises:
            RequestError: they are more than `before_all` takes.
        """
        if _SIZES.get() is None:
            self.before_all(fields)

    async def warm(self) -> tuple[str, ...]:
        """Start a decoder now, so that the first picture doesn't wait for it. Optional.

        Returns:
            What a decoder that was taken over could do to others, if anything.
        """
        return await self._pictures.warm()

    async def picture(self, url: str, *, detail: str | None = "auto", field: str) -> Picture:
        """The picture behind a data URL or a public http(s) URL. Of an animation it is the first frame, which
        is a warning of the request's record.

        Args:
            detail: "low" scales it down to 512×512 pixels' worth; "auto" and "high" leave it to the model.
            field: of the request, for errors ("messages[0].content[1].image_url.url").

        Raises:
            RequestError: not a URL we fetch; `detail` unknown.
            ImageError, ImageTooLarge: it could not be fetched, or isn't a picture we decode.
            QueueFull: requests hold too many pictures right now.
        """
        self.before(field)
        max_pixels = _pixels_of(detail, field)
        self._check_encoded()
        name = _called("image", field)
        with _blame(field), self._live.announce() as coming:
            data = await self._bytes(url, self._settings.image.max_bytes, _IMAGES, name, field)
            return await self._picture(data, max_pixels, name, coming)

    async def picture_bytes(self, data: bytes, *, detail: str | None = "auto", field: str) -> Picture:
        """A picture from a file's bytes (a multipart upload)."""
        self.before(field)
        max_pixels = _pixels_of(detail, field)
        with _blame(field), self._live.announce() as coming:
            return await self._picture(data, max_pixels, _called("image", field), coming)

    async def picture_or_video(
        self, source: str | bytes, *, videos: bool, field: str, frames: bool = False
    ) -> Picture | Video:
        """What a URL, or a file's bytes, are by their content. Without `videos` only pictures are read.

        Args:
            frames: whether an animation is a video, instead of its first frame.

        Raises:
            RequestError, ImageError, ImageTooLarge, QueueFull: as for pictures.
        """
        self.before(field)
        self._check_encoded()
        name = _called("image", field)
        with _blame(field), self._live.announce() as coming:
            if isinstance(source, str):
                source = await self._bytes(source, self._settings.image.max_bytes, _VIDEOS, name, field)
            if frames or (videos and is_video(source)):
                coming.arrived()
                called = "the video" if field == "image" else _called("video", field)
                return await self._video(source, None, called)
            return await self._picture(source, None, name, coming)

    async def video(self, url: str | list[str], *, fps: float | None = None, field: str) -> Video:
        """A video: a URL of a video file or of an animation, or a list of URLs of its frames.

        Args:
            fps: frames a second that the model sees. A file is sampled down to it (2 when None); of a list,
                which is taken as it is, it says when each frame was.

        Raises:
            RequestError, ImageError, ImageTooLarge, QueueFull: as for pictures.
        """
        self.before(field)
        _check_fps(fps, field)
        self._check_encoded()
        name = _called("video", field)
        with _blame(field):
            if not isinstance(url, str):
                return await self._list_of_frames(url, fps, field)
            data = await self._bytes(url, self._settings.video.max_bytes, _VIDEOS, name, field)
            return await self._video(data, fps, name)

    async def video_bytes(self, data: bytes, *, fps: float | None = None, field: str) -> Video:
        """A video from a file's bytes (a multipart upload)."""
        self.before(field)
        _check_fps(fps, field)
        with _blame(field):
            return await self._video(data, fps, _called("video", field))

    async def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._fetcher.close()
        await asyncio.to_thread(self._pictures.close)
        await asyncio.to_thread(self._videos.close)

    async def _bytes(self, url: str, max_bytes: int, accept: str, name: str, field: str) -> bytes:
        scheme = scheme_of(url)
        if scheme == "data":
            return await asyncio.to_thread(read_data_url, url, max_bytes, name, field)
        if scheme == "file":
            return await asyncio.to_thread(read_file_url, url, self._folder, max_bytes, name, field)
        return await self._fetcher.fetch(url, accept=accept, max_bytes=max_bytes, name=name, field=field)

    async def _picture(self, data: bytes, max_pixels: int | None, name: str, coming: Coming) -> Picture:
        settings = self._settings
        _check_bytes(data, settings.image.max_bytes, name)
        with self._count_file(data):
            # Before it is decoded, and known from its head; a picture whose head lies ends with its decoder.
            pixels = await self._pictures.size(data, settings.image, name)
            async with (
                self._live.reserve(PIXEL_BYTES * pixels, len(data), coming) as share,
                self._at_work.reserve(pixels),
            ):
                picture, file = await asyncio.gather(
                    self._pictures.picture(
                        data, settings.image, settings.decode_s, name, pixels, note=current().warn
                    ),
                    asyncio.to_thread(_hash, data),
                )
                if _SIZES.get():
                    sized = cast("Image.Image", Size(*picture.image.size))
                    return Picture(sized, max_pixels, file, name=name)
                share.keep([picture.image])
        return replace(picture, max_pixels=max_pixels, file=file, name=name)

    async def _video(self, data: bytes, fps: float | None, name: str) -> Video:
        limits = self._settings.video
        _check_bytes(data, limits.max_bytes, name)
        with self._count_file(data):
            # How many frames of what size it has is known when it is decoded: one has room for the most.
            most = PIXEL_BYTES * limits.max_total_pixels
            async with self._one_video, self._live.reserve(most, len(data)) as share:
                frames, times = await self._videos.video(data, limits, fps, name)
                share.keep(frames)
        return Video(tuple(frames), tuple(times), name=name)

    def _check_encoded(self) -> None:
        if self._encoded >= self._settings.max_live_bytes:
            raise QueueFull(
                f"files of pictures that wait to be decoded take {self._encoded:,} bytes; try again shortly"
            )

    @contextmanager
    def _count_file(self, data: bytes) -> Iterator[None]:
        """Counts the file while it is there."""
        self._check_encoded()
        self._encoded += len(data)
        try:
            yield
        finally:
            self._encoded -= len(data)

    async def _list_of_frames(self, urls: list[str], fps: float | None, field: str) -> Video:
        limits = self._settings.video
        if not 2 <= len(urls) <= limits.max_frames:
            raise RequestError(
                f"the video has {len(urls)} frames; send from 2 to {limits.max_frames}", field=field
            )
        pictures = await together(self.picture(url, field=f"{field}[{i}]") for i, url in enumerate(urls))
        pixels = sum(picture.image.width * picture.image.height for picture in pictures)
        if pixels > limits.max_total_pixels:
            raise ImageTooLarge(
                f"the video at {field} has {pixels:,} pixels in all its frames, "
                f"the limit is {limits.max_total_pixels:,}; scale them down, or send fewer"
            )
        rate = limits.fps if fps is None else fps
        return Video(
            tuple(p.image for p in pictures),
            tuple(i / rate for i in range(len(pictures))),
            name=_called("video", field),
        )


@contextmanager
def _blame(field: str) -> Iterator[None]:
    """Let errors about a picture say where in the request it was."""
    try:
        yield
    except ImageError as error:
        error.field = error.field or field
        raise


def _anywhere(_: Address) -> bool:
    return True


def _called(kind: str, field: str) -> str:
    """How errors call a picture or video: by its field, unless the field is called the same."""
    return f"the {kind}" if field == kind else f"the {kind} at {field}"


def _pixels_of(detail: str | None, field: str) -> int | None:
    if detail not in (None, "auto", "high", "low"):
        place = f"{field.rpartition('.')[0]}.detail".removeprefix(".")
        raise RequestError(f"detail {detail!r} is not known; use 'low', 'high' or 'auto'", field=place)
    return LOW_DETAIL_PIXELS if detail == "low" else None


def _check_fps(fps: float | None, field: str) -> None:
    if fps is not None and not (math.isfinite(fps) and 0 < fps <= 1000):
        raise RequestError(f"fps is {fps}; give frames a second, above 0 and up to 1000", field=field)


def _hash(data: bytes) -> bytes:
    return sha256(data).digest()


def _check_bytes(data: bytes, max_bytes: int, name: str) -> None:
    """Here too, before a copy is made for the decoder."""
    if len(data) > max_bytes:
        raise ImageTooLarge(f"{name} has {len(data):,} bytes, the limit is {max_bytes:,}; save it smaller")
