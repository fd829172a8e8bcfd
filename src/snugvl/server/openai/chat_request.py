"""The request of a chat completion: tools, the form of its answer, and messages that make a conversation."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from snugvl.core.folders import json_object
from snugvl.core.messages import Grammar, Message, Part, Picture, Text, ToolCall, ToolUse, Video
from snugvl.errors import RequestError
from snugvl.server.fields import STRING_OR_OBJECT, WHOLE, StringOrArray, StringOrObject, in_turns
from snugvl.server.fields import Part as RequestPart
from snugvl.server.forms import (
    MAX_TOOLS,
    JsonSchema,
    Mode,
    ToolName,
    call_arguments,
    offered_tool,
    schema_grammar,
    tool_use,
)
from snugvl.server.media.loading import Detail, MediaRef, RequestMedia
from snugvl.server.metrics import RequestNotes
from snugvl.server.unsupported import PICTURE_PART, WRITTEN, UnsupportedFields


class Function(RequestPart):
    """A function. `strict`: a keyword of `parameters` that can't be enforced is refused, not left out."""

    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class ChatTool(RequestPart):
    """A tool of a chat completion."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestPart):
    """A function by its name."""

    name: str


class ChatToolName(RequestPart):
    """One of the tools by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestPart):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[ChatToolName] = Field(min_length=1, max_length=MAX_TOOLS)


class ChatAllowedTools(RequestPart):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatToolChoice = Annotated[
    Annotated[Mode, Tag("string")]
    | Annotated[Annotated[ChatToolName | ChatAllowedTools, Field(discriminator="type")], Tag("object")],
    STRING_OR_OBJECT,
]


def chat_tool_use(
    tools: list[ChatTool] | None, choice: ChatToolChoice | None, parallel: bool | None, notes: RequestNotes
) -> ToolUse | None:
    """The engine's use of the tools of a chat completion."""
    functions = [tool.function for tool in tools or ()]
    offered = tuple(
        offered_tool(each.name, each.description, each.parameters, each.strict) for each in functions
    )
    match choice:
        case ChatToolName(function=FunctionName(name=name)):
            return tool_use(offered, notes, named=name, parallel=parallel)
        case ChatAllowedTools(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            return tool_use(offered, notes, allowed.mode, allowed=names, parallel=parallel)
        case _:
            return tool_use(offered, notes, choice, parallel=parallel)


class AnswerFormat(RequestPart):
    """A form of the answer. Unknown names in it are ignored, with a warning."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "response_format."


class TextFormat(AnswerFormat):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(AnswerFormat):
    """Any JSON object, or one that follows a schema, as llama.cpp has it."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(AnswerFormat):
    """A JSON schema. `strict`: a keyword that can't be enforced is refused, not left out."""

    place: ClassVar[str] = "response_format.json_schema."

    name: ToolName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(AnswerFormat):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]

ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


def grammar_of(wanted: ResponseFormat | None, notes: RequestNotes) -> Grammar | None:
    """The grammar of a format; None for plain text."""
    match wanted:
        case JsonObjectFormat(schema_=schema):
            return schema_grammar(schema, "response_format", notes) if schema else ANY_OBJECT
        case JsonSchemaFormat(json_schema=named):
            return schema_grammar(named.schema_, "response_format", notes, strict=named.strict)
        case _:
            return None


Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]


class StructuredOutputs(RequestPart):
    """vLLM's way to say what an answer looks like: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="Lark, in llguidance's dialect")
    json_object: bool | None = None

    def grammars(self, notes: RequestNotes) -> list[Grammar]:
        """The answers that are asked for, one grammar each.

        Raises:
            RequestError: a schema in a string that is not a JSON object.
        """
        found = [ANY_OBJECT] if self.json_object else []
        if self.json_ is not None:
            found.append(schema_grammar(_schema_of(self.json_), "structured_outputs", notes))
        if self.choice is not None:
            found.append(Grammar("lark", "start: " + " | ".join(map(json.dumps, self.choice))))
        if self.regex is not None:
            found.append(Grammar("regex", self.regex))
        if self.grammar is not None:
            found.append(Grammar("lark", self.grammar))
        return found


def _schema_of(value: dict[str, Any] | str) -> dict[str, Any]:
    found = json_object(value) if isinstance(value, str) else value
    if found is None:
        raise RequestError(
            "structured_outputs.json is a JSON schema, an object, also as text", field="structured_outputs"
        )
    return found


def form_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: StructuredOutputs,
    notes: RequestNotes,
) -> tuple[Grammar | None, str]:
    """The one form that an answer must have, and the field that says so.

    Raises:
        RequestError: several of them.
    """
    openai = grammar_of(response_format, notes)
    found = [(openai, "response_format")] if openai is not None else []
    forms = structured.grammars(notes) if structured else ()
    found += [(grammar, "structured_outputs") for grammar in forms]
    given = {"json": guided.json_, "choice": guided.choice, "regex": guided.regex, "grammar": guided.grammar}
    names = [f"guided_{name}" for name, value in given.items() if value is not None]
    found += zip(guided.grammars(notes), names, strict=True)
    if len(found) > 1:
        asked = " and ".join(dict.fromkeys(name for _, name in found))
        raise RequestError(f"an answer has one form, but {asked} ask for several", field=found[1][1])
    return found[0] if found else (None, "response_format")


MAX_PARTS = 1024
Pixels = Annotated[int, Field(ge=1, le=2**53), WHOLE]


class TextPart(RequestPart):
    """Text."""

    type: Literal["text"]
    text: str


class RefusalPart(RequestPart):
    """Words with which a model declined to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The words: to a model they are text."""
        return self.refusal


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

# No part at all is not text: Zed writes the answer of a tool so that said nothing.
TextContent = StringOrArray[Annotated[list[TextPart], Field(max_length=MAX_PARTS)]]
WrittenPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
WrittenContent = StringOrArray[Annotated[list[WrittenPart], Field(max_length=MAX_PARTS)]]
UserContent = StringOrArray[Annotated[list[UserPart], Field(max_length=MAX_PARTS)]]


def texts_of(content: str | Sequence[TextPart | RefusalPart] | None) -> tuple[Part, ...]:
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


def _ref(part: MediaPart, field: str, notes: RequestNotes) -> MediaRef:
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
    content: WrittenContent | None = None
    refusal: str | None = Field(None, description="with which it declined; read where there is no content")
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


def _message(message: ChatMessage, found: Mapping[str, Found], field: str, notes: RequestNotes) -> Message:
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


def _assistant(message: AssistantMessage, field: str, notes: RequestNotes) -> Message:
    calls = tuple(
        ToolCall(call.id, call.function.name, call_arguments(call.function.arguments, place, notes))
        for index, call in enumerate(message.tool_calls or ())
        for place in [f"{field}.tool_calls[{index}].function.arguments"]
    )
    written = message.content or message.refusal
    return Message("assistant", texts_of(written), calls, reasoning=message.thought)
