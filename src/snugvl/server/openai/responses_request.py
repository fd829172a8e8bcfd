"""The request of a response: its JSON, and the conversation that its input makes.

Items are finer than messages: an assistant's text and each of its calls are items of their own. Those that
follow one another become one message again.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from snugvl.core.messages import Grammar, Message, Text, ToolCall, ToolUse
from snugvl.server.fields import WHOLE, Body, StringOrArray
from snugvl.server.fields import Part as RequestPart
from snugvl.server.forms import MAX_TOOLS, call_arguments, schema_grammar
from snugvl.server.media.loading import Detail, MediaRef, RequestMedia
from snugvl.server.openai.common import Effort, MaxTokens, Metadata, Temperature, TopP
from snugvl.server.openai.constraints import (
    ANY_OBJECT,
    JsonObjectFormat,
    NamedSchema,
    TextFormat,
)
from snugvl.server.openai.messages import MAX_MESSAGES, MAX_PARTS, Found, parts_of
from snugvl.server.openai.responses_tools import (
    INPUT,
    VENDOR,
    ResponseTool,
    ToolChoice,
    full_name,
    response_tool_use,
)
from snugvl.server.record import Notes
from snugvl.server.together import in_turns
from snugvl.server.unsupported import (
    INPUT_IMAGE,
    INPUT_PICTURE,
    ITEM,
    RESPONSES,
    TEXT_FORM,
    UnsupportedFields,
)

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(RequestPart):
    """Text."""

    type: Literal["input_text"]
    text: str


class InputImage(RequestPart):
    """A picture: a data URL, a public http(s) URL, or `attachment:NAME` for a file of the same upload."""

    unsupported: ClassVar[UnsupportedFields] = INPUT_IMAGE

    type: Literal["input_image"]
    image_url: str
    detail: Detail | None = "auto"


class OutputText(RequestPart):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]
WrittenPart = Annotated[InputText | OutputText, Field(discriminator="type")]


class InputMessage(RequestPart):
    """A message of a user, or an instruction."""

    unsupported: ClassVar[UnsupportedFields] = INPUT_PICTURE

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: StringOrArray[Annotated[list[InputPart], Field(max_length=MAX_PARTS)]]
    id: str | None = None
    status: Status | None = None


class WrittenMessage(RequestPart):
    """An earlier answer of the model."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: StringOrArray[Annotated[list[WrittenPart], Field(max_length=MAX_PARTS)]]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class ReasoningItem(RequestPart):
    """The model's reasoning before its answer; the chat template shows it to the model or doesn't."""

    type: Literal["reasoning"]
    content: Any = None
    summary: Any = None

    @property
    def text(self) -> str:
        """All of it, or a summary, where it isn't encrypted by another server."""
        found = [
            [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            for parts in (self.content, self.summary)
            if isinstance(parts, list)
        ]
        return "\n".join(next(filter(None, found), []))


class VendorItem(RequestPart):
    """A call that a vendor's servers ran, or what it gave; taken, and not shown to the model."""

    type: str


class FunctionCallItem(RequestPart):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: Status | None = None


class CustomCallItem(RequestPart):
    """A call of a free-form tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(RequestPart):
    """The result of a function or a free-form tool, with pictures."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: StringOrArray[Annotated[list[InputPart], Field(max_length=MAX_PARTS)]]
    id: str | None = None
    status: Status | None = None


def type_of_item(item: object) -> object:
    """The tag of an item; messages may leave their type out."""
    if not isinstance(item, dict):
        return "message"
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind.endswith(("_call", "_output", "_tools")) and VENDOR.fullmatch(kind):
        return "vendor"
    return "assistant" if kind == "message" and item.get("role") == "assistant" else kind


def refuse_reference(item: object) -> object:
    """Refuse what names an item that the server would have to remember; such may leave its type out."""
    if isinstance(item, dict) and (
        item.get("type") == "item_reference"
        or (item.get("type") is None and "id" in item and item.keys() <= {"id", "type"})
    ):
        ITEM["item_reference"].check("item_reference", item)
    return item


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[WrittenMessage, Tag("assistant")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[FunctionCallOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[VendorItem, Tag("vendor")],
    Discriminator(type_of_item),
    BeforeValidator(refuse_reference),
]
Input = StringOrArray[Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]]


async def conversation_of(
    input_items: str | list[Item], instructions: str | None, media: RequestMedia
) -> tuple[Message, ...]:
    """The conversation, its pictures fetched at once.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    messages = [Message("system", (Text(instructions),))] if instructions else []
    if isinstance(input_items, str):
        return (*messages, Message("user", (Text(input_items),)))
    found = await media.load(await _pictures(input_items))
    calls: list[ToolCall] = []  # of the last message, which several items may make
    thought = ""  # before the assistant's next item
    async for index, item in in_turns(enumerate(input_items)):
        if isinstance(item, VendorItem):
            media.notes.warn(f"left out input[{index}]: no server but its vendor's runs {item.type}")
        if isinstance(item, ReasoningItem):
            thought = "\n".join(filter(None, (thought, item.text)))
        if isinstance(item, ReasoningItem | VendorItem):
            continue
        message = _message(item, found, f"input[{index}]", media.notes)
        if message.role == "assistant":
            message, thought = replace(message, reasoning=thought), ""
        if message.tool_calls and not message.reasoning and messages and messages[-1].role == "assistant":
            calls += message.tool_calls
            continue
        if calls:
            messages[-1] = replace(messages[-1], tool_calls=tuple(calls))
        messages.append(message)
        calls = list(message.tool_calls)
    if calls:
        messages[-1] = replace(messages[-1], tool_calls=tuple(calls))
    return tuple(messages)


async def _pictures(items: list[Item]) -> dict[str, MediaRef]:
    """All pictures by path."""
    found: dict[str, MediaRef] = {}
    async for index, item in in_turns(enumerate(items)):
        if isinstance(item, InputMessage):
            found |= _pictures_in(item.content, f"input[{index}].content")
        elif isinstance(item, FunctionCallOutput):
            found |= _pictures_in(item.output, f"input[{index}].output")
    return found


def _pictures_in(content: str | list[InputPart], field: str) -> dict[str, MediaRef]:
    return {
        f"{field}[{index}]": MediaRef(part.image_url, f"{field}[{index}].image_url", detail=part.detail)
        for index, part in enumerate(() if isinstance(content, str) else content)
        if isinstance(part, InputImage)
    }


def _message(item: Item, found: Mapping[str, Found], field: str, notes: Notes) -> Message:
    match item:
        case InputMessage(role=role, content=content):
            parts = parts_of(content, found, f"{field}.content")
            return Message("user" if role == "user" else "system", parts)
        case WrittenMessage(content=content):
            return Message("assistant", parts_of(content, {}, ""))
        case FunctionCallItem(call_id=call_id, name=name, namespace=namespace, arguments=arguments):
            text = call_arguments(arguments, f"{field}.arguments", notes)
            return Message("assistant", (), (ToolCall(call_id, full_name(name, namespace), text),))
        case CustomCallItem(call_id=call_id, name=name, namespace=namespace, input=given):
            text = json.dumps({INPUT: given}, ensure_ascii=False)
            return Message("assistant", (), (ToolCall(call_id, full_name(name, namespace), text),))
        case FunctionCallOutput(call_id=call_id, output=output):
            return Message("tool", parts_of(output, found, f"{field}.output"), tool_call_id=call_id)
    raise AssertionError("no other item passes the schema")


LOGPROBS = "message.output_text.logprobs"


class PlainFormat(TextFormat):
    """Any text."""

    place: ClassVar[str] = "text.format."


class ObjectFormat(JsonObjectFormat):
    """Any JSON object, or one that follows a schema."""

    place: ClassVar[str] = "text.format."


class SchemaFormat(NamedSchema):
    """JSON that follows a schema. `strict`: a keyword that can't be enforced is refused, not left out."""

    place: ClassVar[str] = "text.format."

    type: Literal["json_schema"]


class TextForm(RequestPart):
    """The form of the answer."""

    unsupported: ClassVar[UnsupportedFields] = TEXT_FORM
    warns: ClassVar[bool] = True
    place: ClassVar[str] = "text."

    format: Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningOptions(RequestPart):
    """Options of the model's reasoning."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "reasoning."

    effort: Effort | None = None


class ResponseStreamOptions(RequestPart):
    """Options of a stream."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "stream_options."


class ResponseRequest(Body):
    """A response to make. Nothing is stored: `store` is false here by default."""

    unsupported: ClassVar[UnsupportedFields] = RESPONSES

    input: Input
    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextForm | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: MaxTokens = None
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
    ignore_eos: bool | None = Field(None, description="as in chat completions: programs that measure send it")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @property
    def effort(self) -> Effort | None:
        """The reasoning effort, as a variable of the chat template."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens come with their log-probabilities."""
        return LOGPROBS in (self.include or ())

    def tool_use(self, notes: Notes) -> ToolUse | None:
        """The tool use for the engine.

        Raises:
            RequestError: tools and choice don't fit.
        """
        return response_tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls, notes)

    def grammar(self, notes: Notes) -> Grammar | None:
        """The grammar of the answer; None for plain text."""
        match self.text.format if self.text else None:
            case ObjectFormat(schema_=schema) if schema:
                return schema_grammar(schema, "text.format", notes)
            case ObjectFormat():
                return ANY_OBJECT
            case SchemaFormat(schema_=schema, strict=strict):
                return schema_grammar(schema, "text.format", notes, strict=strict)
            case _:
                return None
