"""docs/ladder.md says what the planner says."""

import pytest

from snugvl.planner.recommend import catalogue_candidates
from snugvl.planner.solve import solve
from snugvl.planner.wishes import Wishes
from tests.docs import ladder

STALE = "stale: run python -m tests.docs.ladder"


def test_the_rows_of_some_cards_are_not_stale() -> None:
    """Of each system and size a few: what fits best, the command for it, and each model on one card."""
    page, candidates = ladder.PAGE.read_text(encoding="utf-8"), catalogue_candidates()
    some = ladder.machines()[1:12:5]
    assert {machine.os for _, machine in some} == {"linux", "wsl2"}
    plans = [(size, machine, solve(candidates, machine, Wishes())) for size, machine in some]
    for line in ladder.best_table(plans):
        assert f"{line}\n" in page, STALE
    for line in ladder.commands(plans):
        command, _, cards = line.partition("#")
        (said,) = (row.split("#")[1] for row in page.splitlines() if row.startswith(command))
        assert set(cards.strip().split(", ")) <= set(said.strip().split(", ")), STALE
    table = page.partition("## Each model\n")[2]
    for each, cells in ladder.rows(candidates, [machine for _, machine in ladder.machines()[2:3]]):
        (row,) = (line for line in table.splitlines() if line.startswith(f"| {each} | "))
        assert row.split(" | ")[2] == cells[0], STALE


@pytest.mark.extended
def test_the_ladder_is_not_stale() -> None:
    assert ladder.PAGE.read_text(encoding="utf-8") == ladder.page(), STALE
