"""What an answer is bound to: the tools that it may call, and `response_format`, the form it must have."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from snugvl.core.messages import Grammar, ToolUse
from snugvl.errors import RequestError
from snugvl.server.fields import STRING_OR_OBJECT, Part
from snugvl.server.forms import MAX_TOOLS, JsonSchema, Mode, ToolName, offered_tool, schema_grammar, tool_use
from snugvl.server.record import Notes


class Function(Part):
    """A function. `strict`: a keyword of `parameters` that can't be enforced is refused, not left out."""

    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class ChatTool(Part):
    """A tool of a chat completion."""

    type: Literal["function"]
    function: Function


class FunctionName(Part):
    """A function by its name."""

    name: str


class ChatToolName(Part):
    """One of the tools by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Part):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[ChatToolName] = Field(min_length=1, max_length=MAX_TOOLS)


class ChatAllowedTools(Part):
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
    tools: list[ChatTool] | None, choice: ChatToolChoice | None, parallel: bool | None, notes: Notes
) -> ToolUse | None:
    """The tool use for the engine, from the tools of a chat completion."""
    functions = [tool.function for tool in tools or ()]
    offered = tuple(
        offered_tool(each.name, each.description, each.parameters, each.strict) for each in functions
    )
    match choice:
        case ChatToolName(function=FunctionName(name=name)):
            return tool_use(offered, notes, named=name, parallel=parallel)
        case ChatAllowedTools(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            return tool_use(offered, notes, allowed.mode, allowed=names, parallel=parallel)
        case _:
            return tool_use(offered, notes, choice, parallel=parallel)


class Format(Part):
    """A form of the answer. Unknown fields of it are ignored, with a warning."""

    warns: ClassVar[bool] = True
    place: ClassVar[str] = "response_format."


class TextFormat(Format):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Format):
    """Any JSON object, or one that follows a schema, as llama.cpp has it."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Format):
    """A JSON schema. `strict`: a keyword that can't be enforced is refused, not left out."""

    place: ClassVar[str] = "response_format.json_schema."

    name: ToolName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Format):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]

ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


def grammar_of(wanted: ResponseFormat | None, notes: Notes) -> Grammar | None:
    """The grammar of a format; None for plain text."""
    match wanted:
        case JsonObjectFormat(schema_=schema):
            return schema_grammar(schema, "response_format", notes) if schema else ANY_OBJECT
        case JsonSchemaFormat(json_schema=named):
            return schema_grammar(named.schema_, "response_format", notes, strict=named.strict)
        case _:
            return None


Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Part):
    """vLLM's way to say what an answer looks like: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="Lark, in llguidance's dialect")
    json_object: bool | None = None

    def grammars(self, notes: Notes) -> list[Grammar]:
        """The grammars that are asked for.

        Raises:
            RequestError: a schema in a string that is no JSON object.
        """
        found = [ANY_OBJECT] if self.json_object else []
        if self.json_ is not None:
            found.append(schema_grammar(_schema_of(self.json_), "structured_outputs", notes))
        if self.choice is not None:
            found.append(Grammar("lark", "start: " + " | ".join(map(json.dumps, self.choice))))
        if self.regex is not None:
            found.append(Grammar("regex", self.regex))
        if self.grammar is not None:
            found.append(Grammar("lark", self.grammar))
        return found


def _schema_of(value: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = ""
    if not isinstance(value, dict):
        raise RequestError(
            "structured_outputs.json is a JSON schema, an object, also as text", field="structured_outputs"
        )
    return value


def form_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: StructuredOutputs,
    notes: Notes,
) -> tuple[Grammar | None, str]:
    """The one form that an answer must have, and the field that says so.

    Raises:
        RequestError: several of them.
    """
    openai = grammar_of(response_format, notes)
    found = [(openai, "response_format")] if openai is not None else []
    forms = structured.grammars(notes) if structured else ()
    found += [(grammar, "structured_outputs") for grammar in forms]
    given = {"json": guided.json_, "choice": guided.choice, "regex": guided.regex, "grammar": guided.grammar}
    names = [f"guided_{name}" for name, value in given.items() if value is not None]
    found += zip(guided.grammars(notes), names, strict=True)
    if len(found) > 1:
        asked = " and ".join(dict.fromkeys(name for _, name in found))
        raise RequestError(f"an answer has one form, but {asked} ask for several", field=found[1][1])
    return found[0] if found else (None, "response_format")
