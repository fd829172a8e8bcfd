"""The size to which an image or video is scaled. Arithmetic only.

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
    return _scaled(1, 1, height, width, factor, min_pixels, max_pixels)


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
    """Height and width of each frame of a video; the limits count the pixels of all frames together.

    Raises:
        ImageError: one side is more than 200 times the other, or fewer frames than `temporal_factor`.
    """
    check_frames(frames, temporal_factor)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    whole = round(frames / temporal_factor) * temporal_factor
    return _scaled(frames, whole, height, width, factor, min_pixels, max_pixels)


def _scaled(
    frames: int, whole: int, height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) in multiples of `factor`, as near as the limits allow. `whole`: `frames`, rounded up to
    whole temporal patches."""
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    volume = whole * new_height * new_width
    if volume > max_pixels:
        beta = math.sqrt((frames * height * width) / max_pixels)
        return (
            max(factor, math.floor(height / beta / factor) * factor),
            max(factor, math.floor(width / beta / factor) * factor),
        )
    if volume < min_pixels:
        beta = math.sqrt(min_pixels / (frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return new_height, new_width


def check_frames(frames: int, temporal_factor: int) -> None:
    """Raise ImageError unless a video has enough frames for one temporal patch."""
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
