"""Types that schemas admit, and text as values of them."""

import json
from typing import Any

import pytest

from snugvl.inputs.tools.enforceable import referred
from snugvl.inputs.tools.qwen_xml import ALL, Types, value_json

DEFS: dict[str, Any] = {
    "a/b": {"type": "boolean"},
    "self": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/self"}]},
    "wide": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": ["integer", "string"]}]},
}
ROOT = {"$defs": DEFS}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ALL),
        (True, ALL),
        ({"type": "string"}, {"string"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 1.5, True, None, [], {}]}, ALL),
        ({"const": "a"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/nothing"}, ALL),
        ({"$ref": "#/$defs/wide"}, {"boolean", "integer", "string"}),
        ({"$ref": "#/$defs/self"}, ALL),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": ["a", 1]}]}, {"string"}),
        ({"oneOf": [{"type": "string"}, {"type": "array"}], "type": ["array", "object"]}, {"array"}),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    assert Types(ROOT).of(schema) == types


def test_references_to_references_cost_no_exponential_time() -> None:
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(40)}
    assert Types({"$defs": defs}).of({"$ref": "#/$defs/d0"}) == ALL
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        deep = {"allOf": [deep]}
    assert Types({}).of(deep) == ALL, "so deep nothing is said"


def test_references() -> None:
    assert referred("#/$defs/a~1b", ROOT) == {"type": "boolean"}
    assert referred("#", ROOT) == ROOT
    assert referred("http://x/y", ROOT) is True


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        (" 5\n", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"number", "integer"}, 5),
        ("1e2", {"number", "integer"}, 100.0),
        ("True", {"boolean"}, True),
        ("true", {"string", "boolean"}, True),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"integer"}, "1e999"),
        ("None", {"null", "string"}, None),
        ("None", {"string", "integer"}, "None"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ('"a"', {"string", "null"}, '"a"'),
        ("", {"integer"}, ""),
    ],
)
def test_values(text: str, types: set[str], value: Any) -> None:
    assert json.loads(value_json(text, frozenset(types))) == value
