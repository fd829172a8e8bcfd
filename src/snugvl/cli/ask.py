"""`snugvl ask`."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from snugvl.cli import batch, options, pdf, render, sources
from snugvl.cli.task import Job, Task, each


@options.grouped()
def ask(
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... QUESTION...",
            help="Files (videos and PDFs too), folders, quoted globs or -; then the question.",
        ),
    ],
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="The question; then every argument is an image.")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Show all images in one question instead of asking of each.")
    ] = False,
    recursive: options.Recursive = False,
    *,
    choice: options.ModelChoice,
    generation: options.Generation,
    result: options.OutputChoice,
) -> None:
    """Ask a question about images: of each, or of all of them together."""
    arguments, asked = split(images, question)
    names = sources.expand(arguments, recursive=recursive)
    sampling, pixels = generation.sampling(), choice.load.max_pixels
    task = Task(
        "ask",
        {"question": asked, **generation.chosen()},
        run=lambda model, _, images: model.ask(images, asked, sampling=sampling, max_pixels=pixels),
        text=render.words,
        stream=lambda model, images: model.stream_ask(images, asked, sampling=sampling, max_pixels=pixels),
    )
    batch.do(task, [Job(tuple(names), together=True)] if together else each(names), choice, result)


def split(arguments: Sequence[str], question: str | None) -> tuple[list[str], str]:
    """The images and the question: all words from the first on that is no picture, unless --question gave it.

    Raises:
        typer.BadParameter: one of the two is missing.
    """
    images = list(arguments)
    if question is None:
        *_, last = images
        count = next((n for n, word in enumerate(images) if not _pictured(word)), len(images))
        if count == len(images) and (len(images) < 2 or Path(last).exists() or last == sources.STDIN):
            raise typer.BadParameter(f"the question is missing: {last} is an image; put the question last")
        if len(images) < 2:
            raise typer.BadParameter(f"which image? Give it before the question {last!r}")
        count = min(max(count, 1), len(images) - 1)  # the first is meant as a picture, even where it is none
        question = " ".join(images[count:])
        del images[count:]
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    return images, question.strip()


def _pictured(word: str) -> bool:
    """Whether a word names pictures: it is there, it ends as they do, or it is an address or a pattern."""
    if word == sources.STDIN or word.startswith(("http://", "https://", "data:image/")):
        return True
    if (pdf.is_pdf(word) or sources.as_video(word)) and " " not in word:
        return True
    path = Path(word)
    try:
        there = path.exists()
    except (OSError, ValueError):  # a question longer than a name may be
        return False
    named = path.suffix.lower() in (sources.SUFFIXES | sources.VIDEO_SUFFIXES) and " " not in word
    return there or named or (glob.has_magic(word) and bool(glob.glob(word)))  # noqa: PTH207
