"""One table says what each kind of memory is called and how it looks."""

import ast
from pathlib import Path

from snugvl.core.memory_kinds import Kind, bar

SOURCE = Path(__file__).parents[2] / "src" / "snugvl"
GROUPS = {kind.group for kind in Kind}


def test_groups_can_be_told_apart_and_are_no_members_of_others() -> None:
    assert all(group.within == "" and group.among != group.value for group in GROUPS)
    assert len({group.letter for group in GROUPS}) == len({group.colour for group in GROUPS}) == len(GROUPS)
    assert {kind.within for kind in Kind} <= {"", *GROUPS}


def test_a_bar_has_a_letter_or_a_colour_for_each_share() -> None:
    parts = ((Kind.TEXT, 5), (Kind.CACHE, 3), (Kind.SPARE, 2))
    assert "".join(text for text, _ in bar(parts, 10, colour=False)) == "WWWWWKKK.."
    assert bar(parts, 10, colour=True)[1] == ("███", "green")
    assert bar((), 10, colour=False) == []


def test_a_kind_of_a_newer_server_is_something_else() -> None:
    assert Kind("a kind of next year") is Kind.OTHER
    assert Kind("KV cache") is Kind.CACHE


def test_nobody_but_the_table_spells_a_kind_that_is_counted() -> None:
    """What is counted by kind is called by kind; other modules' own parts may have any name."""
    counted = {Kind.CACHE, Kind.STATES, Kind.TEXT, Kind.VISION, Kind.CONTEXT, Kind.KERNELS, Kind.PROCESS}
    spelled = {
        f"{path.relative_to(SOURCE)}: {node.value}"
        for path in SOURCE.rglob("*.py")
        if path.name != "memory_kinds.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in counted
    }
    assert not spelled
