"""Messages of a chat completion: their JSON, and the conversation they make."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from snugvl.backends.protocol import Message, ToolCall
from snugvl.errors import RequestError
from snugvl.server.body import count_values
from snugvl.server.fields import Exact, Harmless
from snugvl.server.openai.content import (
    Found,
    MediaPart,
    TextContent,
    UserContent,
    fetch,
    media_of,
    parts_of,
    texts_of,
)
from snugvl.server.openai.media import MediaSource, fetched

MAX_ARGUMENTS = 10_000  # values in the arguments of one call
MAX_MESSAGES = 8192
MAX_CALLS = 256  # of one message

Name = Annotated[
    str | None, Field(description="Of the speaker; accepted, but chat templates do not show it to the model")
]


class SystemMessage(Exact):
    """Instructions. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer"]
    content: TextContent
    name: Name = None


class UserMessage(Exact):
    """What the user said, with pictures and videos."""

    role: Literal["user"]
    content: UserContent
    name: Name = None


class FunctionCall(Exact):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class AssistantCall(Exact):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Exact):
    """What the model answered before."""

    # What the SDKs send back with an answer that had none of it.
    harmless: ClassVar[Harmless] = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}

    role: Literal["assistant"]
    content: TextContent | None = None
    reasoning_content: str | None = Field(
        None, description="what the model thought before it answered; taken, and not shown to it again"
    )
    tool_calls: Annotated[list[AssistantCall], Field(max_length=MAX_CALLS)] | None = None
    name: Name = None


class ToolMessage(Exact):
    """What a tool answered."""

    role: Literal["tool"]
    content: TextContent
    tool_call_id: str
    name: Name = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


async def conversation_of(messages: list[ChatMessage], media: MediaSource) -> tuple[Message, ...]:
    """The conversation, its pictures fetched at once.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    wanted: dict[str, MediaPart] = {}
    for index, message in enumerate(messages):
        if isinstance(message, UserMessage):
            wanted |= media_of(message.content, f"messages[{index}].content")
    found = await fetched(wanted, lambda part, path: fetch(part, path, media))
    return tuple(_message(message, found, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: ChatMessage, found: Mapping[str, Found], field: str) -> Message:
    match message:
        case SystemMessage(content=content):
            return Message("system", texts_of(content))
        case UserMessage(content=content):
            return Message("user", parts_of(content, found, f"{field}.content"))
        case AssistantMessage():
            return _assistant(message, field)
        case ToolMessage(content=content, tool_call_id=call):
            return Message("tool", texts_of(content), tool_call_id=call)
    raise AssertionError("no other message passes the schema")


def _assistant(message: AssistantMessage, field: str) -> Message:
    calls = tuple(
        ToolCall(call.id, call.function.name, call_arguments(call.function.arguments, place))
        for index, call in enumerate(message.tool_calls or ())
        for place in [f"{field}.tool_calls[{index}].function.arguments"]
    )
    if message.content is None and not calls:
        raise RequestError(
            f"{field}: an assistant message has content, tool_calls or both; this one has neither",
            field=f"{field}.content",
        )
    return Message("assistant", texts_of(message.content), calls)


def call_arguments(text: str, field: str) -> str:
    """Arguments of a call as JSON text; none at all (some clients send "") are an empty object.

    Raises:
        RequestError: not a JSON object.
    """
    if not text.strip():
        return "{}"
    if count_values(text.encode("utf-8", "replace")) > MAX_ARGUMENTS:
        raise RequestError(f"{field} holds more than {MAX_ARGUMENTS:,} values", field=field)
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be a JSON object as text, not {text[:80]!r}", field=field)
    return text
