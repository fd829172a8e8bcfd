"""Pages of PDFs where a picture may stand: all of a file, one by its number, and what is no page."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from snugvl.errors import ImageError
from snugvl.inputs import pdf
from tests.cli.conftest import NOTE
from tests.command import Ran
from tests.patience import PATIENCE_S

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


def test_of_several_a_pdf_that_cannot_be_opened_is_named_and_the_others_are_done(
    snugvl: Callable[..., Ran], file: Path, tmp_path: Path
) -> None:
    """As the shell writes the names of a pattern out."""
    torn = tmp_path / "torn.pdf"
    torn.write_bytes(b"%PDF-1.7\nnothing")
    ran = snugvl("caption", torn, f"{file}#page=2")
    assert ran.code == 7
    assert "torn.pdf can't be opened: it is not a PDF, or a damaged one" in ran.err
    assert "1 of 2 images failed" in ran.err
    assert "A picture of 683x2048." in ran.out


def test_a_long_file_is_refused_before_anything_is_drawn(
    snugvl: Callable[..., Ran], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf, "MOST_PAGES", 2)
    ran = snugvl("caption", file)
    assert ran.code == 3
    assert "has 3 pages; up to 2 are taken at once" in ran.err


def test_python_takes_a_page_by_its_name_and_of_a_file_its_only_page(file: Path, tmp_path: Path) -> None:
    from snugvl.inputs.given import look, still

    seen = still(f"{file}#page=2")
    assert seen.name == f"{file}#page=2"
    assert max(seen.image.size) == pdf.LONGER_SIDE
    with pytest.raises(ImageError, match=r"three\.pdf has 3 pages, and a picture is one: .*#page=1"):
        look(file)
    Image.new("RGB", (60, 40), "red").save(tmp_path / "one.pdf")
    assert still(tmp_path / "one.pdf").image.getpixel((30, 20))[0] > 200  # type: ignore[index]
    (tmp_path / "odd.pdf#page=1").mkdir()
    with pytest.raises(ImageError, match="is a folder"):
        still(tmp_path / "odd.pdf#page=1")


def test_without_the_library_the_extra_is_named(
    snugvl: Callable[..., Ran], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    ran = snugvl("caption", file)
    assert ran.code == 3
    assert "pip install 'snugvl[pdf]'" in ran.err


def forty(path: Path) -> list[str]:
    """A file of forty pages, each of a colour of its own; the names of its pages."""
    pages = [Image.new("RGB", (60, 40), (6 * n, 255 - 6 * n, 40)) for n in range(40)]
    pages[0].save(path, save_all=True, append_images=pages[1:])
    return pdf.pages(str(path))


def test_eight_threads_draw_every_page_every_time(tmp_path: Path) -> None:
    """Forty times, in a process of its own, which what PDFium does to one thread's pages may end."""
    names = forty(tmp_path / "forty.pdf")
    code = f"""
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from snugvl.errors import ImageError
from snugvl.inputs import pdf
pdf.LONGER_SIDE = 60
names = pdf.pages({str(tmp_path / "forty.pdf")!r})
with ThreadPoolExecutor(8) as pool:
    for _ in range(40):
        for number, picture in enumerate(pool.map(pdf.page, names)):
            colour = picture.image.getpixel((30, 20))
            wanted = (6 * number, 255 - 6 * number, 40)
            if max(abs(a - b) for a, b in zip(colour, wanted)) > 6:
                sys.exit(f"page {{number + 1}} is {{colour}}, not {{wanted}}")
print(len(names))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout) == (0, f"{len(names)}\n"), ran.stderr


@pytest.mark.extended
def test_the_command_captions_forty_pages(snugvl: Callable[..., Ran], tmp_path: Path) -> None:
    names = forty(tmp_path / "forty.pdf")
    for _ in range(3):
        ran = snugvl("caption", tmp_path / "forty.pdf", "--json")
        assert ran.code == 0, ran.err
        assert [json.loads(line)["image"] for line in ran.out.splitlines()] == names
        assert all(json.loads(line).get("error") is None for line in ran.out.splitlines())


def test_what_pdfium_gave_is_closed_before_another_thread_may_call_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finalizers call PDFium, too, and run wherever the last reference goes."""
    import pypdfium2
    from pypdfium2._helpers.bitmap import PdfBitmap
    from pypdfium2._helpers.page import PdfPage

    left: list[object] = []
    for kind in (pypdfium2.PdfDocument, PdfPage, PdfBitmap):
        made = kind.__init__

        def record(self: Any, *args: Any, _made: Any = made, **options: Any) -> None:
            left.append(self)
            _made(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", record)
    assert pdf.page(f"{file}#page=2") is not None
    assert len(left) == 3
    assert all(item.raw is None for item in left)  # type: ignore[attr-defined]
    assert not pdf._PDFIUM.locked()


def test_a_folder_and_a_pattern_give_the_pages_of_their_pdfs(
    snugvl: Callable[..., Ran], file: Path, tmp_path: Path
) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    pages = [f"{file}#page={number}" for number in (1, 2, 3)]
    for named, wanted in ((tmp_path, [str(tmp_path / "a.png"), *pages]), (f"{tmp_path}/*.pdf", pages)):
        ran = snugvl("caption", named, "--json")
        assert [json.loads(line)["image"] for line in ran.out.splitlines()] == wanted, ran.err


def test_a_pdf_of_a_folder_that_cannot_be_opened_is_named_and_the_others_are_done(
    snugvl: Callable[..., Ran], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn.pdf").write_bytes(b"%PDF-1.7\nnothing")
    ran = snugvl("caption", tmp_path)
    assert (ran.code, ran.out.count("A picture of")) == (7, 3)
    assert "torn.pdf can't be opened: it is not a PDF, or a damaged one" in ran.err
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    ran = snugvl("caption", tmp_path)
    assert (ran.code, ran.out.count("A picture of")) == (7, 1)
    assert f"{file} is a PDF, and its pages are drawn by pypdfium2, which is not installed" in ran.err


@pytest.mark.parametrize("said", ["page=x", "page=", "2", "page=1-2", "p2", ""])
def test_a_page_without_a_number(snugvl: Callable[..., Ran], file: Path, said: str) -> None:
    ran = snugvl("caption", f"{file}#{said}")
    assert ran.code == 3
    assert f"{file}#{said} names no page by its number; write it like {file}#page=1" in ran.err


def test_a_name_with_the_letters_of_a_pattern_is_that_file(snugvl: Callable[..., Ran], file: Path) -> None:
    odd = file.rename(file.with_name("three[1].pdf"))
    assert snugvl("caption", f"{odd}#page=2") == Ran(0, "A picture of 683x2048.\n", NOTE)
    assert snugvl("caption", odd).out.count("A picture of") == 3
