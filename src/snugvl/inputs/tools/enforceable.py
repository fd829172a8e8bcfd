"""What of a JSON schema can be enforced token by token: the rest is left out, and named. No torch.

One keyword in one tool must not refuse a whole request: zod, pydantic and MCP servers write `propertyNames`,
`uniqueItems` or look-ahead patterns as a matter of course. Who needs every keyword says `strict: true`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

MAX_SCHEMA: Final = 131_072  # characters; of all tools together, too
NOT_ENFORCED: Final = frozenset(
    {"propertyNames", "uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains",
     "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
     "$dynamicRef", "$dynamicAnchor", "$recursiveRef"}
)  # fmt: skip
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_LISTS: Final = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONES: Final = ("items", "additionalProperties", "additionalItems")
# Look-around, back references, and escapes that Rust's regular expressions don't have.
_UNREADABLE: Final = re.compile(r"\(\?<?[=!]|\\(?:[1-9bBcZGkK])")


def enforceable(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schema without what can't be enforced, and the keywords that were left out, in order."""
    if len(json.dumps(schema)) > MAX_SCHEMA:
        return dict(schema), []  # it is refused for its size, before anything else looks at it
    left_out: list[str] = []
    kept = _kept(schema, left_out)
    return kept, list(dict.fromkeys(left_out))


def _kept(schema: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """One object and those below it; a request's JSON is nested so little that recursion will do."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if reason := _unenforced(key, value):
            left_out.append(reason)
        elif key in _MAPS and isinstance(value, dict):
            kept[key] = {name: _below(each, left_out) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            kept[key] = [_below(each, left_out) for each in value]
        elif key in _ONES:
            kept[key] = _below(value, left_out)
        else:
            kept[key] = value
    branches = kept.get("oneOf")
    if isinstance(branches, list) and not _apart(branches):
        left_out.append("oneOf (read as anyOf)")
        del kept["oneOf"]
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", []), {"anyOf": branches}]
        else:
            kept["anyOf"] = branches
    return kept


def _below(value: Any, left_out: list[str]) -> Any:
    if isinstance(value, list):  # `items` of old drafts
        return [_below(each, left_out) for each in value]
    return _kept(value, left_out) if isinstance(value, dict) else value


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
