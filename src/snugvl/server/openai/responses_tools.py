"""Tools of a response: functions, free-form (`custom`) tools, namespaces of both, and tools of vendors.

A model calls functions alone. So a free-form tool is a function with one text, `input`, and a tool of a
namespace is a function whose name begins with the namespace's. Calls go back in the form that the client
offered the tool in (`Called`); those of a client's history are read the same way. What only a vendor's own
servers run, such as a web search, is left out, with a warning.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag

from snugvl.core.messages import Tool, ToolCall, ToolUse
from snugvl.errors import RequestError
from snugvl.server.fields import STRING_OR_OBJECT
from snugvl.server.fields import Part as RequestPart
from snugvl.server.forms import MAX_TOOLS, JsonSchema, Mode, ToolName, offered_tool, tool_use
from snugvl.server.generation import arguments_of
from snugvl.server.record import Notes
from snugvl.server.unsupported import RESPONSE_TOOL, UnsupportedFields

VENDOR: Final = re.compile(
    r"(web_search|file_search|computer|code_interpreter|image_generation|local_shell|shell|mcp|apply_patch"
    r"|tool_search)([_-].*)?"
)
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
    """The form of a free-form tool's text. A regular expression is enforced, Lark is shown alone."""

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
    kind = tool.get("type", "function") if isinstance(tool, dict) else getattr(tool, "type", "function")
    return "vendor" if isinstance(kind, str) and VENDOR.fullmatch(kind) else kind


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[VendorTool, Tag("vendor")],
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
    | Annotated[
        Annotated[NamedChoice | AllowedFunctions, Field(discriminator="type")],
        Tag("object"),
    ],
    STRING_OR_OBJECT,
]


@dataclass(frozen=True, slots=True)
class Called:
    """A tool under its name at the client.

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
    """A client's tools, by the names by which the model calls them."""
    return {name: called for name, called, _, _ in _each(tools)}


def response_tool_use(
    tools: Sequence[FunctionTool | CustomTool | NamespaceTool | VendorTool],
    choice: ToolChoice | None,
    parallel: bool | None,
    notes: Notes,
) -> ToolUse | None:
    """The tool use for the engine, from the tools of a response.

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


def _offered(name: str, tool: FunctionTool | CustomTool, about: str, notes: Notes) -> Tool:
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
