"""Anthropic's requests, /v1/messages and /v1/messages/count_tokens, and their content blocks."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from snugvl.core.sampling import MAX_STOP
from snugvl.server.fields import WHOLE, Exact, Harmless, StringOrArray

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


def json_kind(value: object) -> str:
    """Tells a list from a string, so that an error speaks of the one that was meant."""
    return "array" if isinstance(value, list) else "string"


class CacheControl(Exact):
    """Accepted without effect: the beginnings of prompts are cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Exact):
    """Text."""

    harmless: ClassVar[Harmless] = {"citations": ([],)}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(Exact):
    """A picture itself. Its content decides what it is, not `media_type`."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Exact):
    """A picture behind a public http(s) URL, or in a data URL."""

    type: Literal["url"]
    url: str


class ImageBlock(Exact):
    """A picture."""

    harmless: ClassVar[Harmless] = {"transformations": ({},)}

    type: Literal["image"]
    source: Annotated[
        Base64Source | UrlSource, Field(discriminator="type"), only("a source", "base64", "url")
    ]
    cache_control: CacheControl | None = None


class ToolUseBlock(Exact):
    """A call that the assistant made."""

    harmless: ClassVar[Harmless] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type"), only("a block", "text", "image")]


class ToolResultBlock(Exact):
    """What a tool answered."""

    harmless: ClassVar[Harmless] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: StringOrArray[Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS)]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


OnlyText = Annotated[TextBlock, only("a block", "text")]
UserBlock = Annotated[
    TextBlock | ImageBlock | ToolResultBlock,
    Field(discriminator="type"),
    only("a block", "text", "image", "tool_result"),
]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock, Field(discriminator="type"), only("a block", "text", "tool_use")
]

TextContent = StringOrArray[Annotated[list[OnlyText], Field(max_length=MAX_BLOCKS)]]
UserContent = StringOrArray[Annotated[list[UserBlock], Field(max_length=MAX_BLOCKS)]]
AssistantContent = StringOrArray[Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS)]]


MAX_MESSAGES = 10_000


class UserTurn(Exact):
    """What the user said, and what tools answered."""

    role: Literal["user"]
    content: UserContent


class AssistantTurn(Exact):
    """What the model answered before."""

    role: Literal["assistant"]
    content: AssistantContent


class SystemTurn(Exact):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: TextContent


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(Exact):
    """A tool that the client runs. Arguments always follow `input_schema`, so `strict` changes nothing."""

    harmless: ClassVar[Harmless] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (True,),  # as arguments stream here
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Exact):
    """Text, calls, or both."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Exact):
    """At least one call."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class OneToolChoice(Exact):
    """A call of this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Exact):
    """No call."""

    type: Literal["none"]


class Thinking(Exact):
    """The models here don't think before they answer, which both of these allow."""

    type: Literal["disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Exact):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


Format = Annotated[JsonFormat, only("a format", "json_schema")]


class OutputConfig(Exact):
    """What form the answer has."""

    harmless: ClassVar[Harmless] = {"effort": ("high",)}  # what it is without

    format: Format | None = None


class MessagesPrompt(Exact):
    """What the model reads, and how it may answer."""

    harmless: ClassVar[Harmless] = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }
    instead: ClassVar[Mapping[str, str]] = {
        "container": "this server runs no code",
        "mcp_servers": "this server calls no other servers; run their tools in your program",
        "context_management": "send the conversation as the model should see it",
    }

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextContent | None = None
    tools: Annotated[list[Annotated[ClientTool, only("a tool", "custom")]], Field(max_length=128)] | None = (
        None
    )
    tool_choice: (
        Annotated[AutoChoice | AnyChoice | OneToolChoice | NoChoice, Field(discriminator="type")] | None
    ) = None
    thinking: Annotated[Thinking, only("thinking", "disabled", "adaptive")] | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = Field(default=None, description="what output_config.format was before")
    cache_control: CacheControl | None = None


class CountTokensRequest(MessagesPrompt):
    """A prompt to count."""


class Metadata(Exact):
    """Accepted without effect: nobody's requests are counted or stored here."""

    user_id: str | None = None


class MessagesRequest(MessagesPrompt):
    """A conversation to continue."""

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
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31, description="0 is off"), WHOLE] | None = None
    metadata: Metadata | None = None
