"""An engine is a folder, an option is a row: what the planner knows of them is said there alone."""

import inspect
import json
from dataclasses import fields

import pytest

from benchmarks import house
from snugvl.cli.app import run
from snugvl.cli.serve import ChildOptions
from snugvl.cli.serve_plan import _missing, plan_for
from snugvl.core.options import ROWS, SPECIAL, LoadOptions, special, word
from snugvl.errors import RequestError
from snugvl.loading import load
from snugvl.planner.engines import for_others, having, lacking, refuse_lacking, rules_of
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
    assert all(having([name])[0].engine == PREFERRED for name in SPECIAL)


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
    assert special({"concurrency": 1}) == {}
    assert special({"concurrency": 2}) == {"concurrency": 2}
    assert lacking("vllm", given) == {"speculation": "mtp"}


def test_every_option_is_a_row_with_a_word_of_its_own() -> None:
    assert set(ROWS) == {each.name for each in fields(LoadOptions)} - {"model"}
    words = [word(name) for name in ROWS]
    assert len(set(words)) == len(words)
    assert all(row.help.endswith(".") or "then 429" in row.help for row in ROWS.values())


def test_who_can_not_do_an_option_is_named_and_who_can_follows_from_what_they_honour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the cache in FP8 three places said that our own engine alone had it."""
    asked = {"kv_cache": "fp8", "tower": "streamed"}
    assert for_others("native", asked) is None
    assert for_others("vllm", asked) == "--tower streamed is for snugvl's own engine alone"
    assert for_others("transformers", {"kv_cache": "fp8"}) == (
        "--kv-cache fp8 is for snugvl's own engine, vLLM and llama.cpp alone"
    )
    with pytest.raises(RequestError) as refused:
        refuse_lacking("transformers", {"kv_cache": "fp8"}, why="as it was")
    assert refused.value.field == "kv_cache"
    assert str(refused.value) == (
        "--kv-cache fp8 is not for transformers (as it was); say --backend native or vllm, or leave it out"
    )
    with pytest.raises(RequestError, match="are not for transformers; say --backend native, or leave them"):
        refuse_lacking("transformers", asked)
    monkeypatch.setattr(type(rules_of("vllm")), "honours", frozenset(("kv_cache", "tower")))
    assert for_others("vllm", asked) is None
    assert for_others("transformers", {"tower": "streamed"}) == (
        "--tower streamed is for snugvl's own engine and vLLM alone"
    )
    with pytest.raises(RequestError, match="native or vllm, or leave it out"):
        refuse_lacking("transformers", {"tower": "streamed"})
    with pytest.raises(RequestError, match="native, or leave it out"):
        refuse_lacking("transformers", {"tower": "streamed"}, in_process=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_who_has_a_cache_in_fp8_honours_the_wish(engine: Engine) -> None:
    rules = rules_of(engine)
    assert ("kv_cache" in rules.honours) == ("fp8" in rules.kv_formats)


def test_what_load_says_of_an_option_is_for_our_own_engine_alone_where_no_other_honours_it() -> None:
    lines = inspect.cleandoc(load.__doc__ or "").splitlines()
    said = " ".join(line.strip() if line.startswith("        ") else f"\n{line}" for line in lines)
    told = {line.split(":")[0].strip() for line in said.splitlines() if "our own engine alone" in line}
    alone = {name for name, row in ROWS.items() if row.special and len(having([name])) == 1}
    assert told == alone
