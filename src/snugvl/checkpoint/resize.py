"""Sizes: what an image or video is scaled to, and how many tokens it costs. Arithmetic only.

Source: `smart_resize` of Qwen2-VL's image processor and of Qwen3-VL's video processor in Hugging Face
transformers. Python's `round` is banker's rounding, which decides sizes that are an odd multiple of half
a factor, so it must stay `round`.
"""

import math

from snugvl.errors import ImageError

MAX_ASPECT = 200


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width, multiples of `factor` pixels, with an area between the two limits.

    The aspect ratio is kept as closely as that allows. A side never falls below one factor, so a very long
    strip may exceed `max_pixels`.

    Raises:
        ImageError: one side is more than 200 times the other.
    """
    _check_aspect(height, width)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        return _shrink(height, width, math.sqrt((height * width) / max_pixels), factor)
    if new_height * new_width < min_pixels:
        return _grow(height, width, math.sqrt(min_pixels / (height * width)), factor)
    return new_height, new_width


def smart_resize_video(
    frames: int,
    height: int,
    width: int,
    *,
    factor: int,
    temporal_factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """The same for each frame of a video; the limits count the pixels of all frames together.

    Raises:
        ImageError: one side is more than 200 times the other, or fewer frames than `temporal_factor`.
    """
    check_frames(frames, temporal_factor)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    volume = round(frames / temporal_factor) * temporal_factor * new_height * new_width
    if volume > max_pixels:
        return _shrink(height, width, math.sqrt((frames * height * width) / max_pixels), factor)
    if volume < min_pixels:
        return _grow(height, width, math.sqrt(min_pixels / (frames * height * width)), factor)
    return new_height, new_width


def check_frames(frames: int, temporal_factor: int) -> None:
    """Raise ImageError unless a video has frames for one temporal patch."""
    if frames < temporal_factor:
        raise ImageError(
            f"the video is too short ({frames} of at least {temporal_factor} frames); send it as a picture"
        )


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise ImageError(
            f"the image is {width}×{height} pixels, one side more than {MAX_ASPECT} times as long as the "
            "other; crop it or cut it into pieces"
        )


def _shrink(height: int, width: int, beta: float, factor: int) -> tuple[int, int]:
    return (
        max(factor, math.floor(height / beta / factor) * factor),
        max(factor, math.floor(width / beta / factor) * factor),
    )


def _grow(height: int, width: int, beta: float, factor: int) -> tuple[int, int]:
    return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
