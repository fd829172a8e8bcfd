"""The request of a response: its JSON, and the conversation that its input makes.

Items are finer than messages: an assistant's text and each of its calls are items of their own. Those that
follow one another become one message again.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from snugvl.core.messages import Grammar, Message, Part, Picture, Text, Tool, ToolCall, ToolUse
from snugvl.server.fields import STRING_OR_OBJECT, WHOLE, Exact, Harmless, StringOrArray
from snugvl.server.openai.common import Metadata
from snugvl.server.openai.constraints import (
    ANY_OBJECT,
    MAX_TOOLS,
    FormatName,
    JsonObjectFormat,
    JsonSchema,
    Mode,
    TextFormat,
    ToolName,
    schema_grammar,
    tool_use,
)
from snugvl.server.openai.media import Detail, MediaSource, fetch_all
from snugvl.server.openai.messages import MAX_MESSAGES, MAX_PARTS, call_arguments
from snugvl.server.openai.sampling import MaxTokens, Temperature, TopP

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Exact):
    """Text."""

    type: Literal["input_text"]
    text: str


class InputImage(Exact):
    """A picture: a data URL, a public http(s) URL, or `attachment:NAME` for a file of the same upload."""

    harmless: ClassVar[Harmless] = {"file_id": ()}

    type: Literal["input_image"]
    image_url: str
    detail: Detail = "auto"


class OutputText(Exact):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = Field(None, description="as they came; not shown to the model")
    parsed: Any = Field(None, description="added by the SDK's helpers; not shown to the model")


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]
WrittenPart = Annotated[InputText | OutputText, Field(discriminator="type")]


class InputMessage(Exact):
    """What a user or an instruction says."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: StringOrArray[Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS)]]
    id: str | None = None
    status: Status | None = None


class WrittenMessage(Exact):
    """What the model answered before."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: StringOrArray[Annotated[list[WrittenPart], Field(max_length=MAX_PARTS)]]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Exact):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Exact):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: StringOrArray[Annotated[list[InputText], Field(min_length=1, max_length=MAX_PARTS)]]
    id: str | None = None
    status: Status | None = None


def type_of_item(item: object) -> object:
    """The tag of an item; messages may leave their type out."""
    if not isinstance(item, dict):
        return "message"
    kind = item.get("type", "message")
    return "assistant" if kind == "message" and item.get("role") == "assistant" else kind


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[WrittenMessage, Tag("assistant")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(type_of_item),
]
Input = StringOrArray[Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]]


async def conversation_of(
    input_items: str | list[Item], instructions: str | None, media: MediaSource
) -> tuple[Message, ...]:
    """The conversation, its pictures fetched at once.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    messages = [Message("system", (Text(instructions),))] if instructions else []
    if isinstance(input_items, str):
        return (*messages, Message("user", (Text(input_items),)))
    found = await fetch_all(_pictures(input_items), lambda part, path: _fetch(part, path, media))
    for index, item in enumerate(input_items):
        message = _message(item, found, f"input[{index}]")
        if message.tool_calls and messages and messages[-1].role == "assistant":
            last = messages.pop()
            message = Message("assistant", last.content, last.tool_calls + message.tool_calls)
        messages.append(message)
    return tuple(messages)


def _pictures(items: list[Item]) -> dict[str, InputImage]:
    """All pictures by path."""
    return {
        f"input[{i}].content[{k}]": part
        for i, item in enumerate(items)
        if isinstance(item, InputMessage) and not isinstance(item.content, str)
        for k, part in enumerate(item.content)
        if isinstance(part, InputImage)
    }


async def _fetch(part: InputImage, field: str, media: MediaSource) -> Picture:
    return await media.picture(part.image_url, part.detail, f"{field}.image_url")


def _message(item: Item, found: Mapping[str, Picture], field: str) -> Message:
    match item:
        case InputMessage(role=role, content=str() as text):
            return Message("user" if role == "user" else "system", (Text(text),))
        case InputMessage(role=role, content=content):
            parts = tuple(
                Text(part.text) if isinstance(part, InputText) else found[f"{field}.content[{index}]"]
                for index, part in enumerate(content)
            )
            return Message("user" if role == "user" else "system", parts)
        case WrittenMessage(content=content):
            return Message("assistant", _texts(content))
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            text = call_arguments(arguments, f"{field}.arguments")
            return Message("assistant", (), (ToolCall(call_id, name, text),))
        case FunctionCallOutput(call_id=call_id, output=output):
            return Message("tool", _texts(output), tool_call_id=call_id)
    raise AssertionError("no other item passes the schema")


def _texts(content: str | list[WrittenPart] | list[InputText]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Text(content),)
    return tuple(Text(part.text) for part in content)


LOGPROBS = "message.output_text.logprobs"
STATELESS = "this server keeps nothing between requests"


class FunctionTool(Exact):
    """A function. Its arguments always follow `parameters`, so `strict` changes nothing."""

    harmless: ClassVar[Harmless] = {"defer_loading": (False,), "output_schema": (), "allowed_callers": ()}

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionChoice(Exact):
    """One of the tools by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Exact):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1, max_length=MAX_TOOLS)


ToolChoice = Annotated[
    Annotated[Mode, Tag("string")]
    | Annotated[
        Annotated[FunctionChoice | AllowedFunctions, Field(discriminator="type")],
        Tag("object"),
    ],
    STRING_OR_OBJECT,
]


class SchemaFormat(Exact):
    """JSON that follows a schema; answers always do, so `strict` changes nothing."""

    type: Literal["json_schema"]
    name: FormatName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextForm(Exact):
    """The form of the answer."""

    harmless: ClassVar[Harmless] = {"verbosity": ("medium",)}

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class NoReasoning(Exact):
    """The models served here don't reason apart from their answer."""

    harmless: ClassVar[Harmless] = {
        "effort": ("none",),
        "summary": ("auto",),
        "generate_summary": ("auto",),
    }


class ResponseStreamOptions(Exact):
    """What a stream tells besides its events."""

    harmless: ClassVar[Harmless] = {"include_obfuscation": (False,)}


class ResponseRequest(Exact):
    """A response to make. Nothing is stored: `store` is false here by default."""

    harmless: ClassVar[Harmless] = {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory",),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "max_tool_calls": (),
        "moderation": (),
        "context_management": (),
    }
    instead: ClassVar = {
        "store": f"{STATELESS}; leave it out or send false",
        "previous_response_id": f"{STATELESS}; send the earlier input and output items again in input",
        "conversation": f"{STATELESS}; send the earlier input and output items again in input",
        "background": f"{STATELESS}; wait for the answer, or stream it",
        "prompt": f"{STATELESS}, so it knows no prompt templates; send the text in instructions and input",
        "truncation": "leave it out or send 'disabled', and shorten input yourself",
        "service_tier": "this server has one tier; leave it out or send 'auto'",
        "context_management": "shorten input yourself",
    }

    input: Input
    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextForm | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    metadata: Metadata | None = None
    reasoning: NoReasoning | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens come with their log-probabilities."""
        return LOGPROBS in (self.include or ())

    def tool_use(self) -> ToolUse | None:
        """What the tools ask of the engine.

        Raises:
            RequestError: tools and choice don't fit.
        """
        offered = tuple(
            Tool(tool.name, tool.description or "", tool.parameters or {}) for tool in self.tools or ()
        )
        parallel = self.parallel_tool_calls
        match self.tool_choice:
            case FunctionChoice(name=name):
                return tool_use(offered, named=name, parallel=parallel)
            case AllowedFunctions(mode=mode, tools=allowed):
                names = [tool.name for tool in allowed]
                return tool_use(offered, mode, allowed=names, parallel=parallel)
            case choice:
                return tool_use(offered, choice, parallel=parallel)

    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None for plain text."""
        match self.text.format if self.text else None:
            case JsonObjectFormat():
                return ANY_OBJECT
            case SchemaFormat(schema_=schema):
                return schema_grammar(schema)
            case _:
                return None
