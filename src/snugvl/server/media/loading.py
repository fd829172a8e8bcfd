"""From what a request calls a picture to a decoded picture, for all pictures and videos of a request at once.

    data:   base64 or percent-encoded ┐
    http(s) fetch.py                  ├─► bytes ─► size, by its head ─► the sum of all: budget.py
    file:   urls.py, where allowed    ┘                                          │
                 RGB, upright ◄── decoders.py, in a process of its own ◄─────────┘

The first phase fetches and sizes everything, side by side; what doesn't fit together is refused as soon as
that is known. Only then is anything decoded. What follows a picture in the same file (a ZIP archive, a
script) is never looked at: only pixels leave the decoder. What begins as anything else is refused, whatever
its media type or ending says.
"""

import asyncio
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, Self, cast

from PIL import Image

from snugvl.core.messages import Picture, Size, Video
from snugvl.core.sizes import MIB
from snugvl.errors import ImageTooLarge, QueueFull, RequestError, blamed
from snugvl.inputs.frames import VideoLimits, is_video
from snugvl.inputs.image import ImageLimits
from snugvl.server.fields import together
from snugvl.server.media.budget import PIXEL_BYTES, PixelBudget, PixelShare
from snugvl.server.media.decoders import Decoders, memory_for_pictures, memory_for_videos
from snugvl.server.media.fetch import Fetcher, FetchLimits, FetchTurns, is_foreign
from snugvl.server.media.urls import Address, check_folder, read_data_url, read_file_url, scheme_of
from snugvl.server.metrics import RequestNotes, RequestRecord
from snugvl.server.settings import ServerSettings

FEWEST_WORKERS, MOST_WORKERS = 2, 4  # of which the largest picture may take 1.9 GB each


def workers_for(cores: int | None = None) -> int:
    """Number of workers: a quarter of `cores` (by default those this process may use), within bounds."""
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // 4, FEWEST_WORKERS), MOST_WORKERS)


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Settings of a server's media loading.

    Attributes:
        image: bytes and pixels of one picture, checked before it is decoded.
        local_folder: folder from which `file:` URLs are read; None: none are read.
        allow_private: whether http(s) URLs may point to private addresses.
        domains: hosts, with all below them, that http(s) URLs may name; None for any.
        workers: pictures decoded at once, each in a process of its own; processes start when first needed.
        decode_s: seconds one picture may take to decode.
        max_live_bytes: most bytes of all decoded pictures and videos of one request, 3 for each pixel (14
            photos of 12 megapixels); they are reserved before decoding, until the engine has the pixels.
        shared_bytes: most such bytes of several requests at once: requests that don't fit together take
            turns, and one that needs more has its turn alone. The largest picture that is taken fits.
        wait_s: seconds that a picture waits for others to leave room, before `QueueFull`.
    """

    image: ImageLimits = field(default_factory=lambda: ImageLimits(max_pixels=64_000_000))
    video: VideoLimits = field(default_factory=VideoLimits)
    fetch: FetchLimits = field(default_factory=FetchLimits)
    local_folder: Path | None = None
    allow_private: bool = False
    domains: tuple[str, ...] | None = None
    workers: int = field(default_factory=workers_for)
    decode_s: float = 15.0
    max_live_bytes: int = 512 * MIB
    shared_bytes: int = 192 * MIB
    wait_s: float = 20.0


MAX_MEDIA: Final = 256  # pictures and videos of one request, in every protocol
MAX_FRAMES: Final = 1024  # of its videos that come as lists of frames
ATTACHMENT: Final = "attachment:"
LOW_DETAIL_PIXELS = 512 * 512
_IMAGES = "image/*"
_VIDEOS = "video/*, image/*"

Detail = Literal["auto", "low", "high", "original"]
Kind = Literal["picture", "video", "either", "animation"]


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A picture or video that a request refers to.

    Attributes:
        source: a URL, the bytes of a file, or a list of URLs of a video's frames.
        field: path in the request, for errors ("messages[0].content[1].image_url.url").
        kind: "picture" is the first frame of an animation, "video" every frame of a film or an animation;
            "either" is a picture, or a video where it is a film, "animation" either with all frames.
        detail: "low" scales a picture down to 512×512 pixels' worth; all others leave it to the model.
        max_pixels: a larger picture is scaled down to it by the model's preparation.
        fps: frames a second that the model sees of a video. A file is sampled down to it (2 when None); of a
            list, which is taken as it is, it says when each frame was.
    """

    source: str | bytes | list[str | bytes]
    field: str
    kind: Kind = "picture"
    detail: Detail | None = None
    max_pixels: int | None = None
    fps: float | None = None


@dataclass(slots=True)
class _File:
    """A file from its fetching to its decoding.

    Attributes:
        data: the file; empty once it is decoded.
        pixels: number of pixels by the file's head; for a video the most that it may have.
        notes: warnings about parts of the file that weren't read.
    """

    data: bytes
    name: str
    field: str
    pixels: int
    is_video: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclass(slots=True)
class _Batch:
    """The sizes of one request's files while they are fetched.

    Attributes:
        owner: the request, as the budget knows it.
        pictures: bytes of all pictures when they are decoded.
        video: bytes of the largest video when it is decoded.
        largest: bytes of the largest picture or video when it is decoded.
        file: bytes of the largest file, as it was sent.
        encoded: bytes of all files, as they were sent.
        one_video: lock held while one of the request's videos waits for memory and is decoded.
        turns: the turns in which the request's URLs are fetched.
    """

    owner: str
    files: list[_File] = field(default_factory=list)
    pictures: int = 0
    video: int = 0
    largest: int = 0
    file: int = 0
    encoded: int = 0
    one_video: asyncio.Lock = field(default_factory=asyncio.Lock)
    turns: FetchTurns | None = None


class MediaLoader:
    """Fetches, checks and decodes. One instance a server; `close` stops its workers.

    Attributes:
        before: called with the field of every picture and video before it is fetched; may refuse it.
        before_all: called with the paths of all of a request that is to be answered; may refuse them.
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
        self._encoded = 0
        self.before: Callable[[str], None] = lambda _field: None
        self.before_all: Callable[[Sequence[str]], None] = lambda _fields: None

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> Self:
        """The loader that a server's settings ask for.

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

    async def warm(self) -> tuple[str, ...]:
        """Start a decoder now, so that the first picture doesn't wait for it. Optional.

        Returns:
            What a decoder that was taken over could do to others, if anything.
        """
        return await self._pictures.warm()

    async def load(
        self, wanted: Mapping[str, MediaRef], owner: str, notes: RequestNotes, *, sizes: bool = False
    ) -> dict[str, Picture | Video]:
        """Fetch, size and decode everything that a request refers to; the results have the same keys.

        Args:
            owner: the request, whose pictures the budget counts together.
            notes: gets warnings about parts of a file that weren't read.
            sizes: whether only the pictures' sizes are kept.

        Raises:
            RequestError: not a URL we fetch, or a rate of frames that there is none of.
            ImageError, ImageTooLarge: one could not be fetched, or isn't a picture that we decode; or all of
                them together are too large.
            QueueFull: requests hold too many pictures right now.
        """
        batch = _Batch(owner, turns=self._fetcher.turns())
        try:
            files = await together(self._fetch(ref, batch) for ref in wanted.values())
            largest = max((len(file.data) for file in batch.files if not file.is_video), default=0)
            async with self._live.reserve(batch.pictures, largest, owner) as share:
                found = await together(
                    self._decode(ref, each, batch, share, sizes=sizes)
                    for ref, each in zip(wanted.values(), files, strict=True)
                )
            for note in (note for each in files for file in each for note in file.notes):
                notes.warn(note)  # in the request's order, whichever was decoded first
        finally:
            for file in batch.files:
                self._let_go(file)
        return dict(zip(wanted, found, strict=True))

    async def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._fetcher.close()
        await asyncio.to_thread(self._pictures.close)
        await asyncio.to_thread(self._videos.close)

    async def _bytes(
        self, url: str, max_bytes: int, accept: str, name: str, field: str, turns: FetchTurns | None
    ) -> bytes:
        scheme = scheme_of(url)
        if scheme == "data":
            return await asyncio.to_thread(read_data_url, url, max_bytes, name, field)
        if scheme == "file":
            return await asyncio.to_thread(read_file_url, url, self._folder, max_bytes, name, field)
        return await self._fetcher.fetch(
            url, accept=accept, max_bytes=max_bytes, name=name, field=field, turns=turns
        )

    async def _fetch(self, ref: MediaRef, batch: _Batch) -> list[_File]:
        """The first phase of one picture or video: its file, or those of its frames, with their sizes."""
        self.before(ref.field)
        _check_fps(ref.fps, ref.field)
        if not isinstance(ref.source, list):
            return [await self._sized(ref.source, ref.kind, ref.field, batch)]
        limits = self._settings.video
        if not 2 <= len(ref.source) <= limits.max_frames:
            raise RequestError(
                f"the video has {len(ref.source)} frames; send from 2 to {limits.max_frames}", field=ref.field
            )
        places = [f"{ref.field}[{index}]" for index in range(len(ref.source))]
        frames = await together(
            self._sized(url, "picture", place, batch) for url, place in zip(ref.source, places, strict=True)
        )
        pixels = sum(frame.pixels for frame in frames)
        if pixels > limits.max_total_pixels:
            raise ImageTooLarge(
                f"the video at {ref.field} has {pixels:,} pixels in all its frames, "
                f"the limit is {limits.max_total_pixels:,}; scale them down, or send fewer",
                field=ref.field,
            )
        return frames

    async def _sized(self, source: str | bytes, kind: Kind, place: str, batch: _Batch) -> _File:
        """One file, fetched, sized and added to its batch."""
        self._check_encoded(batch)
        settings, name = self._settings, _called("video" if kind == "video" else "image", place)
        with blamed(place):
            if isinstance(source, str):
                most = (settings.video if kind == "video" else settings.image).max_bytes
                accept = _IMAGES if kind == "picture" else _VIDEOS
                source = await self._bytes(source, most, accept, name, place, batch.turns)
            video = kind in ("video", "animation") or (kind == "either" and is_video(source))
            if video and kind != "video":
                name = "the video" if place == "image" else _called("video", place)
            _check_bytes(source, (settings.video if video else settings.image).max_bytes, name)
            batch.encoded += len(source)
            self._check_encoded(batch)
            # How many frames of what size a video has is known when it is decoded: the most are counted.
            file = _File(source, name, place, settings.video.max_total_pixels, video)
            self._encoded += len(file.data)
            batch.files.append(file)
            if not video:
                # By its head, before it is decoded; a picture whose head lies ends with its decoder.
                file.pixels = await self._pictures.size(file.data, settings.image, name)
            self._add(file, batch)
        return file

    def _add(self, file: _File, batch: _Batch) -> None:
        """Count a file whose size is known to its request.

        Raises:
            ImageTooLarge: it doesn't fit beside what the request has.
        """
        count = PIXEL_BYTES * file.pixels
        if file.is_video:
            batch.video = count  # one is decoded after the other, and keeps what it has
        else:
            batch.pictures += count
        batch.largest = max(batch.largest, count)
        batch.file = max(batch.file, len(file.data))
        total = batch.pictures + batch.video
        self._live.check(batch.owner, total, batch.file, alone=total == batch.largest)

    async def _decode(
        self, ref: MediaRef, files: list[_File], batch: _Batch, share: PixelShare, *, sizes: bool
    ) -> Picture | Video:
        """The second phase of one picture or video."""
        if not isinstance(ref.source, list):
            file = files[0]
            with blamed(file.field):
                if file.is_video:
                    return await self._video(file, ref.fps, batch)
                limits = (LOW_DETAIL_PIXELS if ref.detail == "low" else None, ref.max_pixels)
                most = min((limit for limit in limits if limit is not None), default=None)
                return replace(await self._picture(file, share, sizes=sizes), max_pixels=most)
        pictures = await together(self._picture(file, share, sizes=sizes) for file in files)
        rate = self._settings.video.fps if ref.fps is None else ref.fps
        return Video(
            tuple(picture.image for picture in pictures),
            tuple(index / rate for index in range(len(pictures))),
            name=_called("video", ref.field),
            field=ref.field,
        )

    async def _picture(self, file: _File, share: PixelShare, *, sizes: bool) -> Picture:
        settings = self._settings
        with blamed(file.field):
            async with self._at_work.reserve(file.pixels):
                picture, digest = await asyncio.gather(
                    self._pictures.picture(
                        file.data,
                        settings.image,
                        settings.decode_s,
                        file.name,
                        file.pixels,
                        note=file.notes.append,
                    ),
                    asyncio.to_thread(_hash, file.data),
                )
        self._let_go(file)
        if sizes:
            size = cast("Image.Image", Size(*picture.image.size))
            return Picture(size, file=digest, name=file.name, field=file.field)
        share.keep([picture.image])
        return replace(picture, file=digest, name=file.name, field=file.field)

    async def _video(self, file: _File, fps: float | None, batch: _Batch) -> Video:
        most = PIXEL_BYTES * file.pixels
        # One decoder takes the videos of all requests in turn. Nothing that others wait for is held while
        # this one waits for memory: they may be the ones that have it.
        async with batch.one_video, self._live.reserve(most, len(file.data), batch.owner) as share:
            frames, times = await self._videos.video(file.data, self._settings.video, fps, file.name)
            share.keep(frames)
        self._let_go(file)
        return Video(tuple(frames), tuple(times), name=file.name, field=file.field)

    def _check_encoded(self, batch: _Batch) -> None:
        """Refuse a file for which there is no memory beside those of its request, or of all requests."""
        if batch.encoded > (limit := self._settings.max_live_bytes):
            raise ImageTooLarge(
                f"the files of this request's pictures and videos take more than {limit:,} bytes; "
                "send fewer, or save them smaller"
            )
        if self._encoded >= self._settings.max_live_bytes:
            raise QueueFull(
                f"files of pictures that wait to be decoded take {self._encoded:,} bytes; try again shortly"
            )

    def _let_go(self, file: _File) -> None:
        """A file that was decoded, or never will be. Safe to call twice."""
        self._encoded -= len(file.data)
        file.data = b""


class RequestMedia:
    """Pictures and videos of one request.

    Attributes:
        notes: warnings of the request, to which those about its pictures are added.
    """

    def __init__(
        self,
        loader: MediaLoader,
        record: RequestRecord,
        *,
        attachments: Mapping[str, bytes] | None = None,
        max_pixels: int | None = None,
        counted: bool = False,
        sizes: bool = False,
    ) -> None:
        """Settings that all pictures of the request have in common.

        Args:
            attachments: files of a multipart upload by name, which "attachment:NAME" refers to; None where a
                protocol has no such thing.
            max_pixels: most pixels of every picture, where the checkpoint has a higher limit.
            counted: whether the conversation is only counted, so that there may be more than can be answered.
            sizes: whether the pictures' sizes are enough for that.
        """
        self.notes = record.notes
        self._loader = loader
        self._owner = record.id
        self._attachments = attachments
        self._max_pixels = max_pixels
        self._counted = counted
        self._sizes = sizes
        self._used: set[str] = set()

    async def load(self, wanted: Mapping[str, MediaRef]) -> dict[str, Picture | Video]:
        """Load all pictures and videos of the request; returns them by their paths in it.

        Raises:
            RequestError, ImageError, QueueFull: there are too many, or one fails (`MediaLoader.load`).
        """
        frames = sum(len(ref.source) for ref in wanted.values() if isinstance(ref.source, list))
        if frames > MAX_FRAMES:
            raise RequestError(
                f"the videos of the request have {frames:,} frames; at most {MAX_FRAMES:,} are taken at once",
                field=next(iter(wanted)).partition("[")[0],
            )
        if len(wanted) > MAX_MEDIA:
            raise RequestError(
                f"the request has {len(wanted):,} pictures and videos; at most {MAX_MEDIA} are taken at once",
                field=list(wanted)[MAX_MEDIA],
            )
        if not self._counted:
            self._loader.before_all(list(wanted))
        refs = {path: self._resolved(ref) for path, ref in wanted.items()}
        return await self._loader.load(refs, self._owner, self.notes, sizes=self._sizes) if refs else {}

    def check_all_used(self) -> None:
        """Refuse files that were uploaded but that nothing refers to.

        Raises:
            RequestError: names one of them.
        """
        for name in self._attachments or ():
            if name not in self._used:
                raise RequestError(
                    f"the file {name!r} was uploaded, but nothing refers to it as {ATTACHMENT + name!r}",
                    field=name,
                )

    def _resolved(self, ref: MediaRef) -> MediaRef:
        """The reference with uploaded files in place of their names, and with the request's pixel limit."""
        limits = (ref.max_pixels, self._max_pixels)
        most = min((limit for limit in limits if limit is not None), default=None)
        source = ref.source
        if isinstance(source, list):
            source = [self._file(each, f"{ref.field}[{index}]") for index, each in enumerate(source)]
        else:
            source = self._file(source, ref.field)
        return replace(ref, source=source, max_pixels=most)

    def _file(self, source: str | bytes, field: str) -> str | bytes:
        """The bytes of the attachment that a URL names, or the source as it is."""
        if self._attachments is None or isinstance(source, bytes) or not source.startswith(ATTACHMENT):
            return source
        name = source.removeprefix(ATTACHMENT)
        if name not in self._attachments:
            known = ", ".join(map(repr, self._attachments)) or "none; send multipart/form-data"
            raise RequestError(f"there is no attachment {name!r} (uploaded: {known})", field=field)
        self._used.add(name)
        return self._attachments[name]


def _anywhere(_: Address) -> bool:
    return True


def _called(kind: str, field: str) -> str:
    """The name of a picture or video in errors: by its field, unless the field has the same name."""
    return f"the {kind}" if field == kind else f"the {kind} at {field}"


def _check_fps(fps: float | None, field: str) -> None:
    if fps is not None and not (math.isfinite(fps) and 0 < fps <= 1000):
        raise RequestError(f"fps is {fps}; give frames a second, above 0 and up to 1000", field=field)


def _hash(data: bytes) -> bytes:
    return sha256(data).digest()


def _check_bytes(data: bytes, max_bytes: int, name: str) -> None:
    """Refuse a file that is too large, before it is copied for the decoder."""
    if len(data) > max_bytes:
        raise ImageTooLarge(f"{name} has {len(data):,} bytes, the limit is {max_bytes:,}; save it smaller")
