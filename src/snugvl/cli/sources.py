"""The images that a command line means: files, folders, globs, PDFs and standard input, in a stable order.

A file is taken whatever its name, also a video; `moves.gif#video` means all frames of an animation. A folder
gives the pictures in it and the pages of its PDFs (no videos), told by their suffix, sorted by name, hidden
ones left out; its own folders only with --recursive. A pattern is expanded here when the shell didn't. An
image that is named twice is done once.
"""

import glob
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import typer

from snugvl.errors import InputError
from snugvl.inputs import pdf
from snugvl.inputs.looks_like import PICTURES, URL_SCHEMES, VIDEOS

STDIN: Final = "-"
AS_VIDEO: Final = "#video"
SUFFIXES: Final = PICTURES
VIDEO_SUFFIXES: Final = VIDEOS
IN_FOLDERS: Final = PICTURES | {pdf.SUFFIX}


def as_video(name: str) -> str | None:
    """The file of a name that ends in `#video`, whose frames are all wanted; None for other names."""
    file = name.removesuffix(AS_VIDEO)
    return file if file != name and not Path(name).exists() else None


def expand(arguments: Sequence[str], *, recursive: bool = False) -> list[str]:
    """The names of the images, in order. A file that doesn't exist stays: its own error comes later.

    Raises:
        InputError: a folder without pictures, a pattern that matches nothing, an empty name.
    """
    names: list[str] = []
    for argument in arguments:
        if not argument:
            raise InputError("the name of the picture is empty; give a path")
        path = Path(argument)
        if argument == STDIN:
            names.append(_stdin())
        elif argument.startswith(URL_SCHEMES) or not _short(path):
            names.append(argument)
        elif path.is_dir():
            names.extend(_sheets(_in_folder(path, recursive)))
        elif glob.has_magic(argument) and not (path.exists() or Path(argument.partition("#")[0]).exists()):
            names.extend(_sheets(_matching(argument)))
        elif pdf.is_pdf(argument):
            names.extend(pdf.pages(argument) if len(arguments) == 1 else _sheets([argument]))
        else:
            names.append(argument)
    return list(dict.fromkeys(names))


def _short(path: Path) -> bool:
    """Whether the system takes a name of this length; of one that it doesn't it tells nothing."""
    try:
        path.exists()
    except OSError:
        return False
    return True


def _sheets(files: Sequence[str]) -> Iterator[str]:
    """The names, with a PDF replaced by its pages; one that can't be opened stays: its own error comes later,
    and the others are done."""
    for name in files:
        try:
            yield from pdf.pages(name) if pdf.is_pdf(name) else [name]
        except InputError:
            yield name


def pictured(word: str) -> bool:
    """Whether a word names pictures: a file that exists, a picture's suffix, an address or a pattern."""
    if not word:  # `Path` takes it for the folder that this is
        return False
    if word == STDIN or word.startswith(("http://", "https://", "data:image/")):
        return True
    if (pdf.is_pdf(word) or as_video(word)) and " " not in word:
        return True
    path = Path(word)
    try:
        there = path.exists()
    except (OSError, ValueError):  # a question longer than a name may be
        return False
    named = path.suffix.lower() in (SUFFIXES | VIDEO_SUFFIXES) and " " not in word
    return there or named or (glob.has_magic(word) and bool(glob.glob(word)))  # noqa: PTH207


def words_last(arguments: Sequence[str]) -> list[str]:
    """The arguments with words before the first picture moved behind the last one. Where words stand between
    or behind the pictures, all stay as they are."""
    shown = [pictured(word) for word in arguments]
    if True in shown and not shown[0] and all(shown[shown.index(True) :]):
        first = shown.index(True)
        return [*arguments[first:], *arguments[:first]]
    return list(arguments)


def words_beside(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(pictures, words before or after them that name no file and don't look like one)."""
    given, arguments = list(arguments), words_last(arguments)
    count = next((n for n, word in enumerate(arguments) if not pictured(word)), len(arguments))
    behind = arguments[count:]
    if not count or any(pictured(word) or Path(word).suffix or "/" in word for word in behind):
        return given, []
    return arguments[:count], behind


def pictures_alone(arguments: Sequence[str], command: str) -> list[str]:
    """The arguments of a command that takes pictures and no words.

    Raises:
        typer.BadParameter: words are beside the pictures; says which command takes them.
    """
    pictures, words = words_beside(arguments)
    if words:
        text = " ".join(words)
        raise typer.BadParameter(
            f"{text!r} is not a file, and {command} takes no text; to ask a question: "
            f"{shlex.join(['snugvl', 'ask', *pictures, text])}"
        )
    return pictures


def objects(values: Sequence[str]) -> list[str]:
    """Names of objects, of which one value may hold several, between commas."""
    return [name for value in values for name in (value.split(",") if value.strip(" ,") else [value])]


def _stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("- reads a picture from standard input, but nothing is piped into it")
    return STDIN


def _in_folder(folder: Path, recursive: bool) -> list[str]:
    pictures = sorted(_pictures(folder, recursive))
    if pictures:
        return list(map(str, pictures))
    if not recursive and any(_pictures(folder, recursive=True)):
        raise InputError(f"no pictures in {folder}, but in folders of it; add --recursive")
    if not any(folder.iterdir()):
        raise InputError(f"no pictures in {folder}: it is empty")
    raise InputError(
        f"no pictures in {folder}: none of its files ends in {', '.join(sorted(IN_FOLDERS))}; "
        "name a file to try it, whatever its name"
    )


def _pictures(folder: Path, recursive: bool) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):  # which passes over folders that are gone meanwhile
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if path.suffix.lower() in IN_FOLDERS and path.is_file():
                yield path


def _matching(pattern: str) -> list[str]:
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    matches = sorted(match for match in found if Path(match).is_file())
    if not matches:
        raise InputError(f"no file matches {pattern}")
    return matches
