"""`snugvl scene`."""

from snugvl.cli import batch, options, render, sources
from snugvl.cli.task import Task, each


@options.grouped()
def scene(
    images: options.Images,
    recursive: options.Recursive = False,
    *,
    choice: options.ModelChoice,
    generation: options.Generation,
    result: options.OutputChoice,
) -> None:
    """Analyse images: summary, setting, objects with counts and positions, text, relations."""
    sampling, pixels = generation.sampling(), choice.load.max_pixels
    task = Task(
        "scene",
        generation.chosen(),
        run=lambda model, _, images: model.scene(images[0], sampling=sampling, max_pixels=pixels),
        text=render.scene,
    )
    batch.do(task, each(sources.expand(images, recursive=recursive)), choice, result)
