"""Reasoning is told from the answer, however the text is cut into pieces."""

import pytest

from snugvl.inputs.reasoning import ReasoningSplitter, opened, thinks

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
