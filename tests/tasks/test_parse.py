"""JSON out of model text: every dress seen from models, and any text at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.errors import OutputError
from snugvl.tasks.parse import answer_text, find_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
CONTAINERS = st.lists(VALUES, max_size=4) | st.dictionaries(st.text(), VALUES, max_size=4)
JSON_LIKE = st.text(alphabet="[]{}\"':,\\u0123e.-+ \nTrueNoneabc`json", max_size=200)


def only(text: str) -> tuple[object, bool]:
    (found,) = find_json(text)
    return found.value, found.complete


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('[{"a": 1}]', [{"a": 1}]),
        ('```json\n[{"a": 1}]\n```', [{"a": 1}]),
        ('```\n{"a": 1}\n```', {"a": 1}),
        ('Here you are:\n```json\n{"a": 1}\n```\nAnything else?', {"a": 1}),
        ('See [below]: {"a": 1}', {"a": 1}),
        ('Not [1] but\n```json\n{"a": 1}\n```\nsee [2]', {"a": 1}),
        ('Sure! {"a": [1, 2.5, -3e2]} Done.', {"a": [1, 2.5, -300.0]}),
        ("{'a': 'it''s', 'b': None, 'c': True}", {"a": "it''s", "b": None, "c": True}),
        ("{'a': 'the cat's tail'}", {"a": "the cat's tail"}),
        ('{"a": "she said "hi" twice"}', {"a": 'she said "hi" twice'}),
        ("{a: 1, b_2: [1,],}", {"a": 1, "b_2": [1]}),
        ("[1 2\n3]", [1, 2, 3]),
        (r'["\u00e9\ud83d\ude00\n\"\\\/"]', ['é😀\n"\\/']),
        (r'["\ud83d"]', ["\ufffd"]),
        ("[]", []),
        ('```json[{"a": 1}]```', [{"a": 1}]),
    ],
)
def test_dressed_json_is_read(text: str, value: object) -> None:
    assert only(text) == (value, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('[{"b": [1, 2]}, {"b": [3, 4', [{"b": [1, 2]}]),
        ('[{"b": [1, 2]}, {"b"', [{"b": [1, 2]}]),
        ('```json\n[{"b": 1}, ', [{"b": 1}]),
        ('{"s": "whole", "t": "cut he', {"s": "whole"}),
        ('{"s": "x", "o": [{"n": 1}, {"n": ', {"s": "x", "o": [{"n": 1}]}),
        ("[1, 2, 45", [1, 2]),
        ("[true, fal", [True]),
        ('[{"a": 1}, oops, {"b": 2}]', [{"a": 1}]),
    ],
)
def test_what_was_complete_of_a_cut_answer_is_kept(text: str, value: object) -> None:
    found = find_json(text)[0]
    assert (found.value, found.complete) == (value, False)


@pytest.mark.parametrize("text", ["", "no json", "[see above]", "{", "[[[", "{]", '["', "{'", "[" * 10_000])
def test_text_without_json_gives_nothing(text: str) -> None:
    assert [found for found in find_json(text) if found.value] == []


def test_several_objects_without_a_list_are_all_found() -> None:
    assert [found.value for found in find_json('{"a": 1}\n{"a": 2},\n{"a": 3}')] == [
        {"a": n} for n in (1, 2, 3)
    ]


def test_hostile_text_takes_no_time() -> None:
    for text in ('["' * 20_000, '{"a":' * 20_000, "[1," * 20_000, "[" + "1," * 100_000, "[x" * 50_000):
        find_json(text)
    assert find_json("[" + "9" * 5000 + "]")[0].value


@given(CONTAINERS)
def test_all_json_is_read_as_json_reads_it(value: object) -> None:
    text = json.dumps(value)
    assert only(text) == (json.loads(text), True)


@given(CONTAINERS, st.data())
def test_a_cut_never_invents_anything(value: object, data: st.DataObject) -> None:
    """A prefix of JSON gives at most what the whole gives, and says that it is cut."""
    text = json.dumps(value)
    for found in find_json(text[: data.draw(st.integers(0, len(text) - 1))])[:1]:
        assert found.complete or within(found.value, json.loads(text))


def within(part: object, whole: object) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and within(item, whole[key]) for key, item in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(within(a, b) for a, b in zip(part, whole, strict=False))
    return part == whole


@given(st.text() | JSON_LIKE)
def test_nothing_crashes_it(text: str) -> None:
    for found in find_json(text):
        json.dumps(found.value).encode()


def test_a_thinking_model_is_heard_after_its_thoughts() -> None:
    assert answer_text("<think>hm [1]</think>\n\nThree. ") == "Three."
    assert answer_text("hm</think>Three.") == "Three."
    with pytest.raises(OutputError, match="still thinking"):
        answer_text("<think>hm and hm")
    with pytest.raises(OutputError, match="empty"):
        answer_text(" \n")
