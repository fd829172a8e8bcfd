"""Limits of JSON schemas, checked before they are compiled.

The compiler recurses once per level of nesting and per `$ref` on the way, on a stack that takes the process
along when it overflows. It intersects the patterns that `allOf` puts on one string, which doubles the work
with each of them. Measured: 12 patterns take 1.4 s, 14 take 13 s; 180 chained objects fit into 2 MiB.
`multipleOf` becomes an automaton with a state for each remainder, and numbers that are joined one for
each combination: 10,000 take 0.05 s and 6 MB, 1,000,000 take 12 s and 290 MB. Each mask of a literal takes
time with its length: 0.3 ms for 1,000 characters, 40 ms for 100,000 (of 151,936 tokens).

What these limits let through is tried before it is compiled (`trials.py`).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from snugvl.errors import RequestError

MAX_DEPTH: Final = 100  # of the document
MAX_LINKED_DEPTH: Final = 400  # of the document and everything it refers to, on top of each other
MAX_PROPERTIES: Final = 1000  # of one object
MAX_PATTERNS: Final = 8  # below one `allOf`, or a `$ref` with keywords beside it
MAX_MULTIPLE: Final = 10_000  # of a `multipleOf` without its decimal point, and of those that are joined
MAX_LITERAL: Final = 8_192  # characters of one value of `const` or `enum`, or of one property's name
_JOINED = ("allOf", "anyOf", "oneOf")
_PATTERNS = ("pattern", "format", "patternProperties")
_NOTES = frozenset(
    {"$ref", "title", "description", "default", "examples", "$defs", "definitions", "$comment"}
)


def check_schema(source: str, field: str) -> None:
    """Refuse what is no JSON object, and what could take the compiler too much time or stack.

    Raises:
        RequestError: with what is wrong and the limit.
    """
    schema = _parsed(source, field)
    depth = _depth(schema)
    if depth > MAX_DEPTH:
        raise RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels", field=field)
    if not isinstance(schema, dict):
        raise RequestError('a JSON schema is an object, such as {"type": "object"}', field=field)
    links = _links(schema)
    linked = len(links)  # each adds a level at least; more than enough of them aren't even looked at
    if linked <= MAX_LINKED_DEPTH:
        linked = depth + sum(_depth(_target(schema, link)) for link in links)
    if linked > MAX_LINKED_DEPTH:
        raise RequestError(
            f"the JSON schema and what its $refs lead to are {linked} levels deep in all, at most "
            f"{MAX_LINKED_DEPTH} are taken; use fewer $refs",
            field=field,
        )
    targets = {link: _target(schema, link) for link in links}
    reach = {link: _Reach(_patterns(target), _links(target)) for link, target in targets.items()}
    for part in _objects(schema):
        _check_part(part, reach, field)
        _check_multiples(part, schema, field)
        for literal in _literals(part):
            if len(literal) > MAX_LITERAL:
                raise RequestError(
                    f"the JSON schema has a literal of {len(literal):,} characters ({literal[:20]}…), at "
                    f"most {MAX_LITERAL:,} are taken",
                    field=field,
                )


def longest_literal(source: str) -> int:
    """Characters of the longest literal of a schema that `check_schema` has let through."""
    return max((len(each) for part in _objects(json.loads(source)) for each in _literals(part)), default=0)


def _literals(part: dict[str, Any]) -> Iterator[str]:
    """What an answer may have to repeat, character by character: names and values as JSON."""
    properties = part.get("properties")
    if isinstance(properties, dict):
        yield from properties
    values = part.get("enum")
    for value in (*(values if isinstance(values, list) else ()), part.get("const")):
        yield value if isinstance(value, str) else json.dumps(value)


def _check_multiples(part: dict[str, Any], schema: Any, field: str) -> None:
    """Refuse a `multipleOf` with too many remainders, alone or beside those it is joined with."""
    joined = [each for key in _JOINED if isinstance(part.get(key), list) for each in part[key]]
    beside = [_target(schema, each["$ref"]) if _refers(each) else each for each in joined]
    steps = [_steps(each["multipleOf"]) for each in (part, *beside) if _has_multiple(each)]
    if math.prod(steps) > MAX_MULTIPLE:
        raise RequestError(
            f"the JSON schema has multipleOf {' and '.join(f'{step:,}' for step in steps)} in one place; "
            f"their product may be at most {MAX_MULTIPLE:,} (decimal points left out), as answers are "
            "checked digit by digit; use a smaller one, or check the number afterwards",
            field=field,
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


def _parsed(source: str, field: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise RequestError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels", field=field) from None
    except ValueError as error:
        raise RequestError(f"the JSON schema is not JSON: {error}", field=field) from None


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a `$ref` leads to: the patterns there, and where it goes on."""

    patterns: set[tuple[int, str]]
    links: set[str]


def _check_part(part: dict[str, Any], reach: Mapping[str, _Reach], field: str) -> None:
    properties = part.get("properties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise RequestError(
            f"an object of the JSON schema has {len(properties)} properties, at most {MAX_PROPERTIES} are "
            "taken",
            field=field,
        )
    several = isinstance(part.get("allOf"), list) and len(part["allOf"]) + len(part.keys() - _NOTES) > 2
    if several or ("$ref" in part and part.keys() - _NOTES):
        patterns = _patterns(part).union(*(reach[link].patterns for link in _linked(part, reach)))
        if len(patterns) > MAX_PATTERNS:
            raise RequestError(
                f"the JSON schema joins parts with {len(patterns)} patterns and formats by allOf or $ref, "
                f"at most {MAX_PATTERNS} are taken there",
                field=field,
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
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _links(value: Any) -> set[str]:
    """The different `$ref`s at and below `value`."""
    return {item["$ref"] for item in _objects(value) if isinstance(item.get("$ref"), str)}


def _patterns(value: Any) -> set[tuple[int, str]]:
    """Every keyword at and below `value` that puts a pattern on a string, by object and name."""
    return {(id(item), key) for item in _objects(value) for key in _PATTERNS if key in item}


def _linked(part: Any, reach: Mapping[str, _Reach]) -> set[str]:
    """The `$ref`s below `part`, and those below what they lead to, and so on."""
    found: set[str] = set()
    new = _links(part)
    while new:
        found |= new
        new = set[str]().union(*(reach[link].links for link in new)) - found
    return found


def _target(schema: Any, link: str) -> Any:
    """What a `$ref` leads to; the whole schema where that isn't plain."""
    found = schema
    for name in link.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return schema
        found = found[name]
    return found
