"""Anthropic's content blocks, as requests have them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from snugvl.server.fields import Exact, Harmless

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
    content: (
        Annotated[
            Annotated[str, Tag("string")]
            | Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS), Tag("array")],
            Discriminator(json_kind),
        ]
        | None
    ) = None
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

TextContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[OnlyText], Field(max_length=MAX_BLOCKS), Tag("array")],
    Discriminator(json_kind),
]
UserContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[UserBlock], Field(max_length=MAX_BLOCKS), Tag("array")],
    Discriminator(json_kind),
]
AssistantContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS), Tag("array")],
    Discriminator(json_kind),
]
