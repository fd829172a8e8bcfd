"""Input of a response: its JSON, and the conversation it makes.

Items are finer than messages: an assistant's text and each of its calls are items of their own. Those that
follow one another become one message again.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from snugvl.backends.protocol import Message, Part, Picture, Text, ToolCall
from snugvl.server.fields import STRING_OR_ARRAY, Exact, Harmless
from snugvl.server.openai.content import MAX_PARTS
from snugvl.server.openai.media import Detail, MediaSource, fetched
from snugvl.server.openai.messages import MAX_MESSAGES, call_arguments

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
    content: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS), Tag("array")],
        STRING_OR_ARRAY,
    ]
    id: str | None = None
    status: Status | None = None


class WrittenMessage(Exact):
    """What the model answered before."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[WrittenPart], Field(max_length=MAX_PARTS), Tag("array")],
        STRING_OR_ARRAY,
    ]
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
    output: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[InputText], Field(min_length=1, max_length=MAX_PARTS), Tag("array")],
        STRING_OR_ARRAY,
    ]
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
Input = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), Tag("array")],
    STRING_OR_ARRAY,
]


async def conversation_of(
    given: str | list[Item], instructions: str | None, media: MediaSource
) -> tuple[Message, ...]:
    """The conversation, its pictures fetched at once.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    messages = [Message("system", (Text(instructions),))] if instructions else []
    if isinstance(given, str):
        return (*messages, Message("user", (Text(given),)))
    found = await fetched(_pictures(given), lambda part, path: _fetch(part, path, media))
    for index, item in enumerate(given):
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
