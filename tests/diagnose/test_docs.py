"""docs/diagnose.md lists every cause and field: `python -m tests.diagnose.test_docs` writes the table."""

import dataclasses
from pathlib import Path
from typing import get_args

from snugvl.diagnose.result import Cause, Change, Confidence, Diagnosis, Kind, MemoryPart, RunBudget, known
from snugvl.diagnose.scan import PATTERNS

PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"
BEGIN, END = "<!-- causes -->\n", "<!-- /causes -->"


def written(page: str) -> str:
    """The page with the table of today's causes."""
    head, _, rest = page.partition(BEGIN)
    rows = "| kind | what it means |\n|---|---|\n" + "".join(
        f"| `{kind}` | {title} |\n" for kind, title in known()["titles"].items()
    )
    return head + BEGIN + rows + END + rest.partition(END)[2]


def test_the_page_lists_the_causes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page)


def test_the_tables_speak_of_causes_and_lines_that_there_are() -> None:
    tables, kinds, lines = known(), set(get_args(Kind)), {pattern.key for pattern in PATTERNS}
    assert tables["titles"].keys() == kinds
    for name in ("notes", "settings", "pytorch", "llamacpp", "ollama"):
        assert tables[name].keys() <= kinds, name
    assert tables["notes_by_line"].keys() <= lines
    for keys, kind, confidence, _ in tables["causes"]:
        assert set(keys) <= lines
        assert kind in kinds
        assert confidence in get_args(Confidence)


def test_the_page_names_every_field() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for kind in (Diagnosis, Cause, RunBudget, MemoryPart, Change):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
