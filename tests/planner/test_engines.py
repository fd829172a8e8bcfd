"""An engine is a folder, an option is a row: what the planner knows of them is said there alone."""

import inspect
from dataclasses import fields

import pytest

from benchmarks import house
from snugvl import load
from snugvl.core.options import ROWS, LoadOptions, special, word
from snugvl.errors import RequestError
from snugvl.planner.engines import for_others, having, refuse_lacking, rules_of
from snugvl.planner.settings import ENGINES, PREFERRED, Engine
from snugvl.planner.wishes import Wishes

WISHED = {"memory": "memory_bytes"}  # options whose wish has another name


def test_nobody_outside_of_an_engines_folder_asks_for_its_name() -> None:
    """In the planner nobody; elsewhere no more than when this was counted. With fewer lower the number."""
    compared = house.House(house.ROOT).engine_comparisons()
    assert [where for where in compared if where.startswith("planner/")] == []
    assert len(compared) <= 26


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engines_rules_are_its_own(engine: Engine) -> None:
    rules = rules_of(engine)
    assert rules.engine == engine
    assert rules_of(engine) is rules
    assert rules.honours <= {name for name, row in ROWS.items() if row.special}


def test_ranks_differ_and_the_preferred_engine_has_the_highest() -> None:
    ranks = {engine: rules_of(engine).rank for engine in ENGINES}
    assert len(set(ranks.values())) == len(ENGINES)
    assert max(ENGINES, key=lambda engine: ranks[engine]) == PREFERRED


def test_every_special_option_is_honoured_by_our_own_engine() -> None:
    """Else no engine could be named to who asks for it."""
    assert {name for name, row in ROWS.items() if row.special} == rules_of(PREFERRED).honours


def test_only_what_differs_between_engines_is_special() -> None:
    given = {"kv_cache": "fp8", "tower": "resident", "speculation": "mtp", "weights": "int4", "context": 5}
    assert special(given) == {"kv_cache": "fp8", "speculation": "mtp"}


def test_what_plan_is_asked_for_is_a_wish() -> None:
    """A row that `snugvl plan` has and the planner doesn't know would be read and forgotten."""
    wishes = {each.name for each in fields(Wishes)}
    asked = {WISHED.get(name, name) for name, row in ROWS.items() if "plan" in row.commands}
    assert asked <= wishes


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
