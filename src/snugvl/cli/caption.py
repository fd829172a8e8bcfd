"""`snugvl caption` and `snugvl scene`."""

from typing import Annotated, Literal

import typer

from snugvl.cli import batch, options, render, sources
from snugvl.cli.task import Task, each


@options.grouped()
def caption(
    images: options.Images,
    detail: Annotated[
        Literal["short", "detailed"], typer.Option("--detail", help="One sentence, or all there is to say.")
    ] = "short",
    recursive: options.Recursive = False,
    *,
    choice: options.ModelChoice,
    generation: options.GenerationOptions,
    result: options.OutputChoice,
) -> None:
    """Describe images."""
    named, sampling = sources.pictures_alone(images, "caption"), generation.sampling()
    task = Task(
        "caption",
        {"detail": detail, **generation.chosen()},
        run=lambda model, _, images: model.caption(
            images[0], detail=detail, sampling=sampling, max_pixels=choice.load.max_pixels
        ),
        text=render.words,
        stream=lambda model, images: model.stream_caption(
            images[0], detail=detail, sampling=sampling, max_pixels=choice.load.max_pixels
        ),
    )
    batch.do(task, each(sources.expand(named, recursive=recursive)), choice, result)


@options.grouped()
def scene(
    images: options.Images,
    recursive: options.Recursive = False,
    *,
    choice: options.ModelChoice,
    generation: options.GenerationOptions,
    result: options.OutputChoice,
) -> None:
    """Analyse images: summary, setting, objects with counts and positions, text, relations."""
    named, sampling, pixels = (
        sources.pictures_alone(images, "scene"),
        generation.sampling(),
        choice.load.max_pixels,
    )
    task = Task(
        "scene",
        generation.chosen(),
        run=lambda model, _, images: model.scene(images[0], sampling=sampling, max_pixels=pixels),
        text=render.scene,
    )
    batch.do(task, each(sources.expand(named, recursive=recursive)), choice, result)
