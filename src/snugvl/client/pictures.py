"""Pictures on their way to a server: only their existence and size are checked here; the server decodes."""

import base64
import re
from collections.abc import Sequence
from io import BytesIO
from typing import Any, Final, Self, cast

from PIL import Image

from snugvl.core.messages import Picture, Video
from snugvl.errors import RequestError
from snugvl.inputs.frames import is_video
from snugvl.inputs.given import VisualSource, called, taken, upright
from snugvl.inputs.image import ImageLimits, read_source
from snugvl.inputs.looks_like import URL_SCHEMES, media_type

# How a server calls what it was sent, by its field; a step into JSON is a key or a place.
_SENT: Final = re.compile(r"^the (?:image|video)(?: at (\S+))?(?= )")
_STEP: Final = re.compile(r"([^.\[\]]+)(?<!\d)|(?<=\[)(\d+)(?=\])")


class Named(str):
    """A picture's URL in the body of a request, with the picture's name for errors. `name`: name of its file;
    "" where it has none."""

    name: str

    def __new__(cls, url: str, name: str) -> Self:
        made = super().__new__(cls, url)
        made.name = name
        return made

    def __reduce__(self) -> tuple[type["Named"], tuple[str, str]]:
        """Copied and pickled with its name."""
        return Named, (str(self), self.name)


def in_our_names(message: str, body: object) -> str:
    """A server's message about a picture that it was sent, with the name that the picture has here. `body`:
    the JSON that was sent; the URLs of pictures in it are `Named`."""
    sent = _SENT.match(message)
    if sent is None:
        return message
    value = body
    for key, place in _STEP.findall(sent[1] or "image"):
        try:
            value = cast("Any", value)[int(place) if place else key]
        except (KeyError, IndexError, TypeError):
            return message
    name = getattr(value, "name", "")
    return f"{name}{message[sent.end() :]}" if name else message


def url_of(source: VisualSource, what: str = "the image") -> str:
    """The URL of a picture or video in a request: a URL as it was given, anything else as a data URL. `what`:
    name in errors of a picture that has none; "": the server's name, its field.

    Raises:
        ImageError, ImageTooLarge: not there, not readable, empty, or more bytes than any server takes.
        RequestError: a video of which only the frames are at hand.
    """
    if isinstance(source, str) and source.startswith(URL_SCHEMES):
        return source
    given = taken(source, what or "the image")
    name = called(given, what)
    if isinstance(given, Video):
        if given.file is None:
            raise RequestError(
                "a client sends videos as files; give the file, or send these frames as pictures",
                field="messages",
            )
        given = given.file
    if isinstance(given, Picture):
        given = given.image if given.data is None else given.data
    said = name or "the image"
    data = _png(given, said) if isinstance(given, Image.Image) else read_source(given, said, ImageLimits())
    return Named(f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}", name)


def is_shown_as_video(sources: Sequence[object]) -> bool:
    """Whether a server must be told that animations among them are meant as videos."""
    return any(isinstance(source, Video) and source.file and not is_video(source.file) for source in sources)


def _png(image: Image.Image, name: str) -> bytes:
    """The image as PNG, upright and RGB, as a loaded model would see it; quick to write."""
    file = BytesIO()
    upright(image, name).save(file, "PNG", compress_level=1)
    return file.getvalue()
