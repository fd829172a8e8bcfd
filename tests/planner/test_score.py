"""Scores compare by named fields, in one order."""

import ast
from pathlib import Path

from snugvl.planner.plan import Score, SpeedTier
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes
from tests.planner.machines import GIB, machine
from tests.planner.models import qwen3_vl

SOURCE = Path(__file__).parents[2] / "src" / "snugvl" / "planner"


def score() -> Score:
    choice = solve([Candidate(qwen3_vl("2B"), 7)], machine(24 * GIB), Wishes()).choice
    assert choice is not None
    assert choice.quality == choice.score.quality == 7
    assert choice.score.pace.rate == int(choice.speed.decode_tokens_per_s or 0) > 0
    return choice.score


def test_an_earlier_field_outweighs_all_later_ones() -> None:
    best = score()
    assert best.comfort < best.reach
    finer = best._replace(quality=best.quality + 1)
    for name in Score._fields[Score._fields.index("quality") + 1 :]:
        worse = () if isinstance(getattr(best, name), tuple) else -(1 << 62)
        finer = finer._replace(**{name: worse})  # type: ignore[arg-type]
    assert finer > best
    assert best._replace(led=True) > finer


def test_of_two_that_are_equal_in_all_else_the_faster_one_is_better() -> None:
    best = score()
    faster = best.pace._replace(rate=best.pace.rate + 1)
    assert best._replace(pace=faster) > best
    slower = SpeedTier(*faster)._replace(graphs=False)
    assert best._replace(pace=slower, offloaded=1) > best > best._replace(pace=slower)


def test_nobody_reads_a_score_by_places() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
                assert node.value.attr != "score", f"{path.name}, line {node.lineno}"
