"""From a video or an animation to a few frames with their times: of strangers' files in the server's decoder
process, of a person's own in that of the command line or of a program.

GIF, WebP, APNG and AVIF animations, and several pictures in one HEIC file, go through Pillow; MP4, WebM, AVI
and Ogg, and HEIF sequences, through PyAV, where installed.
Containers and codecs are lists of known ones: FFmpeg has demuxers that open other files and URLs (playlists),
and decoders that have had no attention for twenty years.
"""

import itertools
import math
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from types import ModuleType
from typing import Any

from PIL import Image

from snugvl.core.messages import Video
from snugvl.core.sizes import MIB
from snugvl.errors import ImageError, ImageTooLarge
from snugvl.inputs import looks_like
from snugvl.inputs.image import FORMATS, to_rgb

_ANIMATIONS = ("GIF", "WEBP", "PNG", "AVIF", "HEIF")
_CODECS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mjpeg", "theora")
_DEFAULT_DELAY_MS = 100  # what browsers show when an animation says 0 or next to nothing
_MAX_PACKETS = 200_000

av: ModuleType | None = None


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of one video.

    Attributes:
        max_frames: that the model sees; more are sampled down evenly.
        min_frames: sampled from a video shorter than that many frames at the wanted rate.
        fps: frames a second that are kept, unless a request says otherwise (as Qwen3-VL's processor does).
        max_duration_s: longer videos are refused.
        max_frame_pixels: most pixels of a frame in the file; larger ones are refused before they are decoded.
        max_total_pixels: most pixels of all frames that are kept; they are scaled down to it.
        decode_s: seconds after which the decoder is stopped.
    """

    max_bytes: int = 64 * MIB
    max_frames: int = 64
    min_frames: int = 4
    fps: float = 2.0
    max_duration_s: float = 600.0
    max_frame_pixels: int = 4096 * 2304
    max_total_pixels: int = 50_000_000
    decode_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames of one size, RGB, with the seconds at which each is shown."""

    images: list[Image.Image]
    timestamps: list[float]


def preload() -> None:
    """Import PyAV, where installed, with the modules it would import when it first needs them."""
    global av
    try:
        module = import_module("av")
    except ImportError:
        return
    for found in pkgutil.walk_packages(module.__path__, "av."):
        if not found.name.endswith("__main__"):
            import_module(found.name)
    module.logging.set_level(None)
    av = module


def is_video(data: bytes) -> bool:
    """Whether a file is a video, by its content. Animations are pictures unless a video is asked for."""
    return _container(data) is not None and looks_like.kind_of(data) not in ("HEIF", "AVIF")


def open_video(data: bytes, name: str) -> Video:
    """A video file of one's own, decoded in this process within `VideoLimits`; it keeps the file.

    Raises:
        ImageError, ImageTooLarge: as `decode_video`; more bytes than the limit.
    """
    limits = VideoLimits()
    if len(data) > limits.max_bytes:
        raise ImageTooLarge(
            f"{name} has {len(data):,} bytes, the limit of a video is {limits.max_bytes:,}; cut it first"
        )
    if av is None:
        preload()
    found = decode_video(data, limits, None, name)
    return Video(tuple(found.images), tuple(found.timestamps), data, name)


def decode_video(data: bytes, limits: VideoLimits, fps: float | None, name: str) -> Frames:
    """Sample a video, or an animation, evenly. `fps`: frames a second to keep; `limits.fps` when None.

    Raises:
        ImageError: not a video, damaged, too long, a codec that isn't read; PyAV is missing.
        ImageTooLarge: frames of too many pixels.
    """
    if not data:
        raise ImageError(f"{name} is empty (0 bytes); send a video")
    wanted = limits.fps if fps is None else fps
    container = _container(data)
    try:
        if container is not None:
            return _decode_container(data, container, limits, wanted, name)
        return _decode_animation(data, limits, wanted, name)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # FFmpeg's and Pillow's decoders raise nearly anything on damaged data
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ImageError(f"{name} is damaged or incomplete ({why}); send it again") from None


def frame_indices(total: int, duration_s: float, fps: float, limits: VideoLimits) -> list[int]:
    """Which of `total` frames are kept, evenly spaced, as transformers' processors choose them."""
    wanted = int(duration_s * fps)
    count = min(max(wanted, limits.min_frames), limits.max_frames, total)
    step = (total - 1) / (count - 1) if count > 1 else 0.0
    return [round(i * step) for i in range(count)]


def scaled_size(width: int, height: int, frames: int, limits: VideoLimits) -> tuple[int, int]:
    """Width and height at which that many frames stay within `limits.max_total_pixels`."""
    scale = min(1.0, math.sqrt(limits.max_total_pixels / (frames * width * height)))
    return max(1, int(width * scale)), max(1, int(height * scale))


def _container(data: bytes) -> str | None:
    """FFmpeg's name of the container, by content; None for what Pillow may read."""
    kind = looks_like.kind_of(data)
    if kind in ("film", "sequence") or (kind == "HEIF" and looks_like.has_track(data)):
        return "mov"
    if data.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return "ogg" if data.startswith(b"OggS") else None


def _check_size(width: int, height: int, limits: VideoLimits, name: str) -> None:
    if width < 1 or height < 1 or width * height > limits.max_frame_pixels:
        raise ImageTooLarge(
            f"{name} has frames of {width:,}×{height:,} = {width * height:,} pixels, "
            f"the limit is {limits.max_frame_pixels:,}; scale it down first"
        )


def _check_duration(seconds: float, limits: VideoLimits, name: str) -> None:
    if seconds > limits.max_duration_s:
        raise ImageError(
            f"{name} is {seconds:,.0f} s long, the limit is {limits.max_duration_s:g} s; cut it first"
        )


def _decode_animation(data: bytes, limits: VideoLimits, fps: float, name: str) -> Frames:
    image = _open_image(data, name)
    _check_size(*image.size, limits, name)
    total = int(getattr(image, "n_frames", 1)) if image.format in _ANIMATIONS else 1
    if total < 2:
        raise ImageError(f"{name} is a still picture; send it as an image, not as a video")
    # Durations come with the frames: a first pass reads them all, which the time limit bounds.
    starts, now = [], 0.0
    for index in range(total):
        image.seek(index)
        _check_size(*image.size, limits, name)  # pictures of a HEIC file have sizes of their own
        image.load()  # WebP and AVIF only then know how long it is shown
        starts.append(now)
        delay = float(image.info.get("duration") or 0)
        now += (delay if delay > 10 else _DEFAULT_DELAY_MS) / 1000
        _check_duration(now, limits, name)
    indices = frame_indices(total, now, fps, limits)
    size = scaled_size(*image.size, len(indices), limits)
    frames = []
    for index in indices:
        image.seek(index)
        frame = to_rgb(image.copy(), name)
        frames.append(frame if frame.size == size else frame.resize(size, Image.Resampling.BICUBIC))
    return Frames(frames, [starts[index] for index in indices])


def _open_image(data: bytes, name: str) -> Image.Image:
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ImageTooLarge(
            f"{name} has frames of far more than 100 million pixels; scale it down first"
        ) from None
    except Exception:  # an unknown format, or a header that its plugin stumbles over
        raise ImageError(
            f"{name} is not a video or an animation that can be read; send MP4, WebM, AVI, Ogg, GIF, WebP, "
            "APNG or AVIF, or a list of its frames"
        ) from None


def _decode_container(data: bytes, kind: str, limits: VideoLimits, fps: float, name: str) -> Frames:
    if av is None:
        raise ImageError(
            f"{name} is a video file, and PyAV, which reads those, is not installed: "
            "pip install 'snugvl[video]', or send its frames as a list of pictures"
        )
    with av.open(BytesIO(looks_like.hide(data, b"meta")), format=kind, metadata_errors="ignore") as container:
        if not container.streams.video:
            raise ImageError(f"{name} has no video in it; send a video, or a picture")
        stream = container.streams.video[0]
        codec = stream.codec_context.name if stream.codec_context else "unknown"
        if codec not in _CODECS:
            raise ImageError(f"{name} has the codec {codec!r}, which is not read; convert it to H.264 first")
        stream.codec_context.thread_count = 2
        _check_size(stream.codec_context.width, stream.codec_context.height, limits, name)
        times = _presentation_times(container, stream, limits, name)
        unit = float(stream.time_base)
        _check_duration((times[-1] - times[0]) * unit, limits, name)
        # The last frame is shown for as long as an average one.
        duration = (times[-1] - times[0]) * unit * len(times) / max(len(times) - 1, 1)
        indices = frame_indices(len(times), duration, fps, limits)
        size = scaled_size(stream.codec_context.width, stream.codec_context.height, len(indices), limits)
        chosen = [times[index] for index in indices]
        images = []
        for frame in _frames_at(container, stream, chosen):
            _check_size(frame.width, frame.height, limits, name)  # it may change on the way
            image = frame.reformat(*size, format="rgb24", interpolation="BICUBIC").to_image()
            # Phones write films as the sensor lies and say how to turn them: upright, as pictures are.
            images.append(image.rotate(frame.rotation, expand=True) if frame.rotation else image)
        if len(images) < 2:
            raise ImageError(f"{name} is damaged or has fewer than two frames; send it again")
        return Frames(images, [(time - times[0]) * unit for time in chosen[: len(images)]])


def _presentation_times(container: Any, stream: Any, limits: VideoLimits, name: str) -> list[int]:
    """When each frame is shown, in units of the stream, without decoding any."""
    packets = itertools.islice(container.demux(stream), _MAX_PACKETS + 1)
    times = sorted({packet.pts for packet in packets if packet.pts is not None})
    if len(times) > _MAX_PACKETS:
        raise ImageError(f"{name} has more than {_MAX_PACKETS:,} frames; cut it first")
    if not times:
        raise ImageError(f"{name} has no frames that can be read; send it again")
    return times


def _frames_at(container: Any, stream: Any, times: Sequence[int]) -> Iterator[Any]:
    """The frames shown at `times` (rising). Jumps to a key frame where that is nearer than decoding on."""
    remaining = list(reversed(times))
    gap = 2 / float(stream.time_base)  # closer together than this, decoding on is cheaper than seeking
    container.seek(times[0], stream=stream)
    position: int | None = None
    while remaining:
        if position is not None and remaining[-1] - position > gap:
            container.seek(remaining[-1], stream=stream)
        found = False
        for frame in container.decode(stream):
            if frame.pts is None or frame.pts < remaining[-1]:
                continue
            found, position = True, frame.pts
            yield frame
            remaining.pop()
            if not remaining or remaining[-1] - frame.pts > gap:
                break
        if not found:
            return
