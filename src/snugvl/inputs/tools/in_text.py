"""Tools, calls and their answers as JSON for chat templates, and as text where a template shows none.

Many models that see have a template without tools. Tools are described to them as to Hermes and Qwen,
in the system message; calls that are forced follow their grammar all the same.

    system      what it says already
                # Tools … <tools> a JSON schema a line </tools> … <tool_call> {"name": …} </tool_call>
    assistant   what it said, <tool_call> {"name": "f", "arguments": {…}} </tool_call>, one for each call
    user        <tool_response> what the tool answered </tool_response>, one for each of a turn
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from snugvl.core.messages import Message, Part, Text, Tool, ToolCall
from snugvl.errors import RequestError
from snugvl.inputs.tools.hermes import CLOSING, OPENING

ANSWER_MARKS: Final = ("<tool_response>", "</tool_response>")
_HEAD: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TAIL: Final = f"""
</tools>

For each function call, return a json object with function name and arguments within \
{OPENING}{CLOSING} XML tags:
{OPENING}
{{"name": <function-name>, "arguments": <args-json-object>}}
{CLOSING}"""


def tool_json(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def call_arguments(call: ToolCall, field: str) -> dict[str, Any]:
    """The arguments of a call.

    Raises:
        RequestError: they are not a JSON object.
    """
    try:
        value = json.loads(call.arguments, parse_constant=no_number, parse_float=_finite)
    except (ValueError, RecursionError, TypeError) as error:
        raise RequestError(f"the arguments of {call.name!r} are not JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise RequestError(f"the arguments of {call.name!r} are not a JSON object", field=field)
    return value


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with tools, in the form of `tool_json`, described at the end of its system message."""
    listed = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    described = _HEAD + listed + _TAIL
    if not messages or messages[0].role != "system":
        return [Message("system", (Text(described),)), *messages]
    # One text, as some templates show no more than the first part of a system message.
    text, others = _apart(messages[0].content)
    said = f"{text}\n\n" if text else ""
    return [replace(messages[0], content=(*others, Text(said + described))), *messages[1:]]


def with_calls(messages: Sequence[Message]) -> list[Message]:
    """The conversation with calls as text of the assistant, and the answers of tools as turns of the user.

    Raises:
        RequestError: the arguments of a call are not a JSON object.
    """
    found: list[Message] = []
    opening, closing = ANSWER_MARKS
    answers: list[Part] = []  # of tools, after one another
    for index, message in enumerate(messages):
        if message.role == "tool":
            before = [Text("\n")] if answers else []
            answers += (*before, Text(f"{opening}\n"), *message.content, Text(f"\n{closing}"))
            continue
        if answers:
            found.append(Message("user", _joined(answers)))
            answers = []
        if message.tool_calls and message.role == "assistant":
            calls = [_written(call, index, i) for i, call in enumerate(message.tool_calls)]
            text, others = _apart(message.content)
            said = "\n".join([text, *calls] if text else calls)
            found.append(replace(message, content=(*others, Text(said)), tool_calls=()))
        else:
            found.append(message)
    if answers:
        found.append(Message("user", _joined(answers)))
    return found


def _written(call: ToolCall, message: int, index: int) -> str:
    """A call as the assistant says it."""
    arguments = call_arguments(call, f"messages[{message}].tool_calls[{index}].arguments")
    written = json.dumps(arguments, ensure_ascii=False)
    return f'{OPENING}\n{{"name": "{call.name}", "arguments": {written}}}\n{CLOSING}'


def _apart(content: Sequence[Part]) -> tuple[str, tuple[Part, ...]]:
    """(text of a content, its other parts)."""
    text = "".join(part.text for part in content if isinstance(part, Text))
    return text, tuple(part for part in content if not isinstance(part, Text))


def _joined(content: Sequence[Part]) -> tuple[Part, ...]:
    """The content with texts that stand beside each other joined to one."""
    found: list[Part] = []
    for words, group in groupby(content, key=lambda part: isinstance(part, Text)):
        parts = list(group)
        if words and len(parts) > 1:
            parts = [Text("".join(part.text for part in parts if isinstance(part, Text)))]
        found += parts
    return tuple(found)


def no_number(text: str) -> float:
    """Refuse NaN and infinities, which Python's JSON reader takes; always raises ValueError."""
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else no_number(text)
