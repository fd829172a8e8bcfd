"""The transcripts of a first hour say what the commands print today."""

import re

import pytest

from tests.docs.first_hour import BLOCK, PAGE, ROOT, transcript, typed

BLOCKS = BLOCK.findall(PAGE.read_text("utf-8"))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: typed(block)[0])
def test_it_prints_this(block: str) -> None:
    assert transcript(block) == block


@pytest.mark.parametrize("order", ["pocket first", "card first"])
def test_the_order_changes_nothing(order: str) -> None:
    """All of the page in one folder, with one cache: as it stands, or with pocket at the end."""
    pocket, *card = BLOCKS
    assert typed(pocket)[0].startswith("snugvl caption")
    blocks = [pocket, *card] if order == "pocket first" else [*card, pocket]
    assert transcript("".join(blocks)) == "".join(blocks)


def test_the_commands_of_the_readme_are_in_it() -> None:
    """Those of its first part, up to where people use their own pictures."""
    readme = (ROOT / "README.md").read_text("utf-8").partition("## Use it")[0]
    commands = re.findall(r"^snugvl (\w+)", readme, re.MULTILINE)
    shown = [command for block in BLOCKS for command in typed(block)]
    assert {"caption", "doctor", "plan", "pull"} <= set(commands)
    for name in ("caption", "doctor", "plan"):
        assert any(command.startswith(f"snugvl {name}") for command in shown)
