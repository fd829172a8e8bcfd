"""Anthropic's requests, /v1/messages and /v1/messages/count_tokens, and their content blocks."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from snugvl.core.sampling import MAX_STOP
from snugvl.server.fields import WHOLE, Body, Part, StringOrArray
from snugvl.server.forms import MAX_TOOLS, ToolName
from snugvl.server.unsupported import CLIENT_TOOL, MESSAGES, MESSAGES_PROMPT, PICTURE_BLOCK, UnsupportedFields

MAX_BLOCKS = 1024


def only(what: str, *types: str) -> BeforeValidator:
    """Refuses, by name, an object whose `type` is another than `types`. `what`: such objects, in words."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in types:
            raise PydanticCustomError(
                "unsupported_type",
                "{what} of type '{kind}' is not supported here; supported: {types}",
                {"what": what, "kind": kind[:40], "types": ", ".join(types)},
            )
        return value

    return BeforeValidator(check)


class CacheControl(Part):
    """Accepted without effect: the beginnings of prompts are cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Part):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(Part):
    """A picture itself. Its content decides what it is, not `media_type`."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Part):
    """A picture behind a public http(s) URL, or in a data URL."""

    type: Literal["url"]
    url: str


class ImageBlock(Part):
    """A picture."""

    type: Literal["image"]
    source: Annotated[
        Base64Source | UrlSource, Field(discriminator="type"), only("a source", "base64", "url")
    ]
    cache_control: CacheControl | None = None


class ToolUseBlock(Part):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ThinkingBlock(Part):
    """The model's reasoning before its answer; the chat template shows it to the model or doesn't."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(Part):
    """Thoughts of a model, encrypted by another server."""

    type: Literal["redacted_thinking"]


class TextSource(Part):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Part):
    """A document in pieces."""

    type: Literal["content"]
    content: StringOrArray[
        Annotated[
            list[
                Annotated[
                    TextBlock | ImageBlock, Field(discriminator="type"), only("a block", "text", "image")
                ]
            ],
            Field(max_length=MAX_BLOCKS),
        ]
    ]


class Citations(Part):
    """Whether the answer is to cite a document; the models served here don't."""

    enabled: bool | None = None


class DocumentBlock(Part):
    """A document of text, with pictures; no PDF."""

    type: Literal["document"]
    source: Annotated[
        TextSource | ContentSource,
        Field(discriminator="type"),
        only("a document's source", "text", "content"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock,
    Field(discriminator="type"),
    only("a block", "text", "image", "document"),
]


class ToolResultBlock(Part):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: StringOrArray[Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS)]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


OnlyText = Annotated[TextBlock, only("a block", "text")]
UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ToolResultBlock,
    Field(discriminator="type"),
    only("a block", "text", "image", "document", "tool_result"),
]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
    only("a block", "text", "tool_use", "thinking", "redacted_thinking"),
]

TextContent = StringOrArray[Annotated[list[OnlyText], Field(max_length=MAX_BLOCKS)]]
UserContent = StringOrArray[Annotated[list[UserBlock], Field(max_length=MAX_BLOCKS)]]
AssistantContent = StringOrArray[Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS)]]


MAX_MESSAGES = 10_000


class UserTurn(Part):
    """A user's turn: text, pictures, and results of tools."""

    unsupported: ClassVar[UnsupportedFields] = PICTURE_BLOCK

    role: Literal["user"]
    content: UserContent


class AssistantTurn(Part):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: AssistantContent


class SystemTurn(Part):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: TextContent


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(Part):
    """A tool that the client runs. Arguments always follow `input_schema`, so `strict` changes nothing."""

    unsupported: ClassVar[UnsupportedFields] = CLIENT_TOOL

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Part):
    """Text, calls, or both."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Part):
    """At least one call."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(Part):
    """A call of this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Part):
    """No call."""

    type: Literal["none"]


class Thinking(Part):
    """Whether a model that can think does so, where its chat template can be told, and shows its thoughts."""

    type: Literal["disabled", "adaptive", "enabled"]


class JsonFormat(Part):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


Format = Annotated[JsonFormat, only("a format", "json_schema")]


class OutputConfig(Part):
    """The form of the answer."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "output_config."

    format: Format | None = None


class MessagesPrompt(Body):
    """The prompt of a conversation: messages, system text, tools."""

    unsupported: ClassVar[UnsupportedFields] = MESSAGES_PROMPT

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextContent | None = None
    tools: (
        Annotated[list[Annotated[ClientTool, only("a tool", "custom")]], Field(max_length=MAX_TOOLS)] | None
    ) = None
    tool_choice: (
        Annotated[AutoChoice | AnyChoice | OneToolChoice | NoChoice, Field(discriminator="type")] | None
    ) = None
    thinking: Annotated[Thinking, only("thinking", "disabled", "adaptive", "enabled")] | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = Field(default=None, description="what output_config.format was before")
    cache_control: CacheControl | None = None


class CountTokensRequest(MessagesPrompt):
    """A prompt to count."""


class Metadata(Part):
    """Accepted without effect: no user's requests are counted or stored here."""

    user_id: str | None = None


class MessagesRequest(MessagesPrompt):
    """A conversation to continue."""

    unsupported: ClassVar[UnsupportedFields] = MESSAGES

    max_tokens: Annotated[
        int,
        Field(ge=1, lt=2**31, description="a ceiling: where the context leaves less, the answer ends there"),
        WHOLE,
    ]
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP)] | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=1, description="0, the default, is greedy")] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, description="0 is greedy")] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31, description="0 is off"), WHOLE] | None = None
    metadata: Metadata | None = None
