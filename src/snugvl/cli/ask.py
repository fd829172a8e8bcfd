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
            metavar="IMAGE... QUESTION",
            help="Files, folders, quoted globs or - for standard input; then the question.",
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
    batch.do(
        task,
        [Job(tuple(names), together=True)] if together else each(names),
        choice,
        result,
    )


def split(arguments: Sequence[str], question: str | None) -> tuple[list[str], str]:
    """The images and the question, which is the last argument unless --question gave it.

    Raises:
        typer.BadParameter: one of the two is missing.
    """
    images = list(arguments)
    if question is None:
        question = images.pop()
        if question == sources.STDIN or Path(question).exists():
            raise typer.BadParameter(
                f"the question is missing: {question} is an image; put the question last, in quotes"
            )
        if not images:
            raise typer.BadParameter(f"which image? Give it before the question {question!r}")
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    return images, question.strip()
