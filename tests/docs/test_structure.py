"""docs/structure.md is true: every path it names exists, and it names every room."""

import re
from pathlib import Path

from tests.docs.generated import FOLDER, pages

ROOT = FOLDER.parent
SOURCE = ROOT / "src" / "snugvl"


def named(page: str) -> set[str]:
    """Paths in backquotes: `folder/`, `folder/file.py`, `file.py`."""
    return set(re.findall(r"`((?:[\w.-]+/)*[\w-]+(?:\.py|/))`", page))


def rooms() -> set[str]:
    """Folders of the package that hold code, and modules at its top, relative to it."""
    folders = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py")} - {Path()}
    files = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py", "version.py"}
    return {f"{folder}/" for folder in folders} | files


def test_every_path_exists() -> None:
    paths = named((FOLDER / "structure.md").read_text(encoding="utf-8"))
    assert len(paths) > 80
    missing = [path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()]
    assert not missing


def test_the_drawing_comes_first_fits_a_screen_and_names_what_is_there() -> None:
    page = (FOLDER / "structure.md").read_text(encoding="utf-8")
    drawing = page.split("```")[1]
    assert page.startswith("# Structure\n\n```\n"), "the page doesn't begin with its drawing"
    assert len(drawing.splitlines()) <= 40
    assert max(map(len, drawing.splitlines())) <= 100
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    there = {f"/{file}" for file in files} | {f"/{file.parent}/" for file in files}
    named = re.findall(r"(?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py", drawing)
    assert len(named) > 30
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []


def test_every_room_is_named() -> None:
    _, _, table = (FOLDER / "structure.md").read_text(encoding="utf-8").partition("## Rooms")
    assert rooms() - named(table) == set()


def test_links_lead_somewhere() -> None:
    for page in (*pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith(("https://", "http://")):
                continue
            target, _, anchor = link.partition("#")
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {link}"
            if anchor:
                assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page.name}: {link}"


def anchors(text: str) -> set[str]:
    """Headings as links call them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
