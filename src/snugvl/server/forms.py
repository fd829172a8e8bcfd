"""An answer's constraints in every protocol: tools it may call, the form it has, what nothing enforces."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from snugvl.core.folders import json_object
from snugvl.core.messages import Grammar, Tool, ToolUse
from snugvl.core.sampling import MAX_STOP, SamplingParams
from snugvl.errors import RequestError
from snugvl.inputs.tools.enforceable import MAX_SCHEMA, enforceable
from snugvl.server.body import count_values
from snugvl.server.fields import STRING_OR_ARRAY, WHOLE
from snugvl.server.metrics import RequestNotes

JsonSchema = dict[str, Any]
Mode = Literal["none", "auto", "required"]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]  # OpenAI's are half as long at most
RESERVED = ("auto", "none", "required")  # what a choice of tools may be called in place of a name
MAX_TOOLS = 128
MAX_ARGUMENTS = 10_000  # values in the arguments of one call

Stop = Annotated[
    Annotated[str, Field(min_length=1), Tag("string")]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP), Tag("array")],
    STRING_OR_ARRAY,
]


def _off(value: int) -> int:
    """0 for -1, by which some programs turn a number of sampling off."""
    return max(value, 0)


# Numbers of sampling, as every protocol bounds them.
Temperature = Annotated[float, Field(ge=0, le=2, description="0, the default, is greedy")]
TopP = Annotated[float, Field(ge=0, le=1, description="0 is greedy")]
MinP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31, description="0 and -1 are off"), WHOLE, AfterValidator(_off)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]
TopLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a field that takes one or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def sampling_of(fields: object, *names: str, **given: Any) -> SamplingParams:
    """Sampling parameters of a request; what it leaves out (null) is greedy and neutral.

    Args:
        names: fields that are called as the parameters are; `given`: all others.
    """
    values = {name: getattr(fields, name) for name in names} | given
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def offered_tool(
    name: str, description: str | None, parameters: JsonSchema | None, strict: bool | None
) -> Tool:
    """A tool as a request describes it."""
    return Tool(name, description or "", parameters or {}, bool(strict))


def tool_use(
    tools: Sequence[Tool],
    notes: RequestNotes,
    mode: Mode | None = None,
    *,
    named: str | None = None,
    allowed: Sequence[str] | None = None,
    parallel: bool | None = None,
    words: bool = True,
) -> ToolUse | None:
    """Tools and the choice among them.

    Args:
        notes: gets what of the tools' schemas nothing enforces.
        named: the one to call; `allowed`: those they are narrowed to.
        words: whether the protocol says a mode in the place of a name: then no tool may be called so.

    Raises:
        RequestError: a name twice, a choice that isn't offered, or one that needs tools and has none.
    """
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        reserved = name in RESERVED and (words or name == named)
        if reserved or name in names[:index]:
            reason = "is a word of tool_choice" if reserved else "is there twice"
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
        tools = [tool for tool in tools if tool.name in allowed]
    return ToolUse(_note_unenforced(tools, notes), named or mode or "auto", parallel is not False)


def _note_unenforced(tools: Sequence[Tool], notes: RequestNotes) -> tuple[Tool, ...]:
    """The tools. `notes` gets what of their schemas nothing enforces; strict ones are refused later."""
    characters = 0
    for index, tool in enumerate(tools):
        characters += len(json.dumps(tool.parameters))
        if characters > MAX_SCHEMA:  # refused by the engine; no more work here
            break
        if not tool.strict:
            left_out = enforceable(tool.parameters)[1]
            if left_out:
                _warn_unenforced(left_out, f"tools[{index}]", notes)
                notes.unenforced[tool.name] = tool.parameters
    return tuple(tools)


def _warn_unenforced(keywords: list[str], field: str, notes: RequestNotes) -> None:
    notes.warn(f"didn't enforce {', '.join(keywords)} of {field}")


def schema_grammar(
    schema: dict[str, Any], field: str, notes: RequestNotes, *, strict: bool | None = None
) -> Grammar:
    """The grammar of a JSON schema, closed. Unless `strict`, `notes` gets what of it can't be enforced."""
    kept, left_out = enforceable(schema, strict=bool(strict))
    if left_out:
        _warn_unenforced(left_out, field, notes)
        notes.unenforced[None] = schema
    return Grammar("json_schema", json.dumps(kept))


def either(
    grammar: Grammar | None, tools: ToolUse | None, field: str
) -> tuple[Grammar | None, ToolUse | None]:
    """A format together with tools: the answer is a call, or has that form, by one grammar.

    Raises:
        RequestError: a form that is not JSON.
    """
    if grammar is None or tools is None:
        return grammar, tools
    if grammar.kind != "json_schema":
        raise RequestError(
            f"{field} and tools can be combined only where the form is a JSON schema; leave one out",
            field=field,
        )
    return None, replace(tools, form=grammar.source)


def call_arguments(text: str, field: str, notes: RequestNotes) -> str:
    """Arguments of a call as JSON text; what is not a JSON object, such as arguments that were cut, is `{}`.

    Refused, they would end the conversation: every later turn brings them again.

    Raises:
        RequestError: too many values.
    """
    if not text.strip():
        return "{}"
    # No text has more values than characters: the short ones of many calls aren't even looked at.
    if len(text) >= MAX_ARGUMENTS and count_values(text.encode("utf-8", "replace")) > MAX_ARGUMENTS:
        raise RequestError(f"{field} holds more than {MAX_ARGUMENTS:,} values", field=field)
    if json_object(text) is not None:
        return text
    notes.warn(f"read {field} as an empty object: it is not a JSON object")
    return "{}"
