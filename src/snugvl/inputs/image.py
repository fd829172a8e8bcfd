"""Picture intake: from a file, bytes or a stream to an upright RGB image, or one clear sentence.

Size is checked before anything is decoded: bytes from the file's size or while reading the stream, pixels
from the header. Only the formats listed here are tried, so that no exotic decoder of Pillow's ever sees
what a stranger sent.

Colours follow `convert_to_rgb` of Hugging Face transformers (5.23): transparency is composited on white,
everything else is Pillow's own conversion. Two deliberate differences: 16-bit greyscale is scaled to 8 bits
(Pillow clips it at 255, which turns nearly every such picture white), and 32-bit greyscale is refused.
"""

import logging
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

import pi_heif
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from snugvl.errors import ImageError, ImageTooLarge, warn
from snugvl.inputs import looks_like
from snugvl.inputs.looks_like import describe, in_base64

_PLUGINS = (
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
    GifImagePlugin,
    BmpImagePlugin,
    TiffImagePlugin,
    AvifImagePlugin,
)
_NAMES = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
# What else a HEIC file holds is not looked at: it costs time, and is a stranger's.
pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=2)
# A plugin whose C library is missing registers nothing. Pillow's JPEG plugin also opens MPO. AVIF before
# HEIF: both read "mif1", and pi-heif's wheels have no decoder for AVIF.
_OPENED = [name for name, plugin in zip(_NAMES, _PLUGINS, strict=True) if name in Image.OPEN]
FORMATS = (*_OPENED, "HEIF")

# Without a handler of the program's own, Python prints Pillow's log of a damaged TIFF on stderr.
logging.getLogger("PIL").addHandler(logging.NullHandler())

_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Filters of the warnings module are process-wide: two threads inside `catch_warnings` at once could restore
# each other's. Pillow only warns while it reads headers and EXIF, which is quick; decoding stays outside.
_HEADER_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits beyond which a picture is refused before decoding. Pixels are the file's, before any scaling."""

    max_bytes: int = 64 * 1024 * 1024
    max_pixels: int = 100_000_000


def open_image(
    source: str | Path | bytes | BinaryIO,
    *,
    limits: ImageLimits | None = None,
    name: str | None = None,
    quote: bool = True,
    note: Callable[[str], None] = warn,
) -> Image.Image:
    """Read, check, decode and orient a picture.

    An animation is its first frame; of several pictures in one HEIC file it is the main one.

    Args:
        source: a path, the file's bytes, or a binary stream such as `sys.stdin.buffer`.
        name: how errors call it, when the source itself doesn't tell.
        quote: whether errors may show the first bytes of what isn't a picture.
        note: told what of the file isn't looked at, in a sentence; by default a `SnugvlWarning`.

    Returns:
        The picture, fully decoded, upright, mode RGB.

    Raises:
        ImageError: not there, not readable, not a picture, of several pages or damaged; says which, and
            what to do.
        ImageTooLarge: more bytes or pixels than `limits`.
    """
    limits = limits or ImageLimits()
    name = name or name_of(source)
    data = read_source(source, name, limits)
    image = _open_header(data, name, quote)
    rest = _check(image, name, limits)
    try:
        image.load()
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        raise ImageError(
            f"{name} is damaged or incomplete ({one_line(error)}); copy or download it again"
        ) from None
    if rest:
        note(rest)
    return to_rgb(_upright(image), name)


def to_rgb(image: Image.Image, name: str = "the image") -> Image.Image:
    """`image` in mode RGB, transparency on white. An RGB image comes back as it is.

    Raises:
        ImageError: a mode that has no sensible RGB form, or pixels that can't be decoded.
    """
    try:
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            layer = image.convert("RGBA")
            white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, layer).convert("RGB")
        if image.mode == "RGB":
            image.load()
            return image
        if image.mode.startswith("I;16"):
            image = _sixteen_to_eight(image)
        if image.mode in ("I", "F"):
            raise ImageError(
                f"{name} has 32-bit samples (mode {image.mode}); convert it to 8 bits per channel"
            )
        return image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(
            f"{name} has pixels of mode {image.mode} that can't become RGB ({one_line(error)}); "
            "convert it to an 8-bit RGB PNG or JPEG"
        ) from None


def _sixteen_to_eight(image: Image.Image) -> Image.Image:
    import numpy as np  # only rare pictures need it

    # 65535 / 255 = 257, so this is exact at both ends; rounded in between.
    levels = (np.asarray(image).astype(np.uint32) + 128) // 257
    return Image.fromarray(levels.astype(np.uint8))


def name_of(source: str | Path | bytes | BinaryIO, what: str = "the image") -> str:
    """The name of a source in errors; `what`: for one without a name."""
    if isinstance(source, str | Path):
        text = str(source) or "''"
        return text if len(text) <= 200 else f"{text[:80]}…{text[-80:]}"
    if isinstance(source, bytes):
        return what
    name = getattr(source, "name", None)
    if name in ("<stdin>", 0):
        return "standard input"
    return str(name) if isinstance(name, str) else what


def read_source(source: str | Path | bytes | BinaryIO, name: str, limits: ImageLimits) -> bytes:
    """All bytes of the source, at most `limits.max_bytes`.

    Raises:
        ImageError, ImageTooLarge: not there, not readable, empty, or too many.
    """
    if isinstance(source, str | Path):
        data = _read_file(source, name, limits)
    elif isinstance(source, bytes):
        data = source
    else:
        data = _read_stream(source, name, limits)
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(name, f"{len(data):,} bytes", limits)
    if not data:
        raise ImageError(f"{name} is empty (0 bytes); send a picture")
    return data


def _read_file(source: str | Path, name: str, limits: ImageLimits) -> bytes:
    if name.startswith(("http://", "https://", "data:")):
        raise ImageError(
            f"{name[:100]} is a URL, not a file; download it and give its path, "
            "or pipe it: curl -s URL | snugvl caption - (in Python: urllib.request.urlopen(url).read())"
        )
    if name.startswith("file://"):
        raise ImageError(f"{name} is a URL; give the path: {unquote(urlsplit(name).path)}")
    try:
        path = Path(source)
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            if not str(source):
                raise ImageError("the name of the picture is empty; give a path")
            raise ImageError(
                f"{name} is a folder; give a picture in it, such as {name.rstrip('/')}/photo.jpg"
            )
        # A pipe or a device has no size: it is limited while reading.
        if stat.S_ISREG(info.st_mode) and info.st_size > limits.max_bytes:
            raise _too_many_bytes(name, f"{info.st_size:,} bytes", limits)
        with path.open("rb") as stream:
            return _read_stream(stream, name, limits)
    except (OSError, ValueError) as error:
        raise _unread(str(source), name, error) from None


def _unread(source: str, name: str, error: OSError | ValueError) -> ImageError:
    """The error for a path whose file can't be read."""
    if in_base64(source):
        return ImageError(
            "the image is text in base64; give the bytes: base64.b64decode(text), or put "
            "data:image/png;base64, before it"
        )
    if isinstance(error, FileNotFoundError):
        return ImageError(f"{name} doesn't exist; check the path")
    if isinstance(error, PermissionError):
        return ImageError(f"{name} can't be read: permission denied; check its access rights")
    reason = getattr(error, "strerror", None) or one_line(error)
    printable = name.replace("\0", "\\0")
    return ImageError(f"{printable} can't be read: {reason}; check the path")


def _read_stream(stream: BinaryIO, name: str, limits: ImageLimits) -> bytes:
    chunks: list[bytes] = []
    total = 0
    while total <= limits.max_bytes:
        try:
            chunk = stream.read(min(1 << 20, limits.max_bytes + 1 - total))
        except OSError as error:
            raise ImageError(
                f"{name} can't be read: {error.strerror or one_line(error)}; try again"
            ) from None
        except ValueError as error:  # it is closed
            raise ImageError(f"{name} can't be read: {one_line(error)}; open it again") from None
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        total += len(chunk)
    raise _too_many_bytes(name, f"more than {limits.max_bytes:,} bytes", limits)


def _too_many_bytes(name: str, size: str, limits: ImageLimits) -> ImageTooLarge:
    return ImageTooLarge(
        f"{name} has {size}, the limit is {limits.max_bytes:,}; save it smaller, or raise the limit"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No warning of Pillow's leaks: what matters is an error of ours, the rest isn't the user's to mend."""
    with _HEADER_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.|pi_heif")  # not what other threads warn of
        yield


def _open_header(data: bytes, name: str, quote: bool) -> Image.Image:
    try:
        with _quiet():
            return Image.open(BytesIO(looks_like.hide(data, b"moov")), formats=FORMATS)
    except Exception as error:  # an unknown format, or a header that its plugin stumbles over
        # Pillow before 13 makes WebP's decoder, which refuses large ones, before it looks at the size.
        if isinstance(error, Image.DecompressionBombError) or _webp_pixels(data) > _BOMB:
            raise ImageTooLarge(
                f"{name} is far larger than 100 million pixels; scale it down first"
            ) from None
        raise ImageError(
            f"{name} is not a picture that can be read: it looks like {describe(data, quote=quote)}"
        ) from None


_BOMB: Final = 178_956_970  # pixels that Pillow refuses to open in any format


def _webp_pixels(data: bytes) -> int:
    """Pixels of the canvas that an extended WebP file claims; 0 for any other file."""
    if data[:4] != b"RIFF" or data[8:16] != b"WEBPVP8X":
        return 0
    return (int.from_bytes(data[24:27], "little") + 1) * (int.from_bytes(data[27:30], "little") + 1)


_ONE_OF_SEVERAL: Final = "only its {} was looked at. For another, save it as a file of its own"


def _check(image: Image.Image, name: str, limits: ImageLimits) -> str | None:
    """Refuses what isn't to be decoded. Returns what of the file isn't looked at, in a sentence."""
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{name} is {width}×{height} pixels, which is not a picture; export it again")
    if width * height > limits.max_pixels:
        raise ImageTooLarge(
            f"{name} is {width:,}×{height:,} = {width * height:,} pixels, "
            f"the limit is {limits.max_pixels:,}; scale it down first, or raise the limit"
        )
    # Phones put a small second picture behind the first (MPO): the first is the photo.
    frames = 1 if image.format == "MPO" else _count_frames(image, name)
    if frames == 1:
        return None
    if image.format == "TIFF":
        raise ImageError(f"{name} has {frames} pages; extract one page as PNG first")
    if image.format == "HEIF":
        return f"{name} holds {frames} pictures: {_ONE_OF_SEVERAL.format('main picture')}"
    seen = f"{_ONE_OF_SEVERAL.format('first frame')}, or show all as a video to a model that reads videos"
    return f"{name} is animated ({frames} frames): {seen}"


def _count_frames(image: Image.Image, name: str) -> int:
    try:
        with _quiet():
            return int(getattr(image, "n_frames", 1))
    except Exception as error:
        raise ImageError(f"{name} is damaged ({one_line(error)}); copy or download it again") from None


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation. Unreadable EXIF data counts as none, as viewers do."""
    try:
        with _quiet():
            orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:
        return image
    method = _ORIENTATIONS.get(orientation) if isinstance(orientation, int) else None
    if method is None:
        return image
    turned = image.transpose(method)
    for stale in ("exif", "xmp", "XML:com.adobe.xmp"):  # or the next reader would turn it again
        turned.info.pop(stale, None)
    return turned


def one_line(error: BaseException) -> str:
    """The first line of an exception's text, or its kind when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__
