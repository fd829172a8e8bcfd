"""The README: short, its commands are what the plan says, and its links survive elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from snugvl.cli.app import run
from snugvl.cli.session import NOTE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 900


def block(marker: str) -> str:
    """The code below `<!-- marker -->`."""
    found = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```\n", README, re.DOTALL)
    assert found is not None, marker
    return found[1]


def test_it_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_the_first_caption_is_what_pocket_says() -> None:
    """What docs/first_hour.md begins with, whose test types it; the note above goes to standard error."""
    page = (ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8")
    assert f"```console\n$ {block('run')}snugvl: {NOTE}\n{block('prints')}$ " in page


def test_the_next_commands_are_the_plans_own(capsys: pytest.CaptureFixture[str]) -> None:
    described = re.search(r"^snugvl (plan --gpu .*)$", README, re.MULTILINE)
    assert described is not None
    assert run([*described[1].split(), "--offline"]) == 0
    printed = capsys.readouterr().out
    following = re.search(r"^Next\n(.*?)\n\n", printed, re.DOTALL | re.MULTILINE)
    assert following is not None
    commands = [line.strip() for line in following[1].splitlines() if line.strip().startswith("snugvl ")]
    assert commands == block("next").splitlines()


def test_links_go_somewhere_from_any_page() -> None:
    """On PyPI a link into the repository is an absolute one, a picture a raw file."""
    command = [sys.executable, "-m", "hatch_fancy_pypi_readme"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://github.com/snugvl/snugvl/"), target
        kind, _, path = (
            target.partition("#")[0].removeprefix("https://github.com/snugvl/snugvl/").partition("/main/")
        )
        assert kind == ("raw" if path.endswith(".png") else "blob" if (ROOT / path).is_file() else "tree")
        assert (ROOT / path).exists(), target
