"""What of a schema can be enforced: the rest is left out and named; objects are closed, where they can be."""

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from snugvl.core.messages import Grammar
from snugvl.inputs.constraints import grammar_text
from snugvl.inputs.tools.enforceable import FORMATS, MAX_SCHEMA, ended, enforceable
from snugvl.inputs.trials import Trials
from tests.draws import draws

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


BEGUN = {
    "date-time": ("2026-01-01T00:00:00.", "2026-01-01T00:00:00"), "time": ("00:00:00.", "00:00:00.5+0"),
    "date": ("",), "duration": ("P", "P1DT", "P1Y2"), "email": ("", "a@", "a@b."),
    "hostname": ("", "a.", "a-"), "ipv4": ("", "1."), "ipv6": ("", "::"), "uuid": ("",),
    "uri": ("", "http:", "http://a", "http://a/?", "http://a/#"),
}  # fmt: skip
LONGEST = 2100  # characters


def matcher(schema: dict[str, Any]) -> LLMatcher:
    return LLMatcher(LLTokenizer("byte"), grammar_text(Grammar("json_schema", json.dumps(schema)), "x"))


@pytest.mark.parametrize(("kind", "begun"), [(kind, each) for kind, all_ in BEGUN.items() for each in all_])
def test_a_model_that_repeats_itself_comes_to_the_end_of_a_format(kind: str, begun: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "format": kind}]}}}
    for piece in (*"07afZ.:-+/@", "a."):
        state = matcher({**schema, "required": ["a"], "additionalProperties": False})
        start = f'{{"a": "{begun}'.encode()
        assert state.try_consume_tokens(list(start)) == len(start)
        repeated = state.try_consume_tokens(list((piece * LONGEST).encode()))
        assert repeated < LONGEST, piece
        assert kind not in ("date-time", "time") or repeated <= 9


def test_every_format_that_is_enforced_has_an_end() -> None:
    assert BEGUN.keys() == FORMATS


@pytest.mark.parametrize(
    "value",
    ["2026-11-27T21:00:00Z", "2026-11-27T21:00:00.123456789+02:00", "2026-11-27T21:00:00.5-05:30"],
)
def test_times_of_any_precision_to_nanoseconds_are_taken(value: str) -> None:
    state = matcher({"type": "string", "format": "date-time"})
    text = json.dumps(value).encode()
    assert state.try_consume_tokens(list(text)) == len(text)
    assert state.is_accepting()


def test_lengths_and_values_that_a_schema_says_itself_stay() -> None:
    long = "a" * 300 + "@example.com"
    for said in ({"maxLength": 400}, {"enum": [long]}, {"const": long}):
        text = json.dumps(long).encode()
        state = matcher({"type": "string", "format": "email", **said})
        assert state.try_consume_tokens(list(text)) == len(text), said
    for least, whole in ((1, True), (3000, False)):
        assert ("maxLength" in ended({"type": "string", "format": "uri", "minLength": least})) == whole
    assert ended({"const": {"format": "uri"}}) == {"const": {"format": "uri"}}
    assert ended({"properties": {"format": {"type": "string"}}})["properties"]["format"] == {"type": "string"}


def test_whole_numbers_of_64_bits_may_be_asked_for() -> None:
    """llguidance refuses bounds that no float holds."""
    state = matcher({"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1})
    assert not state.is_error(), state.get_error()
    text = b"-9223372036854774784"
    assert state.try_consume_tokens(list(text)) == len(text)


def test_names_of_properties_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"type": "string", "format": "date"}, "if": {"const": {"not": 1}}},
        "anyOf": [{"required": ["not"]}],
        "enum": [{"uniqueItems": True}],
        "default": {"contains": 1},
    }
    assert enforceable(schema) == (schema, [])  # `anyOf` beside them keeps the properties open


def test_keywords_of_null_say_nothing() -> None:
    """As programs in Go write what they leave out; null as a value stays."""
    bare = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    schema = {**bare, "additionalProperties": None, "$defs": None, "enum": None}
    schema["properties"] = {"a": {"const": None, "description": None, "items": None}}
    assert enforceable(schema) == enforceable(bare)
    assert (
        enforceable({"type": "object", "properties": None, "required": None}, arguments=True)[0]
        == (enforceable({"type": "object", "properties": {}}, arguments=True)[0])
    ), "a tool without parameters"


@pytest.mark.parametrize("name", ["Größe", "a b", "a/b", "a%20b", "日本"])
def test_a_reference_may_have_any_name(name: str) -> None:
    """Pydantic writes a class's name into it as it is."""
    escaped = name.replace("/", "~1").replace("%", "%25")
    schema = {"$ref": f"#/$defs/{escaped}", "$defs": {name: {"const": 1}}}
    assert matcher(enforceable(schema)[0]).try_consume_tokens(list(b"1")) == 1


def test_a_reference_may_lead_into_a_list() -> None:
    """As zod's converter writes what comes twice."""
    schema = {"anyOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]}
    assert matcher(enforceable(schema)[0]).try_consume_tokens(list(b"[1]")) == 3


def test_branches_of_different_types_stay_exclusive() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    assert enforceable(schema) == (schema, [])


def test_what_is_refused_for_its_size_is_not_looked_at() -> None:
    schema = {"not": {}, "description": "a" * MAX_SCHEMA}
    assert enforceable(schema) == (schema, [])


def an(**properties: Any) -> dict[str, Any]:
    """An object that names its properties, open."""
    return {"type": "object", "properties": properties}


def shut(**properties: Any) -> dict[str, Any]:
    """The same, closed."""
    return {**an(**properties), "additionalProperties": False}


TEXT = {"type": "string"}
A, B = an(a=TEXT), an(b=TEXT)
CLOSED = {
    "an object": (A, shut(a=TEXT)),
    "within": (an(x={"type": "array", "items": A}), shut(x={"type": "array", "items": shut(a=TEXT)})),
    "of additional ones": ({"additionalProperties": A}, {"additionalProperties": shut(a=TEXT)}),
    "or null": (an(x={"anyOf": [A, {"type": "null"}]}), shut(x={"anyOf": [shut(a=TEXT), {"type": "null"}]})),
    "a oneOf that is read as anyOf": ({"oneOf": [A, B]}, {"anyOf": [shut(a=TEXT), shut(b=TEXT)]}),
    "one of allOf": (an(x={"allOf": [A], "title": "X"}), shut(x={"allOf": [shut(a=TEXT)], "title": "X"})),
    "referred": (
        {**an(x={"$ref": "#/$defs/A", "description": "It."}), "$defs": {"A": A}},
        {**shut(x={"$ref": "#/$defs/A", "description": "It."}), "$defs": {"A": shut(a=TEXT)}},
    ),
    "of itself": (
        {**an(x={"$ref": "#"}), "title": "Tree"}, {**shut(x={"$ref": "#"}), "title": "Tree"}
    ),
    "named like a keyword": (an(anyOf=TEXT), shut(anyOf=TEXT)),
}  # fmt: skip
OPEN = {
    "says so": {**A, "additionalProperties": True},
    "names none": an(),
    "names no properties": {"type": "object"},
    "requires others": {**A, "required": ["b"]},
    "wants more": {**A, "minProperties": 2},
    "joined": {"allOf": [A, B]},
    "within what is joined": {"allOf": [an(x=A), an(x=B)]},
    "beside anyOf": {**A, "anyOf": [{"required": ["a"]}, B]},
    "beside a reference": {**A, "$ref": "#/$defs/B", "$defs": {"B": B}},
    "beside patterns": {**A, "patternProperties": {"^x-": TEXT}},
    "beside values": {**A, "enum": [{"a": "x", "b": "y"}]},
    "also joined elsewhere": {
        "anyOf": [{"$ref": "#/$defs/A"}, {"allOf": [{"$ref": "#/$defs/A"}, B]}], "$defs": {"A": A}
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_objects_are_closed(name: str) -> None:
    schema, wanted = CLOSED[name]
    before = json.dumps(schema)
    assert enforceable(schema)[0] == wanted
    assert json.dumps(schema) == before, "the schema itself was changed"


@pytest.mark.parametrize("name", OPEN)
def test_what_must_stay_open(name: str) -> None:
    assert enforceable(OPEN[name]) == (OPEN[name], [])


def test_branches_that_exclude_each_other_stay_open_where_that_counts() -> None:
    schema = {"oneOf": [A, B]}
    assert enforceable(schema, strict=True) == (schema, [])


def test_a_condition_that_is_left_out_keeps_its_properties_possible() -> None:
    schema = {**A, "if": {"required": ["a"]}, "then": {"required": ["b"], "properties": {"b": TEXT}}}
    assert enforceable(schema) == (A, ["if", "then"])


@pytest.mark.parametrize("strict", [False, True])
def test_a_type_that_is_meant_is_said(strict: bool) -> None:
    whole = an(
        tags={"items": TEXT, "description": "words"}, pair={"prefixItems": [TEXT]},
        items={"properties": {"a": TEXT}}, any={},
        union={"items": TEXT, "type": ["array", "null"]}, null={"items": TEXT, "nullable": True},
        values={"enum": [["a"]], "items": TEXT}, joined={"allOf": [{"items": TEXT}, {"maxItems": 2}]},
        inverse={"minItems": 1},
    )  # fmt: skip
    kept = enforceable(whole, strict=strict)[0]["properties"]
    assert {name: each.get("type") for name, each in kept.items()} == {
        "tags": "array", "pair": "array", "items": "object", "any": None, "union": ["array", "null"],
        "null": None, "values": None, "joined": None, "inverse": None,
    }  # fmt: skip
    assert "type" not in kept["joined"]["allOf"][0]
    assert kept["items"] == shut(a=TEXT)
    assert enforceable({"properties": {"a": TEXT}})[0] == shut(a=TEXT)


def test_a_tool_without_parameters_takes_none() -> None:
    for given_ in ({"type": "object", "properties": {}}, {"properties": {}, "required": []}):
        assert enforceable(given_, arguments=True)[0] == {**given_, "additionalProperties": False}
    assert enforceable({"type": "object"}, arguments=True)[0] == {"type": "object"}


def objects_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas whose parts are made of `values`."""
    properties = st.dictionaries(st.sampled_from("ab"), values, max_size=2)
    named = st.fixed_dictionaries({"type": st.just("object"), "properties": properties})
    required = st.fixed_dictionaries({"required": st.lists(st.sampled_from("ab"), unique=True, max_size=2)})
    several = st.lists(values, min_size=1, max_size=2)
    union = st.sampled_from(["anyOf", "allOf"]).flatmap(lambda key: st.fixed_dictionaries({key: several}))
    joined = st.tuples(named, st.one_of(union, required)).map(lambda two: {**two[0], **two[1]})
    return st.one_of(named, union, joined)


LEAVES = st.sampled_from([{"type": "integer"}, {"type": "string"}, {}, {"$ref": "#/$defs/D"}])
PARTS = objects_of(st.one_of(LEAVES, objects_of(LEAVES)))
SMALL: list[Any] = [1, "x", None]  # None: the property is missing


def values() -> list[Any]:
    """Everything of two levels with the keys that the schemas name."""
    found: list[Any] = SMALL[:2]
    for _ in range(2):
        pairs = product([*found, None], repeat=2)
        objects = [{k: v for k, v in zip("ab", pair, strict=True) if v is not None} for pair in pairs]
        found = [*SMALL[:2], *objects, *({**each, "c": 1} for each in objects)]
    return found


VALUES = values()


@draws(150)
@given(PARTS, PARTS)
def test_a_closed_schema_takes_nothing_new_and_is_not_empty(schema: Any, definition: Any) -> None:
    whole = {**schema, "$defs": {"D": definition}}
    wide = Draft202012Validator(whole)
    narrow = Draft202012Validator(enforceable(whole, strict=True)[0])
    taken = [value for value in VALUES if narrow.is_valid(value)]
    assert all(map(wide.is_valid, taken))
    assert taken or not any(map(wide.is_valid, VALUES))
