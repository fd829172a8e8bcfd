"""Objects that name their properties allow no others, unless they say so: else models invent keys.

OpenAI's strict schemas must say `additionalProperties: false` of every object, and what pydantic or zod writes
for people often doesn't. A closed schema takes nothing that the open one doesn't; but two objects that are
joined, by `allOf` say, forbid each other's properties once they are closed. So an object is closed only where
nothing else speaks of the same value. No torch.

    {"properties": {"a": A}}                        closed
    {"anyOf": [{"properties": …}, {"type": "null"}]} and nothing beside it: the branches are
    {"allOf": [X, Y]}, {"properties": …, "if": …}   neither they, nor what is within them
    {"$ref": "#/$defs/X"}                           X is, if it is so wherever it is used
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from snugvl.inputs.tools.enforceable import LISTS, MAPS, MAX_SCHEMA, NOT_ENFORCED, apart, referred, written

# Keywords that may speak of an object's properties, or of a value's items, besides those that name them.
_COMPOSING: Final = (NOT_ENFORCED - {"propertyNames", "uniqueItems"}) | {
    "allOf", "anyOf", "oneOf", "$ref", "patternProperties", "enum", "const"
}  # fmt: skip
_ALONE: Final = frozenset({"anyOf", "oneOf", "allOf", "$ref"})  # what may be all that a schema says
_SILENT: Final = frozenset({"type", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "nullable", "discriminator", "$defs", "definitions", "$comment", "$schema", "$id"})  # fmt: skip
_WITHIN: Final = ("items", "additionalProperties", "additionalItems")  # of a value's own parts
_BESIDE: Final = ("if", "then", "else", "not", "contains", "unevaluatedProperties", "unevaluatedItems")


def closed(schema: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object where it does no harm.

    Args:
        strict: whether a `oneOf` of branches that aren't known to differ stays one, and is not read as `anyOf`.
    """
    if len(written(schema)) > MAX_SCHEMA:
        return dict(schema)  # it is refused for its size, before anything else looks at it
    open_parts = _closable(schema, strict)
    found = _copied(schema, open_parts)
    assert isinstance(found, dict)
    return found


def _closable(root: Mapping[str, Any], strict: bool) -> set[int]:
    """Ids of the objects that can be closed: those that are alone wherever they are used."""
    seen: set[tuple[int, bool]] = set()
    found: dict[int, bool] = {}
    stack: list[tuple[Any, bool]] = [(root, True)]
    while stack:
        part, alone = stack.pop()
        if not isinstance(part, Mapping) or (id(part), alone) in seen:
            continue
        seen.add((id(part), alone))
        found[id(part)] = found.get(id(part), True) and alone and _names_all(part)
        stack += _below(part, alone, root, strict)
    return {part for part, good in found.items() if good}


def _names_all(part: Mapping[str, Any]) -> bool:
    """Whether an object can do with the properties that it names, and nothing else speaks of them."""
    properties = part.get("properties")
    if not isinstance(properties, Mapping) or not properties or "additionalProperties" in part:
        return False
    required, least = part.get("required", []), part.get("minProperties", 0)
    return (
        not part.keys() & _COMPOSING
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )


def _below(
    part: Mapping[str, Any], alone: bool, root: Mapping[str, Any], strict: bool
) -> Iterator[tuple[Any, bool]]:
    """The schemas below one, and whether each is all that speaks of its value."""
    said = part.keys() - _SILENT
    single = next(iter(said)) if len(said) == 1 and said <= _ALONE else None
    inside = alone and not part.keys() & _COMPOSING
    for key, value in part.items():
        if key == "$ref" and isinstance(value, str):
            yield referred(value, root), alone and single == key
        elif key in LISTS and isinstance(value, list):
            own = inside if key == "prefixItems" else alone and single == key
            if key == "allOf":
                own = own and len(value) == 1
            elif key == "oneOf":
                own = own and (not strict or apart(value))
            yield from ((each, own) for each in value)
        elif key in (*MAPS, "dependentSchemas") and isinstance(value, Mapping):
            if key not in ("$defs", "definitions"):  # those are seen where they are used
                yield from ((each, inside) for each in value.values())
        elif key in _WITHIN:
            yield from ((each, inside) for each in (value if isinstance(value, list) else [value]))
        elif key in _BESIDE:
            yield value, False


def _copied(part: Any, to_close: set[int]) -> Any:
    """A copy, closed where it can be; a request's JSON is nested so little that recursion will do."""
    if isinstance(part, list):
        return [_copied(each, to_close) for each in part]
    if not isinstance(part, Mapping):
        return part
    copy = {key: _copied(value, to_close) for key, value in part.items()}
    return copy | {"additionalProperties": False} if id(part) in to_close else copy
