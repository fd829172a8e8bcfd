"""Reasoning is told from the answer, however the text is cut into pieces."""

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from snugvl.core.messages import Grammar, Message, Picture, Request, Text, Tool, ToolUse, user
from snugvl.inputs.reasoning import ReasoningSplitter, ThinkingDefault, opened, thinks

# Text, whether the template opened the reasoning, whether tools may be called → reasoning, answer.
CASES = {
    "opened and ended": ("\nRound. Red.\n</think>\n\nA circle.\n", True, False, "Round. Red.", "A circle.\n"),
    "cut": ("Round and\n\nred </thin", True, False, "Round and\n\nred </thin", ""),
    "opened by the model": ("<think>\nhm\n</think>\n\nYes", False, False, "hm", "Yes"),
    "nothing thought": ("\n\n</think>\n\nYes", True, False, "", "Yes"),
    "no reasoning": (" \nYes <think>no</think>", False, False, "", " \nYes <think>no</think>"),
    "no answer": ("hm</think>", True, False, "hm", ""),
    "half an opening": ("<thin", False, False, "", "<thin"),
    "a call ends it": ('hm\n<tool_call>\n{"name"', True, True, "hm", '<tool_call>\n{"name"'),
    "no tools, no call": ("hm <tool_call> hm</think>x", True, False, "hm <tool_call> hm", "x"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 1000])
def test_split_in_any_pieces(name: str, size: int) -> None:
    text, begun, calls, reasoning, answer = CASES[name]
    splitter = ReasoningSplitter(begun, call="<tool_call>" if calls else None)
    pieces = [splitter.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(splitter.flush())
    assert "".join(thought for thought, _ in pieces) == reasoning
    assert "".join(said for _, said in pieces) == answer


def test_what_is_certain_is_not_held_back() -> None:
    splitter = ReasoningSplitter(True)
    assert splitter.push("Round") == ("Round", "")
    assert splitter.push(" and <") == (" and", "")
    assert splitter.push("b></think>It") == (" <b>", "It")
    assert splitter.push(" is") == ("", " is")


def test_templates_that_think() -> None:
    assert thinks("{{ '</think>' }}")
    assert not thinks("{{ messages }}")
    assert opened("<|im_start|>assistant\n<think>\n")
    assert not opened("<|im_start|>assistant\n<think>\n\n</think>\n\n")


TEXT = Request((user("hi"),))
SEES = Request((Message("user", (Picture(Image.new("RGB", (8, 8))), Text("What is it?"))), user("And?")))
FORMED = Request((user("hi"),), grammar=Grammar("regex", "a"))


@pytest.mark.parametrize(
    ("said", "pictures", "text", "seen", "formed"),
    [
        ("auto", None, None, None, False),
        ("auto", False, None, False, False),
        ("on", False, True, True, False),
        ("off", None, False, False, False),
    ],
)
def test_who_decides_whether_it_thinks(
    said: Any, pictures: bool | None, text: bool | None, seen: bool | None, formed: bool | None
) -> None:
    """The request itself; else its form, what the model was loaded with, and what its family is known for."""
    thinking = ThinkingDefault(said, pictures)
    for request, expected in ((TEXT, text), (SEES, seen), (FORMED, formed)):
        assert thinking.template(request) == ({} if expected is None else {"enable_thinking": expected})
        for own in (True, False):
            told = {"enable_thinking": own, "other": 1}
            assert thinking.template(replace(request, template=told)) == told
    assert thinking.template(replace(FORMED, template={"other": 1})) == {"other": 1, "enable_thinking": False}


@pytest.mark.parametrize(
    ("effort", "wanted"), [("none", False), ("minimal", False), ("low", True), ("max", True)]
)
def test_an_effort_is_a_wish_to_think_or_not(effort: str, wanted: bool) -> None:
    """Beyond what the model was loaded with; a form still leaves no room, and the exact word goes first."""
    told = {"reasoning_effort": effort}
    for said in ("auto", "on", "off"):
        thinking = ThinkingDefault(said, pictures=False)
        for request, expected in ((TEXT, wanted), (SEES, wanted), (FORMED, False)):
            found = thinking.template(replace(request, template=told))
            assert found == {**told, "enable_thinking": expected}
        exact = {**told, "enable_thinking": not wanted}
        assert thinking.template(replace(TEXT, template=exact)) == exact


def test_a_tool_that_must_be_called_leaves_no_room_to_think() -> None:
    use = ToolUse((Tool("f", ""),))
    for choice, expected in (("auto", {}), ("required", {"enable_thinking": False})):
        assert ThinkingDefault().template(replace(TEXT, tools=replace(use, choice=choice))) == expected
