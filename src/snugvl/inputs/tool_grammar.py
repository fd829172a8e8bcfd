"""The grammar of an answer that may call tools: names that exist, arguments valid for their schemas.

    auto        text ─┬─ end
                      └─ <tool_call> call </tool_call> ─ \\n<tool_call> call </tool_call> … ─ end
    required    <tool_call> call </tool_call> ─ …
    a name      <tool_call> call of that tool </tool_call> ─ end

Text can't hold `<tool_call>` in any spelling of tokens, so every call is a constrained one. Nothing comes
after the calls: the turn is the tools' then.
"""

import json
import re
from typing import Any, Final

from snugvl.backends.protocol import Tool, ToolUse
from snugvl.errors import RequestError
from snugvl.inputs.tools import CLOSING, OPENING

MAX_TOOLS: Final = 128
# `{"a": 1}` and `{"a":1}`, but no other white space: a small model could write it for ever.
COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_tools(use: ToolUse) -> None:
    """Refuse tools that can't be told apart or called.

    Raises:
        RequestError: with the tool and what is wrong with it.
    """
    if not use.tools or len(use.tools) > MAX_TOOLS:
        raise RequestError(f"a request offers 1 to {MAX_TOOLS} tools, not {len(use.tools)}", field="tools")
    names = [tool.name for tool in use.tools]
    for index, name in enumerate(names):
        field = f"tools[{index}].name"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                f"a tool's name has 1 to 64 letters, digits, '_' and '-', not {name!r}", field=field
            )
        if name in names[:index]:
            raise RequestError(f"two tools have the name {name!r}; names must differ", field=field)
    if use.choice not in ("auto", "required", *names):
        raise RequestError(
            f"tool_choice is 'auto', 'required' or the name of a tool, not {use.choice!r}; the tools are "
            f"{', '.join(names)}",
            field="tool_choice",
        )
    for index, tool in enumerate(use.tools):
        if tool.parameters and tool.parameters.get("type", "object") != "object":
            raise RequestError(
                f"the arguments of {tool.name!r} are an object: 'type' can't be {tool.parameters['type']!r}",
                field=f"tools[{index}].parameters",
            )


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema that a tool's arguments have to follow.

    One that names its properties allows no others unless it says so: they would be no use to the tool.
    """
    schema = {"type": "object", **tool.parameters}
    if "properties" in schema or not tool.parameters:
        schema.setdefault("additionalProperties", False)
    return schema


def tool_lark(use: ToolUse, *, marker_tokens: bool) -> str:
    """The grammar in llguidance's dialect of Lark.

    Args:
        marker_tokens: whether `<tool_call>` and `</tool_call>` are tokens of their own.
    """
    opening, closing = (OPENING, CLOSING) if marker_tokens else (_quoted(OPENING), _quoted(CLOSING))
    named = use.choice not in ("auto", "required")
    tools = [tool for tool in use.tools if not named or tool.name == use.choice]
    more = f' ("\\n" {opening} call)*' if use.parallel and not named else ""
    lines = []
    if use.choice == "auto":
        lines.append(f"start: TEXT | lead call{more}")
        # Lazy: the text ends where the marker does, the first time it is complete.
        lines.append(f"lead: TEXT {opening}" if marker_tokens else f"lead[lazy]: /(.|\\n)*{OPENING}/")
        lines.append(f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{OPENING}(.|\\n)*/")
    else:
        lines.append(f"start: {opening} call{more}")
    heads = [
        _quoted(f'\n{{"name": "{tool.name}", "arguments": ') + f" arguments_{i}"
        for i, tool in enumerate(tools)
    ]
    tail = _quoted("}\n")
    lines.append(f"call: ({' | '.join(heads)}) {tail} {closing}")
    for i, tool in enumerate(tools):
        schema = arguments_schema(tool) | {"x-guidance": COMPACT}
        lines.append(f"arguments_{i}: %json {json.dumps(schema)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text)
