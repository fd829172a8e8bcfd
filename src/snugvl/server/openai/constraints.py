"""What an answer is bound to: the tools that it may call, and `response_format`, the form it must have."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from snugvl.core.messages import Grammar, Tool, ToolUse
from snugvl.errors import RequestError
from snugvl.server.fields import STRING_OR_OBJECT, Exact

MAX_TOOLS = 128
RESERVED = ("auto", "none", "required")  # words of tool_choice

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
JsonSchema = dict[str, Any]
Mode = Literal["none", "auto", "required"]


class Function(Exact):
    """A function. Its arguments always follow `parameters`, so `strict` changes nothing."""

    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class ChatTool(Exact):
    """A tool of a chat completion."""

    type: Literal["function"]
    function: Function


class FunctionName(Exact):
    """A function by its name."""

    name: str


class ChatToolName(Exact):
    """One of the tools by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Exact):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[ChatToolName] = Field(min_length=1, max_length=MAX_TOOLS)


class ChatAllowedTools(Exact):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatToolChoice = Annotated[
    Annotated[Mode, Tag("string")]
    | Annotated[
        Annotated[ChatToolName | ChatAllowedTools, Field(discriminator="type")],
        Tag("object"),
    ],
    STRING_OR_OBJECT,
]


def chat_tool_use(
    tools: list[ChatTool] | None, choice: ChatToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """What the tools of a chat completion ask of the engine."""
    functions = [tool.function for tool in tools or ()]
    offered = tuple(Tool(each.name, each.description or "", each.parameters or {}) for each in functions)
    match choice:
        case ChatToolName(function=FunctionName(name=name)):
            return tool_use(offered, named=name, parallel=parallel)
        case ChatAllowedTools(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            return tool_use(offered, allowed.mode, allowed=names, parallel=parallel)
        case _:
            return tool_use(offered, choice, parallel=parallel)


def tool_use(
    tools: tuple[Tool, ...],
    mode: Mode | None = None,
    *,
    named: str | None = None,
    allowed: Sequence[str] | None = None,
    parallel: bool | None = None,
) -> ToolUse | None:
    """Tools and the choice among them. `named`: the one to call; `allowed`: those they are narrowed to.

    Raises:
        RequestError: a name twice, a choice that isn't offered, or one that needs tools and has none.
    """
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in RESERVED or name in names[:index]:
            reason = "is there twice" if name in names[:index] else "is a word of tool_choice"
            raise RequestError(
                f"tools[{index}]: the name {name!r} {reason}; use another", field=f"tools[{index}].name"
            )
    for name in (*(allowed or ()), *(() if named is None else (named,))):
        if name not in names:
            offered = ", ".join(map(repr, names)) or "no tools"
            raise RequestError(
                f"tool_choice names {name!r}, which tools doesn't have ({offered})", field="tool_choice"
            )
    if mode == "required" and not tools:
        raise RequestError("tool_choice is 'required', but the request has no tools", field="tool_choice")
    if mode == "none" or not tools:
        return None
    if allowed is not None:
        tools = tuple(tool for tool in tools if tool.name in allowed)
    return ToolUse(tools, named or mode or "auto", parallel is not False)


FormatName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextFormat(Exact):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Exact):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Exact):
    """A JSON schema. Answers always follow it, so `strict` changes nothing."""

    name: FormatName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Exact):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]

ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


def grammar_of(wanted: ResponseFormat | None) -> Grammar | None:
    """The grammar of a format; None for plain text."""
    match wanted:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat(json_schema=named):
            return schema_grammar(named.schema_)
        case _:
            return None


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """The grammar of a JSON schema."""
    return Grammar("json_schema", json.dumps(schema))


def check_alone(grammar: Grammar | None, tools: ToolUse | None, field: str) -> None:
    """Refuse a format together with tools.

    Raises:
        RequestError: both are asked for.
    """
    if grammar is not None and tools is not None:
        raise RequestError(
            f"{field} and tools can't be combined: the answer is either in that form or may hold calls; "
            "leave one out, or send tool_choice 'none'",
            field=field,
        )
