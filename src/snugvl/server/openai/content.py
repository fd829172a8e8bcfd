"""Parts of a message: their JSON, and what they become."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, Tag

from snugvl.backends.protocol import Part, Picture, Text, Video
from snugvl.server.fields import STRING_OR_ARRAY, STRING_OR_OBJECT, Exact
from snugvl.server.openai.media import Detail, MediaSource

MAX_PARTS = 1024


class TextPart(Exact):
    """Text."""

    type: Literal["text"]
    text: str


class ImageUrl(Exact):
    """A data URL, a public http(s) URL, or `attachment:NAME` for a file of the same upload."""

    url: str
    detail: Detail = Field("auto", description="low: scaled down to 512×512 pixels' worth")


class ImagePart(Exact):
    """A picture."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[str, Tag("string")] | Annotated[ImageUrl, Tag("object")],
        STRING_OR_OBJECT,
    ]


class VideoUrl(Exact):
    """A video file, or an animated picture."""

    url: str
    fps: float | None = Field(None, gt=0, le=1000, description="frames per second to keep")


class VideoUrlPart(Exact):
    """A video by its URL."""

    type: Literal["video_url"]
    video_url: Annotated[
        Annotated[str, Tag("string")] | Annotated[VideoUrl, Tag("object")],
        STRING_OR_OBJECT,
    ]


class VideoFramesPart(Exact):
    """A video by the URLs of its frames."""

    type: Literal["video"]
    video: list[str] = Field(min_length=1, max_length=MAX_PARTS)
    fps: float | None = Field(None, gt=0, le=1000, description="frames per second that these frames are")


Found = Picture | Video
MediaPart = ImagePart | VideoUrlPart | VideoFramesPart
UserPart = Annotated[TextPart | ImagePart | VideoUrlPart | VideoFramesPart, Field(discriminator="type")]

TextContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS), Tag("array")],
    STRING_OR_ARRAY,
]
UserContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[UserPart], Field(min_length=1, max_length=MAX_PARTS), Tag("array")],
    STRING_OR_ARRAY,
]


def texts_of(content: str | list[TextPart] | None) -> tuple[Part, ...]:
    """Content that is text only."""
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(Text(part.text) for part in content)


def parts_of(content: str | list[UserPart], found: Mapping[str, Found], field: str) -> tuple[Part, ...]:
    """Content of a user. `found`: its pictures and videos by path; `field`: the content's own path."""
    if isinstance(content, str):
        return (Text(content),)
    return tuple(
        Text(part.text) if isinstance(part, TextPart) else found[f"{field}[{index}]"]
        for index, part in enumerate(content)
    )


def media_of(content: str | list[UserPart], field: str) -> dict[str, MediaPart]:
    """The pictures and videos of a user's content by path."""
    if isinstance(content, str):
        return {}
    return {f"{field}[{index}]": part for index, part in enumerate(content) if not isinstance(part, TextPart)}


async def fetch(part: MediaPart, field: str, media: MediaSource) -> Found:
    """The picture or video behind a part; `field` is the part's path."""
    match part:
        case ImagePart(image_url=str() as url):
            return await media.picture(url, "auto", f"{field}.image_url")
        case ImagePart(image_url=ImageUrl(url=url, detail=detail)):
            return await media.picture(url, detail, f"{field}.image_url.url")
        case VideoUrlPart(video_url=str() as url):
            return await media.video(url, None, f"{field}.video_url")
        case VideoUrlPart(video_url=VideoUrl(url=url, fps=fps)):
            return await media.video(url, fps, f"{field}.video_url.url")
        case VideoFramesPart(video=frames, fps=fps):
            return await media.video(frames, fps, f"{field}.video")
    raise AssertionError("no other part passes the schema")
