"""Pages of PDFs where a picture may stand: all of a file, one by its number, and what is no page."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from snugvl.cli import pdf
from tests.cli.conftest import NOTE
from tests.command import Ran

pytest.importorskip("pypdfium2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three pages: wide, tall, square."""
    pages = [Image.new("RGB", size, "red") for size in ((400, 200), (100, 300), (50, 50))]
    path = tmp_path / "three.pdf"
    pages[0].save(path, save_all=True, append_images=pages[1:])
    return path


def test_every_page_is_a_picture(snugvl: Callable[..., Ran], file: Path) -> None:
    ran = snugvl("caption", file, "--json")
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert [record["image"] for record in found] == [f"{file}#page={number}" for number in (1, 2, 3)]
    texts = [record["result"]["text"] for record in found]
    assert texts == ["A picture of 2048x1024.", "A picture of 683x2048.", "A picture of 2048x2048."]


def test_one_page_by_its_number(snugvl: Callable[..., Ran], file: Path) -> None:
    assert snugvl("caption", f"{file}#page=2") == Ran(0, "A picture of 683x2048.\n", NOTE)
    ran = snugvl("ask", f"{file}#page=2", "What", "is", "it?")
    assert (ran.code, ran.out) == (0, "What is it? 683x2048!\n")


@pytest.mark.parametrize("page", [0, 4, 999_999])
def test_a_page_that_is_not_there(snugvl: Callable[..., Ran], file: Path, page: int) -> None:
    ran = snugvl("caption", f"{file}#page={page}")
    assert ran.code == 3
    assert f"three.pdf has 3 pages, and no page {page}" in ran.err


def test_what_is_no_pdf(snugvl: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "torn.pdf").write_bytes(b"%PDF-1.7\nnothing")
    ran = snugvl("caption", tmp_path / "torn.pdf")
    assert ran.code == 3
    assert "torn.pdf can't be opened: it is not a PDF, or a damaged one" in ran.err
    assert "no file" in snugvl("caption", tmp_path / "missing.pdf").err


def test_a_long_file_is_refused_before_anything_is_drawn(
    snugvl: Callable[..., Ran], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf, "MOST_PAGES", 2)
    ran = snugvl("caption", file)
    assert ran.code == 3
    assert "has 3 pages; up to 2 are taken at once" in ran.err


def test_without_the_library_the_extra_is_named(
    snugvl: Callable[..., Ran], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    ran = snugvl("caption", file)
    assert ran.code == 3
    assert "pip install 'snugvl[pdf]'" in ran.err
