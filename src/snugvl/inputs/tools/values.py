"""Which types of JSON a schema admits, and text as a value of one of them."""

import json
from collections.abc import Mapping
from typing import Any, Final

ALL: Final = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
TEXT: Final = frozenset(("string",))
_DEPTH: Final = 64  # of references and alternatives, one within the other
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # as some templates write them


class Types:
    """The types that the parts of one schema admit; each part is looked at once, however many refer to it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}  # by the part's id

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a part of the root admits; all of them where it doesn't say."""
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            return ALL
        if id(schema) not in self._known:
            self._known[id(schema)] = ALL  # what refers to itself says nothing
            self._known[id(schema)] = self._of(schema, depth + 1)
        return self._known[id(schema)]

    def _of(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        found = ALL
        if "type" in schema:
            named = schema["type"]
            found = frozenset([named] if isinstance(named, str) else named)
            found |= {"integer"} if "number" in found else frozenset()
        if "$ref" in schema:
            found &= self.of(referred(schema["$ref"], self._root), depth)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                found &= frozenset().union(*(self.of(each, depth) for each in schema[key]))
        for each in schema.get("allOf", ()):
            found &= self.of(each, depth)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            found &= {_type(value) for value in values}
        return found


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within `root` ("#/$defs/point") means; True, which admits all, if it is none."""
    value: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, Mapping) or part not in value:
            return True
        value = value[part]
    return value


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as `text`: of one of `types` if it can be, else a string."""
    plain = text.strip()
    plain = _PYTHON.get(plain, plain)
    try:
        value = json.loads(plain, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type(value)
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    if kind in types and kind != "string":
        return plain
    return json.dumps(text, ensure_ascii=False)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
