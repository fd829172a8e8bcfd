"""`response_format`: which form an answer must have."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from snugvl.backends.protocol import Grammar, ToolUse
from snugvl.errors import RequestError
from snugvl.server.fields import Exact

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
