"""Forms for a llama-server without llguidance: JSON schemas by its own converter, and grammars as GBNF.

Its converter (`common/json-schema.cpp`, October 2026) silently leaves out keywords that it doesn't know: they
are looked for here. Of our dialect of Lark, rules of literals, groups and repetitions, and leaves of `%json`,
have a counterpart: that is all that `tasks` writes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from snugvl.core.folders import json_object

# Keywords that no rule comes from.
IGNORED: Final = frozenset(
    {"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "patternProperties",
     "propertyNames", "minProperties", "maxProperties", "not", "if", "then", "else", "dependentRequired",
     "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
     "$dynamicRef", "$recursiveRef"}
)  # fmt: skip
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")  # of whole numbers alone
FORMATS: Final = re.compile(r"date|time|date-time|uuid[1-5]?")
LENGTHS: Final = ("minLength", "maxLength")
COUNTS: Final = ("minItems", "maxItems")
# What may stand beside a keyword that decides alone.
NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
     "discriminator", "$defs", "definitions", "$comment", "$schema", "$id", "$anchor", "x-guidance"}
)  # fmt: skip
_MAPS: Final = ("properties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES: Final = ("items", "additionalProperties")

_RULE: Final = re.compile(r"\??([A-Za-z_]\w*) *: *(.*)", re.ASCII)
_PIECE: Final = re.compile(r'\s+|"(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|[()|*+?]|\{\d+(?:,\d*)?\}', re.ASCII)
_JSON: Final = "%json "
_TEXT: Final = r"""[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})"""
CHARACTER: Final = "character"


def left_out(schema: Mapping[str, Any]) -> list[str]:
    """Keywords of a schema that llama.cpp would leave out, in order and each once."""
    found: list[str] = []
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            found += _left_out(part)
            stack += reversed(list(_below(part)))
    return list(dict.fromkeys(found))


def _left_out(part: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in part if key in IGNORED)
    if part.get("type") != "integer":
        yield from (f"{key} of what isn't an integer" for key in BOUNDS if key in part)
    kind = part.get("format")
    if isinstance(kind, str) and not FORMATS.fullmatch(kind):
        yield f"format {kind[:40]}"
    elif "pattern" in part or kind is not None:
        beside = "pattern" if "pattern" in part else "format"
        yield from (f"{key} beside {beside}" for key in LENGTHS if key in part)
        if "pattern" in part and kind is not None:
            yield "format beside pattern"
    if "prefixItems" in part or isinstance(part.get("items"), list):
        yield from (f"{key} beside prefixItems" for key in COUNTS if key in part)
    alone = next((key for key in ("$ref", "oneOf", "anyOf") if key in part), None)
    if alone is not None:
        yield from (f"{key} beside {alone}" for key in part if key not in NOTES | {alone, "type"})


def _below(part: Mapping[str, Any]) -> Iterator[Any]:
    for key in _MAPS:
        if isinstance(part.get(key), Mapping):
            yield from part[key].values()
    for key in _LISTS:
        if isinstance(part.get(key), list):
            yield from part[key]
    for key in _ONES:
        value = part.get(key)
        yield from value if isinstance(value, list) else [value]


def gbnf_of(lark: str) -> str | None:
    """A grammar in Lark as GBNF; None where it can't be translated."""
    rules: dict[str, str] = {}
    for line in lark.splitlines():
        if not line.strip():
            continue
        match = _RULE.fullmatch(line.strip())
        if match is None or match[1] in rules:
            return None
        rules[match[1]] = match[2]
    if "start" not in rules:
        return None
    lines = [f"{CHARACTER} ::= {_TEXT}"]
    for name, body in rules.items():
        made = _leaf(body.removeprefix(_JSON)) if body.startswith(_JSON) else _body(body, rules)
        if made is None:
            return None
        lines.append(f"{_named(name)} ::= {made}")
    return "\n".join(lines)


def _named(rule: str) -> str:
    """A rule's name in GBNF, which has no underscores."""
    return "root" if rule == "start" else "r-" + rule.replace("_", "-")


def _body(body: str, rules: Mapping[str, str]) -> str | None:
    made: list[str] = []
    place = 0
    while place < len(body):
        match = _PIECE.match(body, place)
        if match is None:
            return None
        piece, place = match[0], match.end()
        if piece.startswith('"'):
            try:
                made.append(_literal(json.loads(piece)))
            except ValueError:
                return None
        elif piece[0].isalpha() or piece[0] == "_":
            if piece not in rules:
                return None
            made.append(_named(piece))
        elif not piece.isspace():
            made.append(piece)
    return " ".join(made).replace(" *", "*").replace(" +", "+").replace(" ?", "?").replace(" {", "{")


def _literal(text: str) -> str:
    named = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(named.get(c, c if c >= " " else f"\\x{ord(c):02X}") for c in text) + '"'


def _leaf(source: str) -> str | None:
    """A scalar's rule, as JSON is written."""
    if (schema := json_object(source)) is None:
        return None
    said = schema.keys() - NOTES
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None and said <= {"type", "enum", "const"}:
        return " | ".join(_literal(json.dumps(value, ensure_ascii=False)) for value in values) or None
    kind = schema.get("type")
    make, known = (
        _LEAVES.get(kind, (None, frozenset[str]())) if isinstance(kind, str) else (None, frozenset())
    )
    return make(schema) if make is not None and said <= known | {"type"} else None


def _string(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return rf'"\"" {CHARACTER}{{{least},{most}}} "\""'


def _integer(schema: Mapping[str, Any]) -> str | None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and high is None:
        return '"-"? ("0" | [1-9] [0-9]*)'
    if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= high:
        return None
    lengths = range(len(str(low)), len(str(high)) + 1)
    starts = [max(low, 10 ** (digits - 1) if digits > 1 else 0) for digits in lengths]
    ends = [min(high, 10**digits - 1) for digits in lengths]
    return " | ".join(_between(str(start), str(end)) for start, end in zip(starts, ends, strict=True))


def _between(low: str, high: str) -> str:
    """The rule of numbers from `low` to `high`, which have equally many digits."""
    digits = len(low)
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{low[0]}-{high[0]}]" + (f" [0-9]{{{digits - 1}}}" if digits > 1 else "")
    if low[0] == high[0]:
        return f'"{low[0]}" ({_between(low[1:], high[1:])})'
    rest = digits - 1
    ways = [f'"{low[0]}" ({_between(low[1:], "9" * rest)})']
    if int(low[0]) + 1 < int(high[0]):
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{rest}}}")
    return " | ".join([*ways, f'"{high[0]}" ({_between("0" * rest, high[1:])})'])


def _number(_: Mapping[str, Any]) -> str:
    return '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?'


# Type → its rule, and keywords that it knows.
_LEAVES: Final[dict[str, tuple[Callable[[Mapping[str, Any]], str | None], frozenset[str]]]] = {
    "string": (_string, frozenset(LENGTHS)),
    "integer": (_integer, frozenset({"minimum", "maximum"})),
    "number": (_number, frozenset()),
    "boolean": (lambda _: '"true" | "false"', frozenset()),
    "null": (lambda _: '"null"', frozenset()),
}
