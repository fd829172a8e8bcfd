"""The transcripts of a first hour say what the commands print today."""

import re

from tests.docs.first_hour import BLOCK, PAGE, ROOT, transcript, typed

BLOCKS = BLOCK.findall(PAGE.read_text("utf-8"))
POCKET, *CARD = BLOCKS


def test_it_prints_this_in_either_order() -> None:
    """All of the page in one folder, with one cache: as it stands, and its first command again at the end."""
    first, *_ = typed(POCKET)
    assert first.startswith("snugvl caption")
    again = POCKET[: POCKET.index("$ ", 1)]
    page = "".join((POCKET, *CARD, again))
    assert transcript(page) == page


def test_the_commands_of_the_readme_are_in_it() -> None:
    """Those of its first part, up to where people use their own pictures."""
    readme = (ROOT / "README.md").read_text("utf-8").partition("## Use it")[0]
    commands = re.findall(r"^snugvl (\w+)", readme, re.MULTILINE)
    shown = [command for block in BLOCKS for command in typed(block)]
    assert {"caption", "doctor", "plan", "pull"} <= set(commands)
    for name in ("caption", "doctor", "plan"):
        assert any(command.startswith(f"snugvl {name}") for command in shown)


def test_files_that_are_named_are_where_a_clone_has_them() -> None:
    named = re.findall(r"[\w./-]+\.(?:json|png|jpg|log)", "".join(BLOCKS))
    assert named
    assert not [name for name in named if not (ROOT / name).is_file()]
