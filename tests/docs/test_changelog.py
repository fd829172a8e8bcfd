"""CHANGELOG.md: what a user notices, a line each, under dated versions, the newest of which this is."""

import datetime
import re
from pathlib import Path

from snugvl.version import __version__

LINES = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
KINDS = ["Added", "Changed", "Fixed", "Removed"]
MOST_LETTERS = 140


def sections() -> dict[str, list[str]]:
    """The lines below each heading of a version, by what the heading says."""
    found: dict[str, list[str]] = {}
    for line in LINES:
        if line.startswith("## "):
            found[line.removeprefix("## ")] = []
        elif found and line:
            found[next(reversed(found))].append(line)
    return found


def test_the_newest_release_is_this_version_with_its_date() -> None:
    unreleased, newest, *_ = sections()
    assert unreleased == "Unreleased"
    version, _, day = newest.partition(" - ")
    assert version == __version__
    assert datetime.date.fromisoformat(day) >= datetime.date(2026, 11, 27)


def test_an_entry_is_one_line_of_one_kind() -> None:
    for title, lines in sections().items():
        kinds = [line.removeprefix("### ") for line in lines if line.startswith("#")]
        assert kinds == [kind for kind in KINDS if kind in kinds], title
        for line in lines:
            assert re.match(r"### |- .*\.$", line), f"{title}: {line}"
            assert len(line) <= MOST_LETTERS, f"{title}: {line}"
