"""Which images a command line means: files, folders, globs, PDFs and standard input, in a stable order.

A file is taken whatever its name, a video too; of an animation, `moves.gif#video` shows all. A folder gives
the pictures in it (no videos), told by their suffix, sorted by name, hidden ones left out; its own folders
only with --recursive. A pattern is expanded here when the shell didn't. An image that is named twice is done
once.
"""

import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer

from snugvl.cli import pdf
from snugvl.core.suffixes import PICTURES, VIDEOS
from snugvl.errors import InputError

STDIN: Final = "-"
AS_VIDEO: Final = "#video"
SUFFIXES: Final = PICTURES
VIDEO_SUFFIXES: Final = VIDEOS


def as_video(name: str) -> str | None:
    """The file of which a name says that all its frames are wanted; None where it says nothing."""
    file = name.removesuffix(AS_VIDEO)
    return file if file != name and not Path(name).exists() else None


def expand(arguments: Sequence[str], *, recursive: bool = False) -> list[str]:
    """The names of the images, in order. A file that doesn't exist stays: its own error comes later.

    Raises:
        InputError: a folder without pictures, a pattern that matches nothing.
    """
    names: list[str] = []
    for argument in arguments:
        path = Path(argument)
        if argument == STDIN:
            names.append(_stdin())
        elif pdf.is_pdf(argument) and not path.is_dir():
            names.extend(pdf.pages(argument))
        elif path.is_dir():
            names.extend(_in_folder(path, recursive))
        elif glob.has_magic(argument) and not path.exists():
            names.extend(_matching(argument))
        else:
            names.append(argument)
    return list(dict.fromkeys(names))


def _stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("- reads a picture from standard input, but nothing is piped into it")
    return STDIN


def _in_folder(folder: Path, recursive: bool) -> list[str]:
    pictures = _pictures(folder, recursive)
    if pictures:
        return pictures
    if not recursive and _pictures(folder, recursive=True):
        raise InputError(f"no pictures in {folder}, but in folders of it; add --recursive")
    raise InputError(
        f"no pictures in {folder}: none of its files ends in {', '.join(sorted(SUFFIXES))}; "
        "name a file to try it, whatever its name"
    )


def _pictures(folder: Path, recursive: bool) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*") if recursive else folder.iterdir()):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and not hidden and path.is_file():
            found.append(str(path))
    return found


def _matching(pattern: str) -> list[str]:
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    matches = sorted(match for match in found if Path(match).is_file())
    if not matches:
        raise InputError(f"no file matches {pattern}")
    return matches
