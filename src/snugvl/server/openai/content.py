"""Parts of a message: their JSON, and what they become."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from snugvl.backends.protocol import Part, Text
from snugvl.server.openai.fields import STRING_OR_ARRAY, STRING_OR_OBJECT, Exact
from snugvl.server.openai.media import Detail, Media, together

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


UserPart = Annotated[TextPart | ImagePart | VideoUrlPart | VideoFramesPart, Field(discriminator="type")]

TextContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(min_length=1), Tag("array")],
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


async def parts_of(content: str | list[UserPart], media: Media, field: str) -> tuple[Part, ...]:
    """Content with its pictures and videos fetched at once; `field` is the content's path."""
    if isinstance(content, str):
        return (Text(content),)
    return tuple(
        await together(_part(part, media, f"{field}[{index}]") for index, part in enumerate(content))
    )


async def _part(part: UserPart, media: Media, field: str) -> Part:
    match part:
        case TextPart(text=text):
            return Text(text)
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
