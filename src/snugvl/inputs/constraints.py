"""The form of an answer as a text in llguidance's own language: checked, not compiled. No torch.

Sizes and nesting are bounded here; a grammar doesn't tell how long the compiler takes, so what these
limits let through is tried (`trials.py`). The compiler recurses once per level of nesting and per `$ref` on
the way, on a stack that takes the process along when it overflows. It intersects the patterns that `allOf`
puts on one string, which doubles the work with each of them. Measured: 12 patterns take 1.4 s, 14 take 13 s;
180 chained objects fit into 2 MiB. `multipleOf` becomes an automaton with a state for each remainder, and
numbers that are joined one for each combination: 10,000 take 0.05 s and 6 MB, 1,000,000 take 12 s and 290 MB.
Each mask of a literal takes time with its length: 0.3 ms for 1,000 characters, 40 ms for 100,000 (of 151,936
tokens).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from llguidance import LLMatcher

from snugvl.core.messages import GoOn, Grammar, ToolForm, ToolUse, going_on
from snugvl.errors import RequestError, blamed
from snugvl.inputs.tools.enforceable import MAX_SCHEMA, ended, referred
from snugvl.inputs.tools.forms import tool_lark
from snugvl.inputs.tools.grammar import COMPACT, arguments_schema, check_tools
from snugvl.inputs.trials import Trials

MAX_CHARACTERS: Final = {"json_schema": MAX_SCHEMA, "regex": 8_192, "lark": 32_768}
MAX_RULES: Final = 256  # of a Lark grammar
MAX_INTERSECTIONS: Final = 8  # of a Lark grammar
MAX_CHOICES_LITERAL: Final = 131_072  # choices of a request × characters of the longest literal
MAX_DEPTH: Final = 100  # of the document
MAX_LINKED_DEPTH: Final = 400  # of the document and everything it refers to, on top of each other
MAX_PROPERTIES: Final = 1000  # of one object
MAX_PATTERNS: Final = 8  # below one `allOf`, or a `$ref` with keywords beside it
MAX_MULTIPLE: Final = 10_000  # of a `multipleOf` without its decimal point, and of those that are joined
MAX_PLACE: Final = 200  # characters of the place of a part of a schema, as a refusal names it
MAX_LITERAL: Final = 8_192  # characters of one value of `const` or `enum`, or of one property's name
_NOTHING: Final = object()  # where a `$ref` leads that leads nowhere
_JOINED = ("allOf", "anyOf", "oneOf")
_PATTERNS = ("pattern", "format", "patternProperties")
_NOTES = frozenset(
    {"$ref", "title", "description", "default", "examples", "$defs", "definitions", "$comment"}
)
JSON_OPTIONS: Final[Any] = {**COMPACT, "lenient": False, "coerce_one_of": False}
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


_AFTERWARDS: Final = "or leave it out and check the number afterwards"
# What llguidance says of a JSON schema in terms of its code, and what is meant.
_IN_OUR_WORDS: Final = (
    (
        r"Failed to generate regex for \w+ range: .*",
        "a minimum or maximum in it has more than 18 digits before the decimal point, and answers are "
        f"checked digit by digit; use a smaller one, {_AFTERWARDS}",
    ),
    (
        r"regex parse error: \S*?(?:\(0){12}.*",
        "a minimum or maximum in it has too many decimal places, about 70 are taken; use a rounder one, "
        f"{_AFTERWARDS}",
    ),
    (
        r"regex parse error: \(\?s:\.\{(?:0,)?(\d+)(?:,\d*)?\}\).* error: decimal literal invalid",
        r"a minLength or maxLength in it is \1, at most 4294967295 is taken; leave it out",
    ),
    (r"regex parse error: (.*?)(?: \^+)? error: (.*)", r"its pattern \1 is not a regular expression: \2"),
    (r"Expected f64 for '(\w+)', got (.*)", r"\1 is \2, not a number"),
    (
        r"Expected positive integer for '(\w+)', got (.*)",
        r"\1 is \2, not a whole number from 0 to 18446744073709551615, written in digits alone",
    ),
    (r"Expected (\w+) for '(\w+)', got (.*)", r"\2 is \3, not of type \1"),
    (r"Invalid type: (.*)", r"\1 is not a type; use object, array, string, number, integer, boolean or null"),
    (r"invalid multiple of", "multipleOf is 0; use a number above 0"),
    (
        r"Value for 'multipleOf' has too many digits: .*",
        "a multipleOf in it has too many decimal places, about 10 are taken; use a rounder one, "
        f"{_AFTERWARDS}",
    ),
    (r'Unimplemented keys: \["([^"]+)".*', r"\1 can't be enforced; leave it out, or check it afterwards"),
    (r"Unsatisfiable schema: anyOf is empty", "no answer fits it, as an enum or anyOf in it is empty"),
    (r"Unsatisfiable schema: ", "no answer fits it: "),
)
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Which keyword an error of llguidance is about, and which value of it: the one that it quotes, or the number
# that is farthest from 0 (1), or nearest to it (-1).
_ABOUT: Final[Sequence[tuple[str, tuple[str, ...], int]]] = (
    (r"Failed to generate regex for \w+ range", _BOUNDS, 1),
    (r"regex parse error: \S*?(?:\(0){12}", _BOUNDS, -1),
    (r"error: decimal literal invalid", ("minLength", "maxLength"), 1),
    (r"regex parse error: (.*?)(?: \^+)? error: ", ("pattern",), 0),
    (r"Expected [\w ]+ for '(?P<key>\w+)', got (.*)", (), 0),
    (r"Invalid type: (.*)", ("type",), 0),
    (r'Unimplemented keys: \["(?P<key>[^"]+)"', (), 0),
    (r"Unknown format: (.*)", ("format",), 0),
    (r"multipleOf' has too many digits|invalid multiple of", ("multipleOf",), -1),
)


def grammar_text(grammar: Grammar, field: str) -> str:
    """A grammar in llguidance's own form, its sizes checked, not compiled.

    Raises:
        RequestError: it is no such grammar, or too large.
    """
    with blamed(field):
        kind, source = grammar.kind, grammar.source
        if kind not in _NAMES:
            raise RequestError(f"a grammar must be a {', a '.join(_NAMES.values())}, not {kind!r}")
        _check_length(kind, source)
        if kind == "json_schema":
            check_schema(source)
            try:
                schema = json.dumps(ended(json.loads(source)))
                return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
            except ValueError as error:  # a number that is too large for it
                raise refused(str(error), kind, field, source) from None
        if kind == "regex":
            return LLMatcher.grammar_from_regex(source)
        _check_lark(source)
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
            with blamed(field):
                _check_length("json_schema", source)
            raise RequestError(
                f"the tools' schemas have more than {total - 1:,} characters, at most "
                f"{MAX_CHARACTERS['json_schema']:,} are taken together; offer fewer tools",
                field="tools",
            )
        text = grammar_text(Grammar("json_schema", source), field)
        go_on()
        if error := trials.check(text, go_on).error:
            raise refused(error, "json_schema", field, source)
    if use.form is not None:
        text = grammar_text(Grammar("json_schema", use.form), "response_format")
        if error := trials.check(text, go_on).error:
            raise refused(error, "json_schema", "response_format", use.form)
    return tool_lark(form, use, tokens)


def refused(error: str, kind: str, field: str, source: str = "") -> RequestError:
    """llguidance's error about a grammar, for the client that sent it. `source`: the grammar as it was sent,
    if a JSON schema's value that is to blame should be named with its place."""
    what, why = "the tools" if kind == "tools" else f"the {_NAMES[kind]}", one_line(error)
    place = _blamed(why, json.loads(source)) if source and kind == "json_schema" else ""
    for theirs, ours in _IN_OUR_WORDS if kind in ("json_schema", "tools") else ():
        why = re.sub(theirs, ours, why)
    return RequestError(f"{what} can't be used: {why}{place}", field=field)


def _blamed(error: str, schema: Any) -> str:
    """The clause that names the place and the value that an error is about; empty if it isn't found."""
    for pattern, keys, far in _ABOUT:
        if match := re.search(pattern, error):
            keys = keys or (match["key"],)
            found = [
                (f"{at}/{key}", part[key]) for at, part in _places(schema) for key in keys if key in part
            ]
            if far:
                numbers = [
                    each for each in found if isinstance(each[1], int | float) and (each[1] or far < 0)
                ]
                found = sorted(numbers, key=lambda each: -far * abs(each[1]))
            else:
                said = match.groups()[-1]
                found = [each for each in found if said in (keys[0], each[1], json.dumps(each[1]))]
            return f" (at {found[0][0]}: {json.dumps(found[0][1])[:100]})" if found else ""
    return ""


def _check_length(kind: str, source: str) -> None:
    if len(source) > MAX_CHARACTERS[kind]:
        raise RequestError(
            f"the {_NAMES[kind]} has {len(source):,} characters, at most {MAX_CHARACTERS[kind]:,} are taken"
        )


_IN_GBNF: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def _check_lark(source: str) -> None:
    if _IN_GBNF.search(source):
        raise RequestError(
            "the grammar is in GBNF (root ::= …), as llama.cpp's are; write it in Lark, in which a rule is "
            'start: "yes" | "no"'
        )
    rules = sum(":" in line for line in source.splitlines())
    if rules > MAX_RULES or source.count("&") > MAX_INTERSECTIONS:
        raise RequestError(
            f"the Lark grammar has {rules} rules and {source.count('&')} intersections (&); at most "
            f"{MAX_RULES} and {MAX_INTERSECTIONS} are taken"
        )


def one_line(message: str) -> str:
    """The first 300 characters of llguidance's message, without its listing of the source."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]


def check_schema(source: str) -> None:
    """Refuse what is not a JSON object, and what could take the compiler too much time or stack.

    Raises:
        RequestError: with what is wrong and the limit.
    """
    schema = _parsed(source)
    depth = _depth(schema)
    if depth > MAX_DEPTH:
        raise RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels; use a flatter one")
    if not isinstance(schema, dict):
        raise RequestError('a JSON schema is an object, such as {"type": "object"}')
    links = _links(schema)
    linked = len(links)  # each adds a level at least; more than enough of them aren't even looked at
    if linked <= MAX_LINKED_DEPTH:
        linked = depth + sum(_depth(referred(link, schema, schema)) for link in links)
    if linked > MAX_LINKED_DEPTH:
        raise RequestError(
            f"the JSON schema and what its $refs lead to are {linked} levels deep in all, at most "
            f"{MAX_LINKED_DEPTH} are taken; use fewer $refs"
        )
    targets = {link: referred(link, schema, schema) for link in links}
    if lost := next((link for link in links if link.startswith("#/") and _is_lost(link, schema)), None):
        raise RequestError(f"the JSON schema's $ref {lost[:100]!r} leads nowhere: it has no such part")
    if loop := _loop(targets):
        within = loop == "#" or loop.startswith("#/")
        why = "leads back to itself, and to nothing else" if within else "isn't followed; write #/$defs/NAME"
        raise RequestError(f"the JSON schema's $ref {loop[:100]!r} {why}")
    reach = {link: _Reach(_patterns(target), _links(target)) for link, target in targets.items()}
    for place, part in _places(schema):
        at = f" (at {place})"
        _check_part(part, reach, at)
        _check_multiples(part, schema, at)
        for literal in _literals(part):
            if len(literal) > MAX_LITERAL:
                raise RequestError(
                    f"the JSON schema has a literal of {len(literal):,} characters ({literal[:20]}…), at "
                    f"most {MAX_LITERAL:,} are taken{at}"
                )


def _is_lost(link: str, schema: dict[str, Any]) -> bool:
    """Whether a $ref leads to nothing within its schema."""
    return referred(link, schema, _NOTHING) is _NOTHING


def longest_literal(source: str) -> int:
    """Characters of the longest literal of a schema that `check_schema` has let through."""
    return max((len(each) for part in _objects(json.loads(source)) for each in _literals(part)), default=0)


def _literals(part: dict[str, Any]) -> Iterator[str]:
    """Texts that an answer may have to repeat, character by character: names and values as JSON."""
    properties = part.get("properties")
    if isinstance(properties, dict):
        yield from properties
    values = part.get("enum")
    for value in (*(values if isinstance(values, list) else ()), part.get("const")):
        yield value if isinstance(value, str) else json.dumps(value)


def _check_multiples(part: dict[str, Any], schema: Any, at: str) -> None:
    """Refuse a `multipleOf` with too many remainders, alone or beside those it is joined with."""
    joined = [each for key in _JOINED if isinstance(part.get(key), list) for each in part[key]]
    beside = [referred(each["$ref"], schema, schema) if _refers(each) else each for each in joined]
    given = [each["multipleOf"] for each in (part, *beside) if _has_multiple(each)]
    if math.prod(map(_steps, given)) > MAX_MULTIPLE:
        raise RequestError(
            f"the JSON schema has multipleOf {' and '.join(f'{each:,}' for each in given)} in one place; "
            f"their product may be at most {MAX_MULTIPLE:,} (decimal points left out), as answers are "
            f"checked digit by digit; use a smaller one, or check the number afterwards{at}"
        )


def _refers(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("$ref"), str)


def _has_multiple(part: Any) -> bool:
    multiple = part.get("multipleOf") if isinstance(part, dict) else None
    return isinstance(multiple, int | float) and not isinstance(multiple, bool)


def _steps(multiple: float) -> int:
    """Remainders that a decimal number may leave: 25 for 0.25."""
    try:
        _, digits, exponent = Decimal(str(multiple)).normalize().as_tuple()
    except InvalidOperation:
        return 1  # infinite: the compiler says what is wrong with it
    if not isinstance(exponent, int) or exponent > len(str(MAX_MULTIPLE)):
        return MAX_MULTIPLE + 1
    value = int("".join(map(str, digits[:32])) or 0) * int(10 ** max(exponent, 0))
    return max(value, 1)


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise RequestError(
            f"the JSON schema is nested deeper than {MAX_DEPTH} levels; use a flatter one"
        ) from None
    except ValueError as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class _Reach:
    """The target of a `$ref`: the patterns there, and where it goes on."""

    patterns: set[tuple[int, str]]
    links: set[str]


def _check_part(part: dict[str, Any], reach: Mapping[str, _Reach], at: str) -> None:
    properties = part.get("properties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise RequestError(
            f"an object of the JSON schema has {len(properties)} properties, at most {MAX_PROPERTIES} are "
            f"taken{at}"
        )
    several = isinstance(part.get("allOf"), list) and len(part["allOf"]) + len(part.keys() - _NOTES) > 2
    if several or ("$ref" in part and part.keys() - _NOTES):
        patterns = _patterns(part).union(*(reach[link].patterns for link in _linked(part, reach)))
        if len(patterns) > MAX_PATTERNS:
            raise RequestError(
                f"the JSON schema joins parts with {len(patterns)} patterns and formats by allOf or $ref, "
                f"at most {MAX_PATTERNS} are taken there{at}"
            )


def _depth(value: Any) -> int:
    """Lists and objects within each other; without recursion, as that is what it is there to prevent."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, level)
            children = item.values() if isinstance(item, dict) else item
            stack += [(child, level + 1) for child in children]
    return deepest


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object at and below `value`."""
    return (part for _, part in _places(value))


def _places(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object at and below `value`, with its place as a `$ref` has it, such as "#/properties/a"."""
    stack = [("#", value)]
    while stack:
        place, item = stack.pop()
        if isinstance(item, dict):
            yield place, item
        if isinstance(item, dict | list):
            below = item.items() if isinstance(item, dict) else enumerate(item)
            stack += reversed(
                [
                    (f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}"[:MAX_PLACE], each)
                    for key, each in below
                    if isinstance(each, dict | list)
                ]
            )


def _links(value: Any) -> set[str]:
    """The different `$ref`s at and below `value`."""
    return {item["$ref"] for item in _objects(value) if isinstance(item.get("$ref"), str)}


def _patterns(value: Any) -> set[tuple[int, str]]:
    """Every keyword at and below `value` that puts a pattern on a string, by object and name."""
    return {(id(item), key) for item in _objects(value) for key in _PATTERNS if key in item}


def _loop(targets: Mapping[str, Any]) -> str | None:
    """A `$ref` that is what it leads to, by `$ref`s and `allOf`s alone; None where there is none."""
    for start in targets:
        seen, new = set[str](), [start]
        while new:
            target = targets.get(new.pop())
            joined = target.get("allOf") if isinstance(target, dict) else None
            same = [target, *(joined if isinstance(joined, list) else ())]
            links = {each["$ref"] for each in same if _refers(each)} - seen
            if start in links:
                return start
            seen |= links
            new += links
    return None


def _linked(part: Any, reach: Mapping[str, _Reach]) -> set[str]:
    """The `$ref`s below `part`, and those below what they lead to, and so on."""
    found: set[str] = set()
    new = _links(part)
    while new:
        found |= new
        new = set[str]().union(*(reach[link].links for link in new)) - found
    return found
