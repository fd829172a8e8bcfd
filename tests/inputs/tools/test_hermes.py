"""Hermes' calls out of a model's text: whole or broken, in any cut, never half a marker."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.messages import Tool, ToolUse
from snugvl.inputs.tools.hermes import HermesParser
from snugvl.inputs.tools.parser import CallArguments, CallStarted, TextPiece
from tests.draws import draws
from tests.inputs.tools import reading

USE = ToolUse((Tool("get_weather"), Tool("add-2"), Tool("now")))


def read(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    return reading.read(HermesParser(USE), *pieces)


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


NASTY = {"s": 'a "quoted" } ] </tool_call> <tool_call> \\', "n": [1, {"x": [{}, []]}], "ü": None}
ANSWERS = {
    "text": ("Just text, 1 < 2 <tool> </tool_call", ("Just text, 1 < 2 <tool> </tool_call", [])),
    "one": (call("now", {}), ("", [("now", "{}")])),
    "text and one": ("Wait.\n\n" + call("add-2", {"a": 1}), ("Wait.", [("add-2", '{"a": 1}')])),
    "parallel": (
        call("now", {}) + "\n" + call("get_weather", {"city": "Rome"}) + "\n",
        ("", [("now", "{}"), ("get_weather", '{"city": "Rome"}')]),
    ),
    "text around": (
        "a " + call("now", {}) + " b\n" + call("now", {}) + "\nc\n",
        ("a b\nc", [("now", "{}"), ("now", "{}")]),
    ),
    "nasty": (call("add-2", NASTY), ("", [("add-2", json.dumps(NASTY))])),
    "compact": ('<tool_call>{"name":"now","arguments":{}}</tool_call>', ("", [("now", "{}")])),
    "space": ("  \n ", ("  \n ", [])),
    "half a marker at the end": ("so <tool_ca", ("so <tool_ca", [])),
    "no such tool": ("x " + call("rm", {"a": 1}), ("x " + call("rm", {"a": 1}), [])),
    "other order": (
        '<tool_call>{"arguments": {"a": "é"}, "name": "now"}</tool_call>',
        ("", [("now", '{"a": "é"}')]),
    ),
    "arguments as text": (
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>!',
        ("!", [("now", '{"a": 1}')]),
    ),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")])),
    "parameters": ('<tool_call>{"name": "now", "parameters": {}}</tool_call>', ("", [("now", "{}")])),
    "not an object": ("<tool_call>[1, 2]</tool_call>", ("<tool_call>[1, 2]</tool_call>", [])),
    "not JSON": ("a <tool_call>what?</tool_call> b", ("a <tool_call>what?</tool_call> b", [])),
    "arguments that are a list": (
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
    ),
    "brackets missing": (
        '<tool_call>{"name": "now", "arguments": {"a": [1, 2</tool_call> ok',
        (" ok", [("now", '{"a": [1, 2]}')]),
    ),
    "end marker missing": (
        '<tool_call>{"name": "now", "arguments": {}}\n' + call("now", {"b": 1}),
        ("", [("now", "{}"), ("now", '{"b": 1}')]),
    ),
    "end marker missing at the end": ('<tool_call>{"name": "now", "arguments": {}} ', ("", [("now", "{}")])),
    "text instead of the end marker": (
        '<tool_call>{"name": "now", "arguments": {}} Done.',
        ("Done.", [("now", "{}")]),
    ),
    "keys after the arguments": (
        '<tool_call>{"name": "now", "arguments": {}, "id": 7}</tool_call>.',
        (".", [("now", "{}")]),
    ),
    "cut in the marker": ('<tool_call>{"name": "now", "arguments": {}}\n</tool', ("", [("now", "{}")])),
    "cut in the arguments": (
        '<tool_call>{"name": "now", "arguments": {"a": "b',
        ("", [("now", '{"a": "b')]),
    ),
    "cut in the head": ('<tool_call>{"name": "no', ('<tool_call>{"name": "no', [])),
    "whole but for the marker": ('<tool_call>{"name": "now"}', ("", [("now", "{}")])),
    "deep": ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_text_and_calls(name: str) -> None:
    answer, wanted = ANSWERS[name]
    assert read(answer) == (wanted or (answer, []))


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "deep"])
def test_in_any_cut_the_same(name: str) -> None:
    answer, wanted = ANSWERS[name]
    assert read(*answer) == wanted, "character by character"
    for cut in range(1, len(answer)):
        assert read(answer[:cut], answer[cut:]) == wanted


def test_no_part_of_a_marker_is_ever_shown() -> None:
    parser = HermesParser(USE)
    shown = [parser.push(character) for character in "a <tool_call>"]
    assert [event for events in shown for event in events] == [TextPiece("a")]
    assert parser.push("\n") == []


def test_text_and_arguments_are_not_held_back() -> None:
    parser = HermesParser(USE)
    assert parser.push("Let me") == [TextPiece("Let me")]
    assert parser.push(' see. <tool_call>{"name": "now", "arguments": ')[:1] == [TextPiece(" see.")]
    started, first = parser.push('{"a": "x')
    assert isinstance(started, CallStarted)
    assert first == CallArguments(0, '{"a": "x')
    assert parser.push("yz") == [CallArguments(0, "yz")]


def test_endless_space_costs_no_quadratic_time() -> None:
    parser = HermesParser(USE)
    parser.push("<tool_call>")
    for _ in range(50_000):
        assert parser.push("  ") == []
    assert parser.flush()[0] == TextPiece("<tool_call>")


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', '{"name": "rm", "arguments": {'),
        *("<tool", "{", "}", "[", "]", '"', "\\", "<", "x", " ", '"a": ', "1", ",", "\n", "é"),
    ]
)  # fmt: skip


@draws(300)
@given(pieces=st.lists(PIECES, max_size=30))
def test_nothing_raises_and_cuts_change_nothing(pieces: list[str]) -> None:
    answer = "".join(pieces)
    assert read(*answer) == read(answer) == read(*pieces)
