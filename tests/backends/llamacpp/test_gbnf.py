"""What a llama-server without llguidance can be asked for: keywords that it would leave out, and GBNF."""

import re
from typing import Any

import pytest

from snugvl.backends.llamacpp.gbnf import gbnf_of, left_out
from snugvl.tasks.conventions import BOXES, PIXEL_BOXES, SCENE, Y_FIRST_BOXES


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}}}, []),
        ({"type": "number", "minimum": 1}, ["minimum of what isn't an integer"]),
        ({"type": "integer", "multipleOf": 5}, ["multipleOf"]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "object", "patternProperties": {"^a": {}}}, ["patternProperties"]),
        ({"properties": {"a": {"anyOf": [{"type": "string", "format": "email"}]}}}, ["format email"]),
        ({"type": "string", "format": "date-time"}, []),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["maxLength beside pattern"]),
        ({"type": "string", "minLength": 1, "maxLength": 3}, []),
        ({"prefixItems": [{"type": "null"}], "minItems": 1}, ["minItems beside prefixItems"]),
        ({"$ref": "#/$defs/a", "title": "A", "$defs": {"a": {"type": "null"}}}, []),
        ({"$ref": "#/$defs/a", "required": ["b"]}, ["required beside $ref"]),
        ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, ["not"]),
        ({"type": "object", "anyOf": [{"type": "null"}], "properties": {}}, ["properties beside anyOf"]),
        ({"properties": {"minimum": {"type": "null"}, "not": {"type": "null"}}}, []),
    ],
)
def test_what_llama_cpp_would_leave_out_is_named(schema: dict[str, Any], told: list[str]) -> None:
    assert left_out(schema) == told


def numbers(rule: str) -> re.Pattern[str]:
    """A rule of digits alone as a pattern."""
    return re.compile(re.sub(r'[" ]', "", rule))


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (0, 9), (1, 9999), (0, 1000), (0, 99_999), (7, 7), (17, 342), (99, 1001), (95, 105)],
)
def test_whole_numbers_from_one_to_another(low: int, high: int) -> None:
    source = f'start: %json {{"type": "integer", "minimum": {low}, "maximum": {high}}}'
    made = gbnf_of(source)
    assert made is not None
    pattern = numbers(made.split("root ::= ")[1])
    tried = {*range(1200), *range(9_990, 10_010), *range(99_990, 100_010)}
    for number in tried:
        assert bool(pattern.fullmatch(str(number))) == (low <= number <= high), number
    assert not pattern.fullmatch("01")
    assert not pattern.fullmatch("")


@pytest.mark.parametrize("grammar", [SCENE, BOXES, PIXEL_BOXES, Y_FIRST_BOXES])
def test_what_tasks_write_can_be_written_as_gbnf(grammar: Any) -> None:
    made = gbnf_of(grammar.source)
    assert made is not None
    rules = dict(line.split(" ::= ", 1) for line in made.splitlines())
    used = {
        name
        for body in rules.values()
        for name in re.findall(r"r-[\w-]+", re.sub(r'"(?:[^"\\]|\\.)*"', "", body))
    }
    assert used == rules.keys() - {"root", "character"}, "every rule that is named is there, and used"
    assert "_" not in "".join(rules)


@pytest.mark.parametrize(
    "lark",
    [
        "start: /a+/",
        "start: A\nA: /a/ & ~/b/",
        'begin: "a"',
        "start: nowhere",
        'start: "a"i',
        'start[lazy]: "a"',
        'start: %json {"type": "object"}',
        'start: %json {"type": "integer", "minimum": -5, "maximum": 5}',
        'start: %json {"type": "string", "pattern": "a"}',
        'start: "a" // a comment',
        "start: <[7]>",
        'start: "a"\nstart: "b"',
        "",
    ],
)
def test_what_has_no_counterpart_is_none(lark: str) -> None:
    assert gbnf_of(lark) is None


def test_literals_and_names() -> None:
    made = gbnf_of('start: a_b{2,3} ("x" | "\\n\\"\\u0001é")* \na_b: %json {"enum": ["a", 1, null]}')
    assert made is not None
    assert made.splitlines()[1:] == [
        'root ::= r-a-b{2,3} ( "x" | "\\n\\"\\x01é" )*',
        'r-a-b ::= "\\"a\\"" | "1" | "null"',
    ]
