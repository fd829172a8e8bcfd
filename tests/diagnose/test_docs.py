"""docs/diagnose.md lists every cause and field: `python -m tests.diagnose.test_docs` writes the table."""

import dataclasses
from pathlib import Path

from snugvl.diagnose.result import TITLES, Cause, Change, Diagnosis, MemoryPart, RunBudget

PAGE = Path(__file__).parents[2] / "docs" / "diagnose.md"
BEGIN, END = "<!-- causes -->\n", "<!-- /causes -->"


def written(page: str) -> str:
    """The page with the table of today's causes."""
    head, _, rest = page.partition(BEGIN)
    rows = "| kind | what it means |\n|---|---|\n" + "".join(
        f"| `{kind}` | {title} |\n" for kind, title in TITLES.items()
    )
    return head + BEGIN + rows + END + rest.partition(END)[2]


def test_the_page_lists_the_causes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page)


def test_the_page_names_every_field() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for kind in (Diagnosis, Cause, RunBudget, MemoryPart, Change):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
