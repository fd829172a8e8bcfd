"""Lines for a terminal: broken between words, never within one, and nothing left out.

One rule for all that the command line prints. A pipe or a file has no width and gets every line whole. A word
that is wider than the terminal stays whole too, as a path or an address that is copied must.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final, TextIO
from unicodedata import east_asian_width

if TYPE_CHECKING:
    from rich.text import Text

NARROWEST: Final = 40  # columns; a terminal that says it has fewer is taken to have these
_PIECES: Final = re.compile(r"\n|[^\S\n]+|(?:■ )?\S+")  # the sign of a colour stays with its name


def columns(stream: TextIO | None) -> int | None:
    """Width of the terminal that `stream` writes to, in cells; None where it is not a terminal."""
    import os
    import shutil

    if stream is None or not stream.isatty():
        return None
    told = os.environ.get("COLUMNS", "")
    try:
        width = int(told) if told.isdecimal() and int(told) else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a terminal in name only
        width = shutil.get_terminal_size().columns
    return max(width or 80, NARROWEST)


class Wrap:
    """Puts words on lines as they come: what `feed` returns is printed at once, `end` at the end.

    Args:
        width: cells of a line; None leaves lines as they are.
        hang: cells by which every line that is made here is indented.
        column: cells that stand on the first line already.
    """

    def __init__(self, width: int | None, hang: int = 0, column: int = 0) -> None:
        self._width = width
        self._hang = hang
        self._column = column
        self._gap = ""  # blanks behind the last word: they vanish where a line ends
        self._word = ""  # letters of a word that may go on

    def feed(self, text: str) -> str:
        """Take `text` and return what can be printed now; an unfinished last word is kept back."""
        if self._width is None:
            return text
        return "".join(map(self._put, _PIECES.findall(text)))

    def end(self) -> str:
        """Return the word that was kept back."""
        return self._put_word()

    def _put(self, piece: str) -> str:
        if piece == "\n":
            done = self._put_word() + piece
            self._column, self._gap = 0, ""
            return done
        if piece.isspace():
            done = self._put_word()
            self._gap += piece
            return done
        done = ""
        for letters in [piece] if piece.isascii() else piece:  # others end a line between any two letters
            if self._word and (_wide(self._word[-1]) or _wide(letters[0])):
                done += self._put_word()
            self._word += letters
        return done

    def _put_word(self) -> str:
        if not self._word:
            return ""
        assert self._width is not None
        word, gap, self._word, self._gap = self._word, self._gap.expandtabs(), "", ""
        length = cells(word)
        if self._column + len(gap) + length > self._width and self._column > self._hang:
            self._column = self._hang + length
            return f"\n{' ' * self._hang}{word}"
        self._column += len(gap) + length
        return gap + word


def wrapped(text: str, width: int | None, hang: int = 0, column: int = 0) -> str:
    """`text` on lines of `width` cells; all but the first indented by `hang`. `column`: see `Wrap`."""
    wrap = Wrap(width, hang, column)
    return wrap.feed(text) + wrap.end()


def styled(text: Text, width: int | None, hang: int = 0) -> Text:
    """A text in colours as `wrapped` puts it on lines."""
    lines, at = [], 0
    for line in wrapped(text.plain, width, hang).split("\n"):
        words = line.strip()
        at = text.plain.index(words, at)
        lead = text.blank_copy(line[: len(line) - len(line.lstrip())])
        lines.append(lead + text[at : at + len(words)] if words else lead)
        at += len(words)
    return text.blank_copy("\n").join(lines)


def wrapped_command(command: str, width: int | None, indent: int = 0) -> str:
    """A command for a POSIX shell on several lines, each but the last ending in a backslash. A word that is
    wider than the terminal stays whole."""
    lead = " " * indent
    if width is None or indent + len(command) <= width:
        return f"{lead}{command}"
    lines = [lead]
    for word in shlex.split(command, posix=False):
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
        if len(longer) + 2 > width and lines[-1].strip():
            lines.append(f"{lead}  {word}")
        else:
            lines[-1] = longer
    return " \\\n".join(lines)


def cells(text: str) -> int:
    """Number of columns of a terminal that `text` takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _wide(letter: str) -> bool:
    """Whether it is of a script that is written without blanks, whose lines end between any two letters."""
    return not letter.isascii() and east_asian_width(letter) in "WF"
