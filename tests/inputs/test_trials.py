"""Grammars are tried in a process that ends, whatever they ask for."""

import json
import threading
from pathlib import Path

import psutil
import pytest
from llguidance import LLMatcher

from snugvl.core.messages import Grammar
from snugvl.errors import EngineError, RequestError
from snugvl.inputs.constraints import MAX_LITERAL, MAX_MULTIPLE, check_choices, grammar_text
from snugvl.inputs.trials import Trials


def text(schema: object) -> str:
    """Past all checks of ours."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def nothing() -> None:
    pass


@pytest.mark.slow
def test_a_grammar_that_takes_minutes_is_ended_and_others_are_tried() -> None:
    trials = Trials(1)
    verdict = trials.check(text({"type": "integer", "multipleOf": 99_999_999}), nothing)
    assert "more than 2 s of processor time, or more than 64 MiB of memory" in verdict.error
    assert trials.check(text({"type": "integer"}), nothing).error == ""
    assert "Invalid type" in trials.check(text({"type": "nonsense"}), nothing).error
    trials.close()


class _LeftError(Exception):
    pass


def test_a_trial_ends_with_whoever_waits_for_it() -> None:
    trials, looks = Trials(1), []

    def go_on() -> None:
        looks.append(1)
        if len(looks) > 2:
            raise _LeftError

    with pytest.raises(_LeftError):
        trials.check(text({"type": "integer", "multipleOf": 99_999_999}), go_on)
    assert not [each for each in psutil.Process().children() if each.pid in _pids(trials)]
    assert trials.check(text({"type": "integer"}), nothing).error == "", "its turn is free again"
    trials.close()


def test_who_waits_for_a_turn_may_leave_too() -> None:
    trials, left = Trials(1), threading.Event()
    trials._turns.acquire()

    def go_on() -> None:
        left.set()
        raise _LeftError

    with pytest.raises(_LeftError):
        trials.check(text({"type": "integer"}), go_on)
    assert left.is_set()
    trials._turns.release()
    assert trials.check(text({"type": "integer"}), nothing).error == ""


def test_closing_leaves_no_process() -> None:
    trials = Trials()
    trials.check(text({"type": "integer"}), nothing)
    pids = _pids(trials)
    assert pids
    trials.close()
    trials.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with pytest.raises(EngineError, match="closed"):
        trials.check(text({"type": "integer"}), nothing)  # of a thread that prepares a request meanwhile
    assert not trials._all


def test_a_process_that_was_killed_is_replaced() -> None:
    trials = Trials(1)
    trials.check(text({"type": "integer"}), nothing)
    (process,) = trials._all
    process._popen.kill()
    process._popen.wait()
    assert trials.check(text({"type": "integer"}), nothing).error == ""
    trials.close()


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"type": "integer", "multipleOf": 99_999_999}, "multipleOf 99,999,999"),
        ({"type": "integer", "multipleOf": 10_007}, f"at most {MAX_MULTIPLE:,}"),
        ({"type": "number", "multipleOf": 1.2345678}, "product"),
        ({"anyOf": [{"multipleOf": m} for m in (997, 991)]}, "997 and 991"),
        ({"$defs": {"a": {"multipleOf": 101}}, "allOf": [{"$ref": "#/$defs/a"}] * 2}, "101 and 101"),
        ({"const": "x" * (MAX_LITERAL + 1)}, "literal of 8,193 characters"),
        ({"enum": ["a", {"b": "x" * MAX_LITERAL}]}, "literal"),
        ({"properties": {"x" * (MAX_LITERAL + 1): {}}}, "literal"),
    ],
)
def test_what_would_take_long_is_refused_by_name(schema: object, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        grammar_text(Grammar("json_schema", json.dumps(schema)), "f")


def test_what_real_schemas_ask_is_fine() -> None:
    schema = {
        "type": "object",
        "properties": {
            "price": {"type": "number", "multipleOf": 0.01},
            "dozens": {"type": "integer", "multipleOf": 12},
            "grams": {"type": "integer", "multipleOf": 1000},
            "size": {"anyOf": [{"type": "integer", "multipleOf": 50}, {"type": "null"}]},
        },
    }
    trials = Trials(1)
    assert trials.check(grammar_text(Grammar("json_schema", json.dumps(schema)), "f"), nothing).error == ""
    trials.close()


def test_a_number_that_is_too_large_is_the_senders_mistake() -> None:
    source = '{"type": "integer", "minimum": 1' + "0" * 4000 + "}"
    with pytest.raises(RequestError, match="can't be used"):
        grammar_text(Grammar("json_schema", source), "response_format")


def test_many_choices_of_a_long_literal_are_refused() -> None:
    grammar = Grammar("json_schema", json.dumps({"const": "x" * 4000}))
    check_choices(grammar, 1, "n")
    check_choices(grammar, 32, "n")
    with pytest.raises(RequestError, match="33 choices that follow a literal of 4,000 characters"):
        check_choices(grammar, 33, "n")


def numbers(count: int, digits: int = 2) -> object:
    """An array of numbers, each with bounds of its own; a thousand of them are a grammar of 20 MiB."""
    scale = 10.0**digits
    bounds = [{"minimum": -scale * 1.23 * (i + 1), "maximum": scale * 1.12 * (i + 1)} for i in range(count)]
    return {"type": "array", "prefixItems": [{"type": "number", **each} for each in bounds], "items": False}


def test_what_a_grammar_takes_is_measured_whatever_was_tried_before() -> None:
    trials = Trials(1)
    found = [trials.check(text(numbers(count)), nothing).bytes for count in (1000, 999, 998)]
    small = trials.check(text({"type": "integer"}), nothing).bytes
    trials.close()
    assert min(found) > 8 << 20
    assert small < 2 << 20


def test_a_grammar_that_takes_too_much_memory_is_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "small_trial.py").write_text(
        "import sys, signal\n"
        "from snugvl.inputs import trial, trials\n"
        "make = trial.LLTokenizer(trial.TokenizerWrapper(trial._Bytes()))\n"
        "trials.bound()\n"
        "trials.serve(lambda question: trial.attempt(make, question), 4 << 20)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trials = Trials(1, worker="small_trial")
    assert trials.check(text({"type": "integer"}), nothing).error == ""
    assert "more than 64 MiB of memory" in trials.check(text(numbers(1000)), nothing).error
    assert trials.check(text({"type": "integer"}), nothing).error == ""
    trials.close()


def _pids(trials: Trials) -> list[int]:
    return [process._popen.pid for process in trials._all]
