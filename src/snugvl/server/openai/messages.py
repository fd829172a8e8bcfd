"""Messages of a chat completion and their parts: their JSON, and the conversation they make."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from snugvl.core.messages import Message, Part, Picture, Text, ToolCall, Video
from snugvl.errors import RequestError
from snugvl.server.fields import WHOLE, StringOrArray, StringOrObject
from snugvl.server.fields import Part as RequestPart
from snugvl.server.forms import call_arguments
from snugvl.server.media.loading import Detail, MediaRef, RequestMedia
from snugvl.server.record import Notes
from snugvl.server.together import in_turns
from snugvl.server.unsupported import PICTURE_PART, WRITTEN, UnsupportedFields

MAX_PARTS = 1024
Pixels = Annotated[int, Field(ge=1, le=2**53), WHOLE]


class TextPart(RequestPart):
    """Text."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestPart):
    """A data URL, a public http(s) URL, or `attachment:NAME` for a file of the same upload."""

    url: str
    detail: Detail | None = Field("auto", description="low: scaled down to 512×512 pixels' worth")
    max_pixels: Pixels | None = Field(None, description="as of the part")
    min_pixels: Any = Field(None, description="as of the part")


class ImagePart(RequestPart):
    """A picture."""

    type: Literal["image_url"]
    image_url: StringOrObject[ImageUrl]
    max_pixels: Pixels | None = Field(None, description="a larger picture is scaled down to it")
    min_pixels: Any = Field(None, description="ignored, with a warning")


class VideoUrl(RequestPart):
    """A video file, or an animated picture."""

    url: str
    fps: float | None = Field(None, gt=0, le=1000, description="frames per second to keep")


class VideoUrlPart(RequestPart):
    """A video by its URL."""

    type: Literal["video_url"]
    video_url: StringOrObject[VideoUrl]


class VideoFramesPart(RequestPart):
    """A video by the URLs of its frames."""

    type: Literal["video"]
    video: list[str] = Field(min_length=1, max_length=MAX_PARTS)
    fps: float | None = Field(None, gt=0, le=1000, description="frames per second that these frames are")


Found = Picture | Video
MediaPart = ImagePart | VideoUrlPart | VideoFramesPart
UserPart = Annotated[TextPart | ImagePart | VideoUrlPart | VideoFramesPart, Field(discriminator="type")]

# No part at all is no text: Zed writes the answer of a tool so that said nothing.
TextContent = StringOrArray[Annotated[list[TextPart], Field(max_length=MAX_PARTS)]]
UserContent = StringOrArray[Annotated[list[UserPart], Field(max_length=MAX_PARTS)]]


def texts_of(content: str | list[TextPart] | None) -> tuple[Part, ...]:
    """Content that is text only."""
    return () if content is None or content == "" else parts_of(content, {}, "")


def parts_of(content: str | Sequence[Any], found: Mapping[str, Found], field: str) -> tuple[Part, ...]:
    """Content of a message of any role. `found`: its pictures and videos by path; `field`: the content's
    path."""
    if isinstance(content, str):
        return (Text(content),)
    places = (f"{field}[{index}]" for index in range(len(content)))
    return tuple(found.get(place) or Text(part.text) for place, part in zip(places, content, strict=True))


def media_of(content: str | list[UserPart], field: str) -> dict[str, MediaPart]:
    """Pictures and videos of a content, by their paths in the request."""
    if isinstance(content, str):
        return {}
    return {f"{field}[{index}]": part for index, part in enumerate(content) if not isinstance(part, TextPart)}


def _ref(part: MediaPart, field: str, notes: Notes) -> MediaRef:
    """The URL or attachment of a part; `field` is the part's path."""
    if isinstance(part, ImagePart) and (part.min_pixels or getattr(part.image_url, "min_pixels", None)):
        notes.warn(f"ignored {field}.min_pixels")
    match part:
        case ImagePart(image_url=str() as url, max_pixels=most):
            return MediaRef(url, f"{field}.image_url", max_pixels=most)
        case ImagePart(image_url=ImageUrl(url=url, detail=detail, max_pixels=own), max_pixels=most):
            return MediaRef(url, f"{field}.image_url.url", detail=detail, max_pixels=most or own)
        case VideoUrlPart(video_url=str() as url):
            return MediaRef(url, f"{field}.video_url", "video")
        case VideoUrlPart(video_url=VideoUrl(url=url, fps=fps)):
            return MediaRef(url, f"{field}.video_url.url", "video", fps=fps)
        case VideoFramesPart(video=frames, fps=fps):
            return MediaRef(list(frames), f"{field}.video", "video", fps=fps)
    raise AssertionError("no other part passes the schema")


MAX_MESSAGES = 8192
MAX_CALLS = 256  # of one message

Name = Annotated[
    str | None, Field(description="Of the speaker; accepted, but chat templates do not show it to the model")
]


class SystemMessage(RequestPart):
    """Instructions. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer"]
    content: TextContent
    name: Name = None


class UserMessage(RequestPart):
    """A user's message, with pictures and videos."""

    unsupported: ClassVar[UnsupportedFields] = PICTURE_PART

    role: Literal["user"]
    content: UserContent
    name: Name = None


class FunctionCall(RequestPart):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class AssistantCall(RequestPart):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(RequestPart):
    """An earlier answer of the model."""

    unsupported: ClassVar[UnsupportedFields] = WRITTEN

    role: Literal["assistant"]
    content: TextContent | None = None
    tool_calls: Annotated[list[AssistantCall], Field(max_length=MAX_CALLS)] | None = None
    reasoning_content: Any = Field(None, description="what it thought before; text, as answers have it")
    reasoning: Any = Field(None, description="another name of reasoning_content")
    name: Name = None

    @property
    def thought(self) -> str:
        """The model's reasoning before this answer; empty where it is not here as text."""
        return next((text for text in (self.reasoning_content, self.reasoning) if isinstance(text, str)), "")


class ToolMessage(RequestPart):
    """A tool's result, with pictures and videos."""

    role: Literal["tool"]
    content: UserContent
    tool_call_id: str
    name: Name = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


async def conversation_of(messages: list[ChatMessage], media: RequestMedia) -> tuple[Message, ...]:
    """The conversation, its pictures fetched at once.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    wanted: dict[str, MediaPart] = {}
    async for index, message in in_turns(enumerate(messages)):
        if isinstance(message, UserMessage | ToolMessage):
            wanted |= media_of(message.content, f"messages[{index}].content")
    found = await media.load({path: _ref(part, path, media.notes) for path, part in wanted.items()})
    read: list[Message] = []
    async for index, message in in_turns(enumerate(messages)):
        read.append(_message(message, found, f"messages[{index}]", media.notes))
    return tuple(read)


def _message(message: ChatMessage, found: Mapping[str, Found], field: str, notes: Notes) -> Message:
    match message:
        case SystemMessage(content=content):
            return Message("system", texts_of(content))
        case UserMessage(content=content):
            return Message("user", parts_of(content, found, f"{field}.content"))
        case AssistantMessage():
            return _assistant(message, field, notes)
        case ToolMessage(content=content, tool_call_id=call):
            parts = parts_of(content, found, f"{field}.content") if content else ()
            return Message("tool", parts, tool_call_id=call)
    raise AssertionError("no other message passes the schema")


def _assistant(message: AssistantMessage, field: str, notes: Notes) -> Message:
    calls = tuple(
        ToolCall(call.id, call.function.name, call_arguments(call.function.arguments, place, notes))
        for index, call in enumerate(message.tool_calls or ())
        for place in [f"{field}.tool_calls[{index}].function.arguments"]
    )
    if message.content is None and not calls and not message.thought:
        raise RequestError(
            f"{field}: an assistant message has content, tool_calls or both; this one has neither",
            field=f"{field}.content",
        )
    return Message("assistant", texts_of(message.content), calls, reasoning=message.thought)
