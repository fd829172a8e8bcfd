"""What of a schema can be enforced: the rest is left out and named; nothing else changes."""

import json
from typing import Any

import pytest

from snugvl.core.messages import Grammar
from snugvl.inputs.constraints import grammar_text
from snugvl.inputs.tools.enforceable import MAX_SCHEMA, enforceable
from snugvl.inputs.trials import Trials

LEFT_OUT = [
    ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": {}, "else": {}}, "if"),
    ({"properties": {"a": {"contains": {"type": "string"}}}}, "contains"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"properties": {"a": {"type": "string", "pattern": "^(?!x).*$"}}}, "pattern ^(?!x).*$"),
    ({"properties": {"a": {"type": "string", "pattern": r"(a)\1"}}}, r"pattern (a)\1"),
    ({"properties": {"a": {"type": "string", "pattern": r"\bx"}}}, r"pattern \bx"),
    ({"properties": {"a": {"type": "string", "format": "binary"}}}, "format binary"),
    ({"properties": {"a": {"type": "string", "format": "base64"}}}, "format base64"),
    ({"properties": {"a": {"type": "string", "format": "regex"}}}, "format regex"),
    ({"patternProperties": {"^(?=a)": {"type": "string"}}}, "patternProperties"),
    ({"$defs": {"a": {"anyOf": [{"not": {}}]}}, "properties": {"b": {"$ref": "#/$defs/a"}}}, "not"),
    (
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 3, "type": "string"}]}}},
        "oneOf (read as anyOf)",
    ),
]


@pytest.fixture(scope="module")
def trials() -> Any:
    trials = Trials()
    yield trials
    trials.close()


@pytest.mark.parametrize(("schema", "word"), LEFT_OUT)
def test_what_is_left_compiles(trials: Trials, schema: dict[str, Any], word: str) -> None:
    whole = {"type": "object", **schema}
    assert trials.check(grammar_text(Grammar("json_schema", json.dumps(whole)), "x"), lambda: None).error
    kept, left_out = enforceable(whole)
    assert word in left_out
    verdict = trials.check(grammar_text(Grammar("json_schema", json.dumps(kept)), "x"), lambda: None)
    assert verdict.error is None or not verdict.error


def test_names_of_properties_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"type": "string", "format": "date"}, "if": {"const": {"not": 1}}},
        "anyOf": [{"required": ["not"]}],
        "enum": [{"uniqueItems": True}],
        "default": {"contains": 1},
    }
    assert enforceable(schema) == (schema, [])


def test_branches_of_different_types_stay_exclusive() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    assert enforceable(schema) == (schema, [])


def test_what_is_refused_for_its_size_is_not_looked_at() -> None:
    schema = {"not": {}, "description": "a" * MAX_SCHEMA}
    assert enforceable(schema) == (schema, [])
