"""An engine is a folder, an option is a row: what the planner knows of them is said there alone."""

from dataclasses import fields

import pytest

from benchmarks import house
from snugvl.core.options import ROWS, LoadOptions, special, word
from snugvl.planner.engines import rules_of
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
