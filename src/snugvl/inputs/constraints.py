"""What an answer has to look like, as a text in llguidance's own form: checked, not compiled. No torch.

Sizes and nesting are bounded here (the Rust side recurses, and a stack that overflows takes the process
along); how long its compiler takes nobody can tell from a grammar, so it is tried (`trials.py`).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from llguidance import LLMatcher

from snugvl.backends.protocol import GoOn, Grammar, ToolForm, ToolUse, going_on
from snugvl.errors import RequestError
from snugvl.inputs.schema import check_schema, longest_literal
from snugvl.inputs.tools.forms import tool_lark
from snugvl.inputs.tools.grammar import COMPACT, arguments_schema, check_tools
from snugvl.inputs.trials import Trials

MAX_CHARACTERS: Final = {"json_schema": 131_072, "regex": 8_192, "lark": 32_768}
MAX_RULES: Final = 256  # of a Lark grammar
MAX_INTERSECTIONS: Final = 8  # of a Lark grammar
MAX_CHOICES_LITERAL: Final = 131_072  # choices of a request × characters of the longest literal
JSON_OPTIONS: Final[Any] = {**COMPACT, "lenient": False, "coerce_one_of": False}
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


def grammar_text(grammar: Grammar, field: str) -> str:
    """A grammar in llguidance's own form, its sizes checked, not compiled.

    Raises:
        RequestError: it is no such grammar, or too large.
    """
    kind, source = grammar.kind, grammar.source
    if kind not in _NAMES:
        raise RequestError(f"a grammar is a {', a '.join(_NAMES.values())}, not {kind!r}", field=field)
    _check_length(kind, source, field)
    if kind == "json_schema":
        check_schema(source, field)
        try:
            return LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)
        except ValueError as error:  # a number that is too large for it
            raise refused(str(error), kind, field) from None
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    _check_lark(source, field)
    return LLMatcher.grammar_from_lark(source)


def check_choices(grammar: Grammar, choices: int, field: str) -> None:
    """Refuse many answers at once that each follow a long literal: every mask takes time with its length.

    Raises:
        RequestError: with the limit.
    """
    literal = longest_literal(grammar.source) if grammar.kind == "json_schema" else len(grammar.source)
    if choices > 1 and choices * literal > MAX_CHOICES_LITERAL:
        raise RequestError(
            f"{choices} choices that follow a literal of {literal:,} characters: their product is at most "
            f"{MAX_CHOICES_LITERAL:,}; ask for fewer choices (n), or for a shorter literal",
            field=field,
        )


def tools_lark(
    form: ToolForm, use: ToolUse, tokens: Mapping[str, int], trials: Trials, go_on: GoOn = going_on
) -> str:
    """The grammar of an answer that may call tools, in Lark, its schemas checked.

    Args:
        tokens: ids of the form's markers that are tokens of their own.
        trials: where each schema is tried alone, so that an error names its tool.

    Raises:
        RequestError: a tool's name or schema, or the choice, can't be used.
    """
    check_tools(use)
    total = 0
    for index, tool in enumerate(use.tools):
        field = f"tools[{index}].parameters"
        source = json.dumps(arguments_schema(tool))
        total += len(source)
        if total > MAX_CHARACTERS["json_schema"]:
            _check_length("json_schema", source, field)
            raise RequestError(
                f"the tools' schemas have more than {total - 1:,} characters, at most "
                f"{MAX_CHARACTERS['json_schema']:,} are taken together; offer fewer tools",
                field="tools",
            )
        text = grammar_text(Grammar("json_schema", source), field)
        go_on()
        if error := trials.check(text, go_on).error:
            raise refused(error, "json_schema", field)
    return tool_lark(form, use, tokens)


def refused(error: str, kind: str, field: str) -> RequestError:
    """What llguidance said of a grammar, for whoever sent it."""
    what = "the tools" if kind == "tools" else f"the {_NAMES[kind]}"
    return RequestError(f"{what} can't be used: {one_line(error)}", field=field)


def _check_length(kind: str, source: str, field: str) -> None:
    if len(source) > MAX_CHARACTERS[kind]:
        raise RequestError(
            f"the {_NAMES[kind]} has {len(source):,} characters, at most {MAX_CHARACTERS[kind]:,} are taken",
            field=field,
        )


def _check_lark(source: str, field: str) -> None:
    rules = sum(":" in line for line in source.splitlines())
    if rules > MAX_RULES or source.count("&") > MAX_INTERSECTIONS:
        raise RequestError(
            f"the Lark grammar has {rules} rules and {source.count('&')} intersections (&); at most "
            f"{MAX_RULES} and {MAX_INTERSECTIONS} are taken",
            field=field,
        )


def one_line(message: str) -> str:
    """The first 300 characters of llguidance's message, without its listing of the source."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
