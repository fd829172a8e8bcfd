"""`snugvl ask`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from snugvl.cli import batch, options, render, sources
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
    generation: options.GenerationOptions,
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
    """The images and the question, unless --question gave it: all words from the first on that is no picture;
    or before the first that is one, where the question came first.

    Raises:
        typer.BadParameter: one of the two is missing.
    """
    images = list(arguments)
    if question is None:
        images = sources.words_last(images)
        last = images[-1]
        shown = [sources.pictured(word) for word in images]
        count = shown.index(False) if False in shown else len(images)
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
