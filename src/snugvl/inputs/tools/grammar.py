"""The grammar of an answer that may call tools: names that exist, arguments valid for their schemas.

It is llguidance's dialect of Lark. Text can't hold what begins a call in any spelling of tokens, so every
call is a constrained one. Nothing comes after the calls: the turn is the tools' then.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from snugvl.core.messages import Tool, ToolUse
from snugvl.errors import RequestError
from snugvl.inputs.tools.enforceable import ended, enforceable
from snugvl.inputs.tools.parser import NAME

MAX_TOOLS: Final = 128
# `{"a": 1}` and `{"a":1}`, but no other white space: a small model could write it for ever.
COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
ANY: Final = "(.|\\n)*"


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
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise RequestError(
                f"a tool's name has 1 to 128 letters, digits, '_' and '-', not {name!r}", field=field
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
    """The schema that a tool's arguments have to follow, as a grammar is made of it; no parameters: none."""
    schema = {"type": "object", **(tool.parameters or {"properties": {}})}
    return enforceable(schema, strict=tool.strict, arguments=True)[0]


def called(use: ToolUse) -> tuple[Tool, ...]:
    """The tools that may be called."""
    if use.choice in ("auto", "required"):
        return use.tools
    return tuple(tool for tool in use.tools if tool.name == use.choice)


def several(use: ToolUse) -> bool:
    """Whether an answer may hold more than one call."""
    return use.parallel and use.choice in ("auto", "required")


def marked(use: ToolUse, opening: str, tokens: Mapping[str, int], between: str | None) -> list[str]:
    """The rules of an answer whose calls begin with a marker; the rule `call` says what follows one.

    Args:
        tokens: ids of the markers that are tokens of their own.
        between: what stands between two calls; None where one marker begins all of them.
    """
    begin = marker(opening, tokens)
    more = ""
    if between is not None and several(use):
        more = f" ({quoted(between) + ' ' if between else ''}{begin} call)*"
    if use.choice != "auto":
        return [f"start: {begin} call{more}"]
    if use.form is not None:
        return [f"start: answer | {begin} call{more}", form_rule(use.form)]
    pattern = escaped(opening)
    return [
        f"start: TEXT | lead call{more}",
        # Lazy: the text ends where the marker does, the first time it is complete.
        f"lead: TEXT {begin}" if opening in tokens else f"lead[lazy]: /{ANY}{pattern}/",
        f"TEXT: /{ANY}/ & ~/{ANY}{pattern}{ANY}/",
    ]


def form_rule(form: str) -> str:
    """The rule `answer`: JSON of a form, where an answer calls nothing."""
    return f"answer: %json {json.dumps(ended(json.loads(form)) | {'x-guidance': COMPACT})}"


def arguments_rules(use: ToolUse) -> list[str]:
    """A rule `arguments_0`, … for each tool that may be called: its arguments as JSON."""
    schemas = [ended(arguments_schema(tool)) | {"x-guidance": COMPACT} for tool in called(use)]
    return [f"arguments_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(schemas)]


def marker(text: str, tokens: Mapping[str, int]) -> str:
    """A marker as a rule names it."""
    return f"<[{tokens[text]}]>" if text in tokens else quoted(text)


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text)


def escaped(text: str) -> str:
    """A literal within a regular expression."""
    return re.sub(r"([^\w\s<>\"',;:=-])", r"\\\1", text).replace("\n", "\\n")
