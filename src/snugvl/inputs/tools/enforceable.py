"""The parts of a JSON schema that a grammar is made of. No torch.

What can't be enforced token by token is left out, and named. One keyword in one tool must not refuse a whole
request: zod, pydantic and MCP servers write `propertyNames`, `uniqueItems` or look-ahead patterns as a matter
of course. Who needs every keyword says `strict: true`.

Objects that name their properties are closed, else models invent keys: OpenAI's strict schemas must say
`additionalProperties: false` of every object, and what pydantic or zod writes for people often doesn't. A
closed schema takes nothing that the open one doesn't. But two objects that are joined, by `allOf` say, forbid
each other's properties once they are closed. So an object is closed where nothing else speaks of its value:

    {"properties": {"a": A}}                          it is
    {"anyOf": [{"properties": …}, {"type": "null"}]}  the branches are, as nothing stands beside `anyOf`
    {"allOf": [X, Y]}, {"properties": …, "if": …}     neither they, nor what is within them
    {"$ref": "#/$defs/X"}                             X is, if it is alone wherever it is used

There a schema that leaves its type out also gets the one that its keywords imply: an array with `items`, an
object with `properties`. Else any string would do.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

MAX_SCHEMA: Final = 131_072  # characters; also of all tools together
NOT_ENFORCED: Final = frozenset(
    {"propertyNames", "uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains",
     "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
     "$dynamicRef", "$dynamicAnchor", "$recursiveRef"}
)  # fmt: skip
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
# Formats without an end of their own, in which a model may repeat itself: what ends them.
_ENDS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{
        kind: {"pattern": r"^[^.]*(\.[0-9]{1,9}([^0-9].*)?)?$"} for kind in ("date-time", "time")
    },  # nanoseconds
    "duration": {"maxLength": 64},
    "email": {"maxLength": 254},  # RFC 5321
    "hostname": {"maxLength": 253},  # RFC 1035
    "uri": {"maxLength": 2048},
}
_WHOLE: Final = (1 << 63) - 1024  # the largest bound that llguidance takes, of those that floats hold
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONES: Final = ("items", "additionalProperties", "additionalItems")
# Look-around, back references, and escapes that Rust's regular expressions don't have.
_COMPOSING: Final = (NOT_ENFORCED - {"propertyNames", "uniqueItems", "not"}) | {
    "allOf", "anyOf", "oneOf", "$ref", "patternProperties", "enum", "const"
}  # may speak of the same properties or items as what stands beside them  # fmt: skip
_ALONE: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})  # each may be all that a schema says
_SILENT: Final = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
     "discriminator", "$defs", "definitions", "$comment", "$schema", "$id"}
)  # fmt: skip
_BESIDE: Final = ("if", "then", "else", "not", "contains", "propertyNames", "unevaluatedProperties",
                  "unevaluatedItems")  # fmt: skip
_OF_ARRAYS: Final = frozenset(
    {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
     "minContains", "maxContains", "unevaluatedItems"}
)  # fmt: skip
_OF_OBJECTS: Final = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
     "propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"}
)  # fmt: skip
_UNREADABLE: Final = re.compile(r"\(\?<?[=!]|\\(?:[1-9bBcZGkK])")


def enforceable(
    schema: Mapping[str, Any], *, strict: bool = False, arguments: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The schema, closed and without what can't be enforced, and the keywords that were left out, in order.

    Args:
        strict: leave nothing out; what can't be enforced is refused later.
        arguments: it is of a tool's arguments, of which there are none where `properties` is empty.
    """
    if len(json.dumps(schema)) > MAX_SCHEMA:
        return dict(schema), []  # it is refused for its size, before anything else looks at it
    schema = _without_nulls(schema)
    shut = _copied(schema, *_alone(schema, strict))
    if arguments and not schema.get("properties", True) and _names_all(schema):
        shut["additionalProperties"] = False
    if strict:
        return shut, []
    left_out: list[str] = []
    kept = _kept(shut, left_out)
    return kept, list(dict.fromkeys(left_out))


def _without_nulls(schema: Any) -> Any:
    """The schema without keywords of null, as programs in Go write what is empty."""
    if not isinstance(schema, Mapping):
        return schema
    said = {
        key: {} if key == "properties" and value is None else value  # of a tool without any
        for key, value in schema.items()
        if value is not None or key in ("const", "properties")
    }
    return {key: _each_below(key, value, _without_nulls, _BESIDE) for key, value in said.items()}


def ended(schema: Any) -> Any:
    """The schema as llguidance gets it: formats come to an end, bounds have 64 bits, `$ref`s are URIs."""
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):  # pydantic writes names of classes as they are
            copy[key] = quote(value, safe="!#$%&'()*+,/:;=?@[]~")
        elif key in ("minimum", "maximum") and type(value) is int and schema.get("type") == "integer":
            copy[key] = max(value, -_WHOLE) if key == "minimum" else min(value, _WHOLE)
        else:
            copy[key] = _each_below(key, value, ended)
    kind, least = schema.get("format"), schema.get("minLength", 0)
    if schema.keys() & {"enum", "const"} or not isinstance(kind, str) or not isinstance(least, int):
        return copy
    end = _ENDS.get(kind, {})
    return copy if least > end.get("maxLength", least) else {**end, **copy}


def _each_below(key: str, value: Any, change: Callable[[Any], Any], also: Sequence[str] = ()) -> Any:
    """The value of a keyword, with `change` done to each schema in it. `also`: keywords of one schema beside
    the usual ones. A request's JSON is nested so little that recursion will do."""
    if key in _MAPS and isinstance(value, Mapping):
        return {name: change(each) for name, each in value.items()}
    if key in _LISTS or key in _ONES or key in also:  # `items` of old drafts are a list
        return [change(each) for each in value] if isinstance(value, list) else change(value)
    return value


def _kept(schema: Any, left_out: list[str]) -> Any:
    """The schema without what can't be enforced, which is added to `left_out`."""
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if reason := _unenforced(key, value):
            left_out.append(reason)
        else:
            kept[key] = _each_below(key, value, partial(_kept, left_out=left_out))
    branches = kept.get("oneOf")
    if isinstance(branches, list) and not _apart(branches):
        left_out.append("oneOf (read as anyOf)")
        del kept["oneOf"]
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", []), {"anyOf": branches}]
        else:
            kept["anyOf"] = branches
    return kept


def _unenforced(key: str, value: Any) -> str | None:
    """The keyword as it is named, if it can't be enforced."""
    if key in NOT_ENFORCED:
        return key
    if key == "format" and isinstance(value, str) and value not in FORMATS:
        return f"format {value[:40]}"
    if key == "pattern" and isinstance(value, str) and _UNREADABLE.search(value):
        return f"pattern {value[:40]}"
    if key == "patternProperties" and isinstance(value, dict) and any(map(_UNREADABLE.search, value)):
        return key
    return None


def _apart(branches: list[Any]) -> bool:
    """Whether no value can be of two branches, as far as their types tell."""
    types = [each.get("type") if isinstance(each, dict) else None for each in branches]
    known = all(isinstance(each, str) for each in types)
    return known and len(set(types)) == len(types) and not {"integer", "number"} <= set(types)


def between_quotes(text: str) -> str:
    """A text as it stands between the quotation marks of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def referred(reference: str, root: Any, otherwise: Any = True) -> Any:
    """The target of a reference within `root` ("#/$defs/point"); without one `otherwise`: all is valid."""
    value = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return otherwise
    return value


def _alone(root: Mapping[str, Any], strict: bool) -> tuple[set[int], dict[int, str]]:
    """Schemas that are alone wherever they are used: ids of those to close, types for those without one."""
    found: dict[int, bool] = {}
    shared: set[int] = set()
    types: dict[int, str] = {}
    seen: set[tuple[int, bool]] = set()
    stack: list[tuple[Any, bool]] = [(root, True)]
    while stack:
        part, alone = stack.pop()
        if not isinstance(part, Mapping) or (id(part), alone) in seen:
            continue
        seen.add((id(part), alone))
        named = bool(part.get("properties")) and _names_all(part)
        found[id(part)] = found.get(id(part), True) and alone and named
        if not alone:
            shared.add(id(part))
        if kind := _meant(part):
            types[id(part)] = kind
        stack += _below_one(part, alone, root, strict)
    closed = {part for part, good in found.items() if good}
    return closed, {part: kind for part, kind in types.items() if part not in shared}


def _meant(part: Mapping[str, Any]) -> str | None:
    """The one type that a schema without one speaks of."""
    said = part.keys() - _SILENT
    if "type" in part or part.get("nullable"):
        return None
    if said <= _OF_ARRAYS and said & {"items", "prefixItems"}:
        return "array"
    return "object" if said <= _OF_OBJECTS and part.get("properties") else None


def _names_all(part: Mapping[str, Any]) -> bool:
    """Whether an object can do with the properties that it names, and nothing there speaks of others."""
    properties, required = part.get("properties"), part.get("required", [])
    least = part.get("minProperties", 0)
    return (
        isinstance(properties, Mapping)
        and "additionalProperties" not in part
        and not part.keys() & _COMPOSING
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int | float)
        and least <= len(properties)
    )


def _below_one(
    part: Mapping[str, Any], alone: bool, root: Mapping[str, Any], strict: bool
) -> Iterator[tuple[Any, bool]]:
    """The schemas below one, and whether each is all that speaks of its value."""
    said = part.keys() - _SILENT
    whole = alone and len(said) == 1 and said <= _ALONE
    inside = alone and not part.keys() & _COMPOSING
    for key, value in part.items():
        if key == "$ref" and isinstance(value, str):
            yield referred(value, root), whole
        elif key in _LISTS and isinstance(value, list):
            own = inside if key == "prefixItems" else whole
            # One of a `oneOf` that is closed may be valid for another branch, which the open one excluded.
            own = (
                own
                and (key != "allOf" or len(value) == 1)
                and (key != "oneOf" or not strict or _apart(value))
            )
            yield from ((each, own) for each in value)
        elif key in ("properties", "patternProperties", "dependentSchemas") and isinstance(value, Mapping):
            yield from ((each, inside) for each in value.values())
        elif key in _ONES:
            yield from ((each, inside) for each in (value if isinstance(value, list) else [value]))
        elif key in _BESIDE:
            yield value, False


def _copied(part: Any, to_close: set[int], types: Mapping[int, str]) -> Any:
    """A copy, closed where it can be, and with the types that are meant."""
    if isinstance(part, list):
        return [_copied(each, to_close, types) for each in part]
    if not isinstance(part, Mapping):
        return part
    copy = {key: _copied(value, to_close, types) for key, value in part.items()}
    if id(part) in types:
        copy = {"type": types[id(part)], **copy}
    return copy | {"additionalProperties": False} if id(part) in to_close else copy
