"""An engine is a folder, an option is a row: what the planner knows of them is said there alone."""

import json
from dataclasses import fields

import pytest

from benchmarks import house
from snugvl.cli.app import run
from snugvl.cli.serve_options import ChildOptions
from snugvl.cli.serve_plan import _missing, plan_for
from snugvl.core.options import ROWS, SPECIAL, LoadOptions, special, word
from snugvl.errors import RequestError
from snugvl.loading import load
from snugvl.planner.engines import beyond, engines_with, owners, rules_of
from snugvl.planner.settings import ENGINES, PREFERRED, Engine


def test_nobody_outside_of_an_engines_folder_asks_for_its_name() -> None:
    """In the planner nobody; elsewhere no more than when this was counted. With fewer lower the number."""
    compared = house.House(house.ROOT).engine_comparisons()
    assert [where for where in compared if where.startswith("planner/")] == []
    assert len(compared) <= 25


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engines_rules_are_its_own(engine: Engine) -> None:
    rules = rules_of(engine)
    assert rules.engine == engine
    assert rules_of(engine) is rules
    assert rules.honours <= SPECIAL


def test_ranks_differ_and_the_preferred_engine_has_the_highest() -> None:
    ranks = {engine: rules_of(engine).rank for engine in ENGINES}
    assert len(set(ranks.values())) == len(ENGINES)
    assert max(ENGINES, key=lambda engine: ranks[engine]) == PREFERRED


def test_every_special_option_is_honoured_by_our_own_engine() -> None:
    """Else no engine could be named to who asks for it."""
    assert rules_of(PREFERRED).honours == SPECIAL
    assert all(engines_with([name])[0] == PREFERRED for name in SPECIAL)
    assert owners(["tower"]) == "our own engine"
    assert owners(["kv_cache"]) == "native and vllm and llamacpp"


def test_an_engine_that_only_plans_has_its_own_command_printed_and_is_never_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but its folder says so."""
    monkeypatch.setattr(type(rules_of("transformers")), "starts", False)
    monkeypatch.setattr(type(rules_of("transformers")), "in_process", False)
    monkeypatch.setattr(type(rules_of("transformers")), "command", lambda *_: "theirs --model x")
    assert run(["plan", "pocket", "--backend", "transformers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "theirs --model x"
    with pytest.raises(RequestError, match="This machine's plan for it: theirs --model x"):
        plan_for(LoadOptions("pocket", backend="transformers"), ChildOptions())
    with pytest.raises(RequestError, match="backend 'transformers' is planned for, and not started"):
        load("pocket", backend="transformers")
    missing = _missing(LoadOptions("pocket"), ChildOptions())
    assert missing["transformers"] == "snugvl doesn't start it"


def test_only_what_differs_between_engines_is_special() -> None:
    given = {"kv_cache": "fp8", "tower": "resident", "speculation": "mtp", "weights": "int4", "context": 5}
    assert special(given) == {"kv_cache": "fp8", "speculation": "mtp"}
    assert special({"step_graphs": False}) == {"step_graphs": False}
    assert beyond("vllm", given) == {"speculation": "mtp"}


def test_every_option_is_a_row_with_a_word_of_its_own() -> None:
    assert set(ROWS) == {each.name for each in fields(LoadOptions)} - {"model"}
    words = [word(name) for name in ROWS]
    assert len(set(words)) == len(words)
    assert all(row.help.endswith(".") or "then 429" in row.help for row in ROWS.values())
