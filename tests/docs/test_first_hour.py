"""The transcripts of a first hour say what the commands print today."""

import re

import pytest

from tests.docs.first_hour import BLOCK, PAGE, ROOT, transcript, typed

BLOCKS = BLOCK.findall(PAGE.read_text("utf-8"))
POCKET, *CARD = BLOCKS


@pytest.mark.parametrize("block", CARD, ids=lambda block: typed(block)[0])
def test_it_prints_this(block: str) -> None:
    assert transcript(block) == block


def test_the_order_changes_nothing() -> None:
    """All of the page in one folder, with one cache: as it stands, and pocket again at the end."""
    assert typed(POCKET)[0].startswith("snugvl caption")
    page = "".join((POCKET, *CARD, POCKET))
    assert transcript(page) == page


def test_the_commands_of_the_readme_are_in_it() -> None:
    """Those of its first part, up to where people use their own pictures."""
    readme = (ROOT / "README.md").read_text("utf-8").partition("## Use it")[0]
    commands = re.findall(r"^snugvl (\w+)", readme, re.MULTILINE)
    shown = [command for block in BLOCKS for command in typed(block)]
    assert {"caption", "doctor", "plan", "pull"} <= set(commands)
    for name in ("caption", "doctor", "plan"):
        assert any(command.startswith(f"snugvl {name}") for command in shown)
