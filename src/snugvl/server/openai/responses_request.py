"""The request of a response: its tools, its JSON, and the conversation that its input makes.

Items are finer than messages: an assistant's text and each of its calls are items of their own. Those that
follow one another become one message again.

A model calls functions alone. So a free-form tool is a function with one text, `input`, and a tool of a
namespace is a function whose name begins with the namespace's. Calls go back in the form that the client
offered the tool in (`Called`); those of a client's history are read the same way. What only a vendor's own
servers run, such as a web search, is left out, with a warning.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from snugvl.core.messages import Grammar, Message, Text, Tool, ToolCall, ToolUse
from snugvl.errors import RequestError
from snugvl.server.fields import STRING_OR_OBJECT, Body, StringOrArray, in_turns
from snugvl.server.fields import Part as RequestPart
from snugvl.server.forms import (
    MAX_TOOLS,
    JsonSchema,
    Mode,
    Temperature,
    ToolName,
    TopLogprobs,
    TopP,
    call_arguments,
    offered_tool,
    schema_grammar,
    tool_use,
)
from snugvl.server.generation import arguments_of
from snugvl.server.media.loading import Detail, MediaRef, RequestMedia
from snugvl.server.metrics import RequestNotes
from snugvl.server.openai.chat_request import (
    ANY_OBJECT,
    MAX_MESSAGES,
    MAX_PARTS,
    Found,
    JsonObjectFormat,
    NamedSchema,
    RefusalPart,
    TextFormat,
    parts_of,
)
from snugvl.server.openai.common import Effort, MaxTokens, Metadata
from snugvl.server.unsupported import (
    INPUT_IMAGE,
    INPUT_PICTURE,
    ITEM,
    RESPONSE_TOOL,
    RESPONSES,
    RESPONSES_PROMPT,
    TEXT_FORM,
    UnsupportedFields,
)

VENDOR: Final = re.compile(
    r"(web_search|file_search|computer|code_interpreter|image_generation|local_shell|shell|mcp|apply_patch"
    r"|tool_search)([_-].*)?"
)
VENDORS_ITEMS: Final = ("_call", "_output", "_tools", "_request", "_response")  # ends of their types
VENDORS, WRITTEN = "(vendor's)", "(assistant's)"  # tags that are not types: errors don't list them
PLAIN: Final = "functions"  # the namespace of tools that are in none
LONGEST: Final = 64  # characters of a function's name
INPUT: Final = "input"  # the argument of a free-form tool

Namespace = Annotated[str, Field(min_length=1, max_length=128)]


class FunctionTool(RequestPart):
    """A function. `strict`: a keyword of `parameters` that can't be enforced is refused, not left out."""

    unsupported: ClassVar[UnsupportedFields] = RESPONSE_TOOL

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class InputFormat(RequestPart):
    """The form of a free-form tool's text. A regular expression is enforced, Lark is only shown."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(RequestPart):
    """A free-form tool, which takes a text."""

    unsupported: ClassVar[UnsupportedFields] = RESPONSE_TOOL

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class NamespaceTool(RequestPart):
    """Tools that belong together."""

    type: Literal["namespace"]
    name: Namespace
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] = Field(
        min_length=1, max_length=MAX_TOOLS
    )


class VendorTool(RequestPart):
    """A tool that only its vendor's servers run: left out, with a warning."""

    type: str


def _kind(tool: object) -> object:
    """The tag of a tool, be it JSON or one of these classes, which are told apart when they are written."""
    kind = (tool.get("type") or "function") if isinstance(tool, dict) else getattr(tool, "type", "function")
    return VENDORS if isinstance(kind, str) and VENDOR.fullmatch(kind) else kind


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[VendorTool, Tag(VENDORS)],
    Discriminator(_kind),
]


class NamedChoice(RequestPart):
    """One of the tools by its name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedFunctions(RequestPart):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


ToolChoice = Annotated[
    Annotated[Mode, Tag("string")]
    | Annotated[Annotated[NamedChoice | AllowedFunctions, Field(discriminator="type")], Tag("object")],
    STRING_OR_OBJECT,
]


@dataclass(frozen=True, slots=True)
class Called:
    """How a client knows a tool.

    Attributes:
        name: without its namespace.
        namespace: None where it is in none.
        custom: whether it is a free-form tool.
    """

    name: str
    namespace: str | None = None
    custom: bool = False

    def item(self, call: ToolCall, item_id: str, status: str) -> dict[str, Any]:
        """A call as an output item."""
        kind = "custom_tool_call" if self.custom else "function_call"
        value = {"input": input_of(call.arguments)} if self.custom else {"arguments": call.arguments}
        place = {} if self.namespace is None else {"namespace": self.namespace}
        return {
            "id": item_id,
            "type": kind,
            "call_id": call.id,
            "name": self.name,
            **place,
            **value,
            "status": status,
        }


def input_of(arguments: str) -> str:
    """The text for a free-form tool in its function's arguments; of arguments that were cut, what came."""
    text = arguments_of(arguments).get(INPUT, "")
    return text if isinstance(text, str) else json.dumps(text)


def full_name(name: str, namespace: str | None) -> str:
    """The name that a model calls a tool of a namespace by; 64 letters, digits, `_` and `-` at most."""
    if not namespace or namespace == PLAIN:
        return name
    full = re.sub(r"[^a-zA-Z0-9_-]", "_", f"{namespace.removesuffix('__')}__{name}")
    if len(full) <= LONGEST:
        return full
    digest = hashlib.sha256(full.encode()).hexdigest()[:8]
    return f"{full[: LONGEST - len(digest) - 1]}_{digest}"


def _each(
    tools: Sequence[FunctionTool | CustomTool | NamespaceTool | VendorTool],
) -> Iterator[tuple[str, Called, FunctionTool | CustomTool, str]]:
    """Every tool by the name that the model calls it by, and its description."""
    for tool in tools:
        match tool:
            case FunctionTool() | CustomTool():
                yield tool.name, Called(tool.name, None, isinstance(tool, CustomTool)), tool, ""
            case NamespaceTool(name=name, description=about):
                namespace = None if name == PLAIN else name
                for index, each in enumerate(tool.tools):
                    called = Called(each.name, namespace, isinstance(each, CustomTool))
                    shown = about if about and namespace and not index else ""  # once is enough
                    yield full_name(each.name, namespace), called, each, shown
            case VendorTool():
                pass


def called_names(
    tools: Sequence[FunctionTool | CustomTool | NamespaceTool | VendorTool],
) -> dict[str, Called]:
    """How a client knows its tools, by the names that the model calls them by."""
    return {name: called for name, called, _, _ in _each(tools)}


def response_tool_use(
    tools: Sequence[FunctionTool | CustomTool | NamespaceTool | VendorTool],
    choice: ToolChoice | None,
    parallel: bool | None,
    notes: RequestNotes,
) -> ToolUse | None:
    """The engine's use of the tools of a response.

    Raises:
        RequestError: tools and choice don't fit, or there are too many tools.
    """
    for index, tool in enumerate(tools):
        if isinstance(tool, VendorTool):
            notes.warn(f"left out tools[{index}]: no server but its vendor's runs {tool.type}")
    flat = list(_each(tools))
    if len(flat) > MAX_TOOLS:
        raise RequestError(
            f"{len(flat):,} tools in all namespaces; at most {MAX_TOOLS} are taken; offer fewer",
            field="tools",
        )
    offered = tuple(_offered(name, tool, about, notes) for name, _, tool, about in flat)
    match choice:
        case NamedChoice(name=name, namespace=namespace):
            return tool_use(offered, notes, named=full_name(name, namespace), parallel=parallel)
        case AllowedFunctions(mode=mode, tools=allowed):
            names = [full_name(tool.name, tool.namespace) for tool in allowed]
            return tool_use(offered, notes, mode, allowed=names, parallel=parallel)
        case mode:
            return tool_use(offered, notes, mode, parallel=parallel)


def _offered(name: str, tool: FunctionTool | CustomTool, about: str, notes: RequestNotes) -> Tool:
    text = "\n\n".join(filter(None, (about, tool.description)))
    if isinstance(tool, FunctionTool):
        return offered_tool(name, text, tool.parameters, tool.strict)
    value: dict[str, Any] = {"type": "string"}
    wanted = tool.format
    if wanted is not None and wanted.definition:
        if wanted.syntax == "regex":
            value["pattern"] = f"^(?:{wanted.definition})$"
        else:
            notes.warn(f"didn't enforce format of the tool {tool.name}, only shown to the model")
        text = "\n\n".join(filter(None, (text, f"The input follows this grammar:\n{wanted.definition}")))
    schema = {"type": "object", "properties": {INPUT: value}, "required": [INPUT]}
    return offered_tool(name, text, schema, strict=False)


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
WrittenPart = Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type")]


class MessageItem(RequestPart):
    """A message of any role."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None


class InputMessage(MessageItem):
    """A message of a user, or an instruction."""

    unsupported: ClassVar[UnsupportedFields] = INPUT_PICTURE

    role: Literal["user", "system", "developer"]
    content: StringOrArray[Annotated[list[InputPart], Field(max_length=MAX_PARTS)]]


class WrittenMessage(MessageItem):
    """A message that the model answered before."""

    role: Literal["assistant"]
    content: StringOrArray[Annotated[list[WrittenPart], Field(max_length=MAX_PARTS)]]
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


class CallItem(RequestPart):
    """A call that the model made."""

    call_id: str
    name: str
    namespace: str | None = None
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(CallItem):
    """A call of a function that the model made."""

    type: Literal["function_call"]
    arguments: str


class CustomCallItem(CallItem):
    """A call of a free-form tool that the model made."""

    type: Literal["custom_tool_call"]
    input: str


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
    kind = item.get("type") or "message"
    if isinstance(kind, str) and kind.endswith(VENDORS_ITEMS) and VENDOR.fullmatch(kind):
        return VENDORS
    return WRITTEN if kind == "message" and item.get("role") == "assistant" else kind


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
    | Annotated[WrittenMessage, Tag(WRITTEN)]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[FunctionCallOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[VendorItem, Tag(VENDORS)],
    Discriminator(type_of_item),
    BeforeValidator(refuse_reference),
]
Input = StringOrArray[Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]]


async def conversation_of(
    input_items: str | list[Item] | None, instructions: str | None, media: RequestMedia
) -> tuple[Message, ...]:
    """The conversation, its pictures fetched at once.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    messages = [Message("system", (Text(instructions),))] if instructions else []
    if isinstance(input_items, str):
        return (*messages, Message("user", (Text(input_items),)))
    items = input_items or []
    found = await media.load(await _pictures(items))
    calls: list[ToolCall] = []  # of the last message, which several items may make
    thought = ""  # before the assistant's next item
    async for index, item in in_turns(enumerate(items)):
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


def _message(item: Item, found: Mapping[str, Found], field: str, notes: RequestNotes) -> Message:
    match item:
        case InputMessage(role=role, content=content):
            parts = parts_of(content, found, f"{field}.content")
            return Message("user" if role == "user" else "system", parts)
        case WrittenMessage(content=content):
            return Message("assistant", parts_of(content, {}, ""))
        case CallItem(call_id=call_id, name=name, namespace=namespace):
            if isinstance(item, FunctionCallItem):
                text = call_arguments(item.arguments, f"{field}.arguments", notes)
            else:
                text = json.dumps({INPUT: item.input}, ensure_ascii=False)
            return Message("assistant", (), (ToolCall(call_id, full_name(name, namespace), text),))
        case FunctionCallOutput(call_id=call_id, output=output):
            return Message("tool", parts_of(output, found, f"{field}.output"), tool_call_id=call_id)
    raise AssertionError("no other item passes the schema")


LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"  # which there is none of: reasoning comes as it is


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


class ResponsePrompt(Body):
    """Instructions, tools and the form of a response: what its prompt is made of, beside its input."""

    unsupported: ClassVar[UnsupportedFields] = RESPONSES_PROMPT

    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextForm | None = None
    reasoning: ReasoningOptions | None = None

    def tool_use(self, notes: RequestNotes) -> ToolUse | None:
        """The tool use for the engine.

        Raises:
            RequestError: tools and choice don't fit.
        """
        return response_tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls, notes)

    @property
    def effort(self) -> Effort | None:
        """The reasoning effort, as a variable of the chat template."""
        return None if self.reasoning is None else self.reasoning.effort

    def grammar(self, notes: RequestNotes) -> Grammar | None:
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


class CountInputRequest(ResponsePrompt):
    """The prompt of a response, to count. Without input its instructions alone are counted."""

    input: Input | None = None


class ResponseRequest(ResponsePrompt):
    """A response to make. Nothing is stored: `store` is false here by default."""

    unsupported: ClassVar[UnsupportedFields] = RESPONSES

    input: Input
    max_output_tokens: MaxTokens = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "message.input_image.image_url",
                    "web_search_call.results",
                    "web_search_call.action.sources",
                    "file_search_call.results",
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                ]
            ],
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
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens come with their log-probabilities."""
        return LOGPROBS in (self.include or ())
