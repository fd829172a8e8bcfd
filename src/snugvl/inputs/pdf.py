"""Pages of a PDF as pictures: `report.pdf` names all of them, `report.pdf#page=2` one.

pypdfium2 reads and draws them (the extra `snugvl[pdf]`). The number of pages, and the size at which one is
drawn, are bounded before anything is drawn.

PDFium keeps global state and may be called from one thread at a time, for different documents too: in two
threads at once it draws nothing, reports damage that isn't there, or crashes. `_PDFIUM` is held around every
call, those that free its objects included: `_opened` closes them before the lock is given back, and leaves
nothing to the garbage collector, which frees in whichever thread it happens to run.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from snugvl.errors import ImageError, InputError

if TYPE_CHECKING:
    from PIL.Image import Image

    from snugvl.core.messages import Picture

_PDFIUM: Final = threading.Lock()
MOST_PAGES: Final = 500  # of one file; more are named one by one
LONGER_SIDE: Final = 2048  # pixels of a drawn page: text of 8 points has letters 20 pixels high
SUFFIX: Final = ".pdf"
_PAGE: Final = re.compile(r"(?P<file>.+\.pdf)#(?:page=(?P<number>\d{1,6})|[\w=,-]*)", re.IGNORECASE)


def is_pdf(name: str) -> bool:
    """Whether a name is that of a PDF, or of one of its pages, or written much like one."""
    return name.lower().endswith(SUFFIX) or _PAGE.fullmatch(name) is not None


def pages(name: str) -> list[str]:
    """The names of all pages of a file; the name of a page is itself.

    Raises:
        InputError: no such file, no PDF, a password, more than `MOST_PAGES`, or pypdfium2 is not installed.
    """
    if _PAGE.fullmatch(name):
        return [name]
    with _opened(name) as (document, _):
        count = len(document)
    if count > MOST_PAGES:
        raise InputError(
            f"{name} has {count:,} pages; up to {MOST_PAGES} are taken at once: name some, as {name}#page=1"
        )
    return [f"{name}#page={number}" for number in range(1, count + 1)]


def page(name: str) -> Picture | None:
    """The page that `name` names, its longer side `LONGER_SIDE` pixels; None where it names no PDF.

    A file of one page stands for it.

    Raises:
        ImageError: the page doesn't exist, or can't be drawn; a file of several pages.
        InputError: as `pages`.
    """
    if not is_pdf(name) or Path(name).is_dir():
        return None
    from snugvl.core.messages import Picture  # with Pillow, which names of files need not

    found = _PAGE.fullmatch(name)
    if found and found["number"] is None:
        raise ImageError(f"{name} names no page by its number; write it like {found['file']}#page=1")
    drawn = _drawn(found["file"], int(found["number"])) if found else _drawn(name)
    return Picture(drawn, name=name)


def _drawn(name: str, number: int | None = None) -> Image:
    """One page of a file, RGB; without a number its only one."""
    with _opened(name) as (document, held):
        if number is None:
            if len(document) > 1:
                raise ImageError(
                    f"{name} has {len(document):,} pages, and a picture is one: name it, as {name}#page=1"
                )
            number = 1
        if not 1 <= number <= len(document):
            raise ImageError(f"{name} has {len(document):,} pages, and no page {number}")
        try:
            sheet = document[number - 1]
            held.callback(sheet.close)
            bitmap = sheet.render(scale=LONGER_SIDE / max(*sheet.get_size(), 1.0))
            held.callback(bitmap.close)
            picture: Image = bitmap.to_pil().convert("RGB")
        except (RuntimeError, ValueError, MemoryError) as error:
            raise ImageError(f"page {number} of {name} can't be drawn: {error}") from None
    return picture


@contextmanager
def _opened(name: str) -> Iterator[tuple[Any, ExitStack]]:
    """The document, and where to put what else has to be closed before another thread may call PDFium."""
    try:
        import pypdfium2  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise InputError(
            f"{name} is a PDF, and its pages are drawn by pypdfium2, which is not installed: "
            "pip install 'snugvl[pdf]'"
        ) from None
    if not Path(name).is_file():
        raise InputError(f"no file {name}")
    with _PDFIUM, ExitStack() as held:
        try:
            document = pypdfium2.PdfDocument(name)
        except pypdfium2.PdfiumError as error:
            why = "it asks for a password" if "assword" in str(error) else "it is not a PDF, or a damaged one"
            raise InputError(f"{name} can't be opened: {why}") from None
        held.callback(document.close)
        yield document, held
