"""Pictures on their way to a server: only their existence and size are checked here; the server decodes."""

import base64
import stat
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final, cast

from PIL import Image, ImageOps

from snugvl.core.messages import Video
from snugvl.errors import ImageError, ImageTooLarge, RequestError
from snugvl.inputs.image import ImageLimits, to_rgb

ImageSource = str | Path | bytes | BinaryIO | Image.Image
"""An image: a path, a URL (data, http or https), the bytes of a file, an open file, or a Pillow image."""

VisualSource = ImageSource | Video
"""An image, or a video: a file or a URL of one, or a `Video` that was read from a file."""

URL_SCHEMES: Final = ("http://", "https://", "data:")
_MAX_BYTES: Final = ImageLimits().max_bytes
_SIGNATURES: Final = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG", "image/png"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)


def url_of(source: VisualSource) -> str:
    """What a request calls the picture or video: a URL as it was given, anything else as a data URL.

    Raises:
        ImageError, ImageTooLarge: not there, not readable, empty, or more bytes than any server takes.
        RequestError: a video of which only the frames are at hand.
    """
    if isinstance(source, Video):
        if source.file is None:
            raise RequestError(
                "a client sends videos as files; give the file, or send these frames as pictures",
                field="messages",
            )
        source = source.file
    if isinstance(source, str) and source.startswith(URL_SCHEMES):
        return source
    data = _png(source) if isinstance(source, Image.Image) else read_bytes(source)
    return f"data:{_media_type(data)};base64,{base64.b64encode(data).decode()}"


def several(images: VisualSource | Sequence[VisualSource]) -> list[VisualSource]:
    """One image or several, as a list."""
    if isinstance(images, list | tuple):
        return list(images)
    return [cast(VisualSource, images)]


def read_bytes(source: str | Path | bytes | BinaryIO) -> bytes:
    """The bytes of a picture's file, as they are.

    Raises:
        ImageError, ImageTooLarge: not there, not readable, empty, or too many.
    """
    if isinstance(source, bytes):
        name, data = "the image", source
    elif isinstance(source, str | Path):
        name, data = str(source), _read_file(Path(source))
    else:
        name, data = "the image", source.read(_MAX_BYTES + 1)
    if not data:
        raise ImageError(f"{name} is empty (0 bytes); send a picture")
    if len(data) > _MAX_BYTES:
        raise ImageTooLarge(f"{name} has more than {_MAX_BYTES:,} bytes, the limit; save it smaller")
    return data


def _read_file(path: Path) -> bytes:
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise ImageError(f"{path} is a folder; give a picture in it, such as {path / 'photo.jpg'}")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ImageError(f"{path} doesn't exist; check the path") from None
    except PermissionError:
        raise ImageError(f"{path} can't be read: permission denied; check its access rights") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        printable = str(path).replace("\0", "\\0")
        raise ImageError(f"{printable} can't be read: {reason}; check the path") from None


def _png(image: Image.Image) -> bytes:
    """Upright and RGB, so that the server sees what a loaded model would; lossless, quick to write."""
    file = BytesIO()
    to_rgb(ImageOps.exif_transpose(image)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _media_type(data: bytes) -> str:
    """What the data URL says; the server looks for itself."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data[4:12] in (b"ftypavif", b"ftypmif1"):
        return "image/avif"
    kinds = (kind for signature, kind in _SIGNATURES if data.startswith(signature))
    return next(kinds, "application/octet-stream")
