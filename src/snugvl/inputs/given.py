"""Pictures as people give them: a file in any form, a Pillow image, an array. All else is refused by name.

Arrays are recognised by their attributes, not by their library: neither torch nor numpy is imported for a
path.
"""

import base64
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast
from urllib.parse import unquote, unquote_to_bytes

from PIL import Image, ImageOps

from snugvl.core.messages import Picture, Video
from snugvl.errors import ImageError, ImageTooLarge, WrongType
from snugvl.inputs import frames, pdf
from snugvl.inputs.image import ImageLimits, name_of, one_line, open_image, read_source, to_rgb

T = TypeVar("T")
_CHANNELS = (1, 3, 4)


class Array(Protocol):
    """An array of numpy, torch, jax and others: height × width, or height × width × channels (grey, RGB or
    RGBA), as uint8, or as floats from 0 to 1. Channels may come first, as torch has them."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


ImageSource = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | Image.Image | Array | Picture
)
"""An image: a path (`report.pdf#page=2` is a page of a PDF), the bytes of a file, an open file, a Pillow
image, an array, or one read before."""

VisualSource = ImageSource | Video
"""An image, or a video: a file of one, told by its content, or frames with their times."""

File = str | Path | bytes | BinaryIO


def taken(source: object, what: str = "the image") -> File | Image.Image | Picture | Video:
    """The source as one of few types; an array as a Pillow image. `what`: how errors call it.

    Raises:
        WrongType: it is nothing that a picture could be made of; says what would be.
        InputError: a PDF that can't be opened.
        ImageError, ImageTooLarge: an array whose shape or values are those of no picture.
    """
    if isinstance(source, str) and source.startswith("data:"):
        return _in_data_url(source, what)
    if isinstance(source, str | Path):
        return pdf.page(str(source)) or source
    if isinstance(source, Image.Image) and 0 in source.size:
        raise ImageError(f"{what} is {source.width}×{source.height} pixels, so there is nothing to look at")
    if isinstance(source, bytes | Image.Image | Picture | Video):
        return source
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, os.PathLike):
        return Path(source)
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        return _image_of(source, what)
    if isinstance(source, list | tuple):
        raise WrongType(
            f"{what} is a {type(source).__name__} of {len(source)}, and one is looked at here; call it for "
            "each, or ask(images, question) shows several together"
        )
    if callable(getattr(source, "read", None)):
        if hasattr(source, "encoding"):
            raise WrongType(f"{what} is a file opened as text; open it as bytes: open(path, 'rb')")
        return cast(BinaryIO, source)
    raise WrongType(
        f"{what} is {described(source)}; give a path, the bytes of a file, an open file, a Pillow image, or "
        "an array (height × width × 3)"
    )


def decode(source: ImageSource) -> Image.Image:
    """The image, upright and RGB, as the model sees it and boxes are counted in.

    Raises:
        ImageError: it isn't a picture, or larger than the limits.
        WrongType: as `taken`.
    """
    return still(source).image


def still(source: ImageSource, what: str = "the image") -> Picture:
    """The image as `decode` gives it, with its name. `what`: how errors call one that has no name of its own.

    Raises:
        ImageError, WrongType: as `decode`.
    """
    given = taken(source, what)
    if isinstance(given, Video):
        raise ImageError(f"{what} is a video; give one frame of it: video.frames[0]")
    if isinstance(given, Picture):
        return given
    name = called(given, what)
    image = upright(given, name) if isinstance(given, Image.Image) else open_image(given, name=name)
    return Picture(image, name=name)


def see(source: VisualSource) -> Image.Image | Video:
    """The image as `decode` gives it, or the video that a file is by its content.

    Raises:
        ImageError: it is neither, or larger than the limits.
        WrongType: as `taken`.
    """
    shown = look(source)
    return shown if isinstance(shown, Video) else shown.image


def look(source: VisualSource, what: str = "the image") -> Picture | Video:
    """The image as `see` gives it, with the file that it was decoded from, where it was one, and its name.
    `what`: how errors call an image that has no name of its own, such as its place among several."""
    given = taken(source, what)
    if isinstance(given, Picture | Video):
        return given if given.name else replace(given, name=what)
    name = called(given, what)
    if isinstance(given, Image.Image):
        return Picture(upright(given, name), name=name)
    data = read_source(given, name, ImageLimits())
    if frames.is_video(data):
        return frames.open_video(data, name)
    return Picture(open_image(data, name=name), data=data, name=name)


def look_at(images: VisualSource | Sequence[VisualSource]) -> list[Picture | Video]:
    """One image or several, each as `look` gives it; errors say which it is."""
    return [look(image, what) for image, what in numbered(images)]


def numbered(images: VisualSource | Sequence[VisualSource]) -> list[tuple[VisualSource, str]]:
    """Images, each with how errors call it where it has no name of its own."""
    shown = as_list(images)
    if len(shown) < 2:
        return [(image, "the image") for image in shown]
    return [(image, f"the image at images[{place}]") for place, image in enumerate(shown)]


def called(given: File | Image.Image | Picture | Video, what: str) -> str:
    """The name in errors of a picture that `taken` returned; `what`: for one without a name."""
    if isinstance(given, Picture | Video):
        return given.name or what
    if isinstance(given, Image.Image):  # Pillow keeps the name of the file that it opened
        return str(getattr(given, "filename", "") or what)
    return name_of(given, what)


def video(source: VisualSource, what: str = "the video") -> Video:
    """A video, or an animation (GIF, WebP, APNG, AVIF, several pictures in one HEIC file), with its frames.

    Where a picture is expected, an animation is its first frame; so made it is all of them, sampled evenly.

    Args:
        source: a path, the bytes of a file, or an open file.
        what: how errors call one that has no name.

    Returns:
        Up to 64 frames, two a second, with their times; also the file, which a client sends as it is.

    Raises:
        ImageError, ImageTooLarge: not there, not a video, too long, too large; PyAV is missing.
        WrongType: it is not a file.

    Example:
        model.caption(snugvl.video("moves.gif"))
    """
    given = taken(source, what)
    if isinstance(given, Image.Image | Picture | Video):
        raise WrongType(f"the video is {type(given).__name__}; give its file: a path, bytes, or an open file")
    name = name_of(given, what)
    return frames.open_video(read_source(given, name, ImageLimits()), name)


def upright(image: Image.Image, name: str) -> Image.Image:
    """The image, turned as its file says, and RGB. `name`: how errors call it.

    Raises:
        ImageError: it can't be decoded, or has no RGB form.
    """
    try:
        return to_rgb(ImageOps.exif_transpose(image), name)
    except (OSError, ValueError) as error:  # Pillow decodes a file when its pixels are first wanted
        raise ImageError(f"{name} can't be decoded ({error}); open it again, and leave it open") from None


def as_list(images: VisualSource | list[T] | tuple[T, ...] | object) -> list[Any]:
    """One image or several, as a list."""
    return list(images) if isinstance(images, list | tuple) else [images]


def described(value: object) -> str:
    """A value and its type, for errors: "42 (int)", "None"."""
    if value is None:
        return "None"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


def _in_data_url(url: str, what: str) -> bytes:
    head, _, body = url.partition(",")
    try:
        return (
            base64.b64decode(unquote(body), validate=True)
            if head.endswith(";base64")
            else unquote_to_bytes(body)
        )
    except ValueError:
        raise ImageError(f"{what} is a data URL that is not valid base64; encode it again") from None


def _image_of(array: Array, what: str) -> Image.Image:
    import numpy as np

    try:
        if hasattr(array, "detach"):  # a tensor of torch, perhaps on a GPU
            tensor = array.detach().cpu()
            array = tensor.float() if tensor.dtype.is_floating_point else tensor
        values = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:  # sparse, quantised, or on torch's meta device
        raise ImageError(
            f"{what} is an array whose values numpy can't read ({one_line(error)}); give a dense one"
        ) from None
    shape = "×".join(map(str, values.shape)) or "no dimensions"
    if values.ndim == 4:
        raise ImageError(f"{what} is a batch of shape {shape}; give one picture of it at a time")
    if values.ndim == 3 and values.shape[2] not in _CHANNELS and values.shape[0] in _CHANNELS:
        values = np.moveaxis(values, 0, 2)
    if (
        values.ndim not in (2, 3)
        or 0 in values.shape
        or (values.ndim == 3 and values.shape[2] not in _CHANNELS)
    ):
        raise ImageError(f"{what} is an array of shape {shape}; give height × width × 3 (or 1, or 4)")
    most = ImageLimits().max_pixels
    if math.prod(values.shape[:2]) > most:
        raise ImageTooLarge(
            f"{what} is an array of shape {shape}; the limit is {most:,} pixels; scale it down"
        )
    if values.dtype.kind == "f":
        low, high = float(values.min()), float(values.max())
        if not (low >= -1e-3 and high <= 1 + 1e-3):  # also where one is not a number
            raise ImageError(
                f"{what} has values from {low:.3g} to {high:.3g}; give uint8, or floats from 0 to 1, as they "
                "were before any normalisation"
            )
        values = (values.clip(0, 1) * 255).round().astype(np.uint8)
    elif values.dtype != np.uint8:
        raise ImageError(f"{what} is an array of {values.dtype}; give uint8, or floats from 0 to 1")
    return Image.fromarray(np.ascontiguousarray(values[..., 0] if values.shape[2:] == (1,) else values))
