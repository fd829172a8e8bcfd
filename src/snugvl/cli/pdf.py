"""Pages of a PDF as pictures: `report.pdf` names all of them, `report.pdf#page=2` one.

pypdfium2 reads and draws them (the extra `snugvl[pdf]`). The number of pages, and the size at which one is
drawn, are bounded before anything is drawn.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from snugvl.errors import ImageError, InputError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PAGES: Final = 500  # of one file; more are named one by one
LONGER_SIDE: Final = 2048  # pixels of a drawn page: text of 8 points has letters 20 pixels high
_PAGE: Final = re.compile(r"(?P<file>.+\.pdf)#page=(?P<number>\d{1,6})", re.IGNORECASE)


def is_pdf(name: str) -> bool:
    """Whether a name is that of a PDF, or of one of its pages."""
    return name.lower().endswith(".pdf") or _PAGE.fullmatch(name) is not None


def pages(name: str) -> list[str]:
    """The names of all pages of a file; the name of a page is itself.

    Raises:
        InputError: no such file, no PDF, a password, more than `MOST_PAGES`, or pypdfium2 is not installed.
    """
    if _PAGE.fullmatch(name):
        return [name]
    with _opened(name) as document:
        count = len(document)
    if count > MOST_PAGES:
        raise InputError(
            f"{name} has {count:,} pages; up to {MOST_PAGES} are taken at once: name some, as {name}#page=1"
        )
    return [f"{name}#page={number}" for number in range(1, count + 1)]


def draw(name: str) -> Image | None:
    """The page that `name` names, its longer side `LONGER_SIDE` pixels; None where it names no page.

    Raises:
        ImageError: the page doesn't exist, or can't be drawn.
        InputError: as `pages`.
    """
    found = _PAGE.fullmatch(name)
    if found is None:
        return None
    number = int(found["number"])
    with _opened(found["file"]) as document:
        if not 1 <= number <= len(document):
            raise ImageError(f"{found['file']} has {len(document):,} pages, and no page {number}")
        try:
            page = document[number - 1]
            scale = LONGER_SIDE / max(*page.get_size(), 1.0)
            picture: Image = page.render(scale=scale).to_pil().convert("RGB")
        except (RuntimeError, ValueError, MemoryError) as error:
            raise ImageError(f"page {number} of {found['file']} can't be drawn: {error}") from None
    return picture


def _opened(name: str) -> Any:
    try:
        import pypdfium2  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise InputError(
            f"{name} is a PDF, and its pages are drawn by pypdfium2, which is not installed: "
            "pip install 'snugvl[pdf]'"
        ) from None
    if not Path(name).is_file():
        raise InputError(f"no file {name}")
    try:
        return pypdfium2.PdfDocument(name)
    except pypdfium2.PdfiumError as error:
        why = "it asks for a password" if "assword" in str(error) else "it is not a PDF, or a damaged one"
        raise InputError(f"{name} can't be opened: {why}") from None
