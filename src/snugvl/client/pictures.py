"""Pictures on their way to a server: only their existence and size are checked here; the server decodes."""

import base64
import stat
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

from PIL import Image

from snugvl.core.messages import Video
from snugvl.errors import ImageError, ImageTooLarge, RequestError
from snugvl.inputs.frames import is_video
from snugvl.inputs.given import VisualSource, decode, taken
from snugvl.inputs.image import ImageLimits
from snugvl.inputs.looks_like import media_type

URL_SCHEMES: Final = ("http://", "https://", "data:")
_MAX_BYTES: Final = ImageLimits().max_bytes


def url_of(source: VisualSource) -> str:
    """What a request calls the picture or video: a URL as it was given, anything else as a data URL.

    Raises:
        ImageError, ImageTooLarge: not there, not readable, empty, or more bytes than any server takes.
        RequestError: a video of which only the frames are at hand.
    """
    if isinstance(source, str) and source.startswith(URL_SCHEMES):
        return source
    given = taken(source)
    if isinstance(given, Video):
        if given.file is None:
            raise RequestError(
                "a client sends videos as files; give the file, or send these frames as pictures",
                field="messages",
            )
        given = given.file
    data = _png(given) if isinstance(given, Image.Image) else read_bytes(given)
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def is_shown_as_video(sources: Sequence[object]) -> bool:
    """Whether a server must be told that animations among them are meant as videos."""
    return any(isinstance(source, Video) and source.file and not is_video(source.file) for source in sources)


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
    decode(image).save(file, "PNG", compress_level=1)
    return file.getvalue()
