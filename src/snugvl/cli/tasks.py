"""`snugvl caption`, `scene`, `ask` and `detect`.

The targets of `--draw` and `--output` are decided, and checked, before any work.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from snugvl.cli import batch, options, records, sources
from snugvl.cli.records import Gathered, Job, Opener, Outcome, Task, each
from snugvl.cli.terminal import say, several, write
from snugvl.core.folders import write_named
from snugvl.errors import InputError

if TYPE_CHECKING:
    from snugvl.client import Client
    from snugvl.core.sampling import SamplingParams
    from snugvl.inputs.given import ImageSource
    from snugvl.model import Model
    from snugvl.tasks.results import Detections


@options.grouped()
def caption(
    images: options.Images,
    detail: Annotated[
        Literal["short", "detailed"], Option(help="One sentence, or all there is to say.")
    ] = "short",
    recursive: options.Recursive = False,
    *,
    choice: options.ModelChoice,
    generation: options.GenerationOptions,
    result: options.OutputChoice,
) -> None:
    """Describe images."""
    named = sources.pictures_alone(images, "caption")
    said: dict[str, Any] = {"sampling": generation.sampling(), "max_pixels": choice.load.max_pixels}
    task = Task(
        "caption",
        {"detail": detail, **generation.chosen()},
        run=lambda model, _, images: model.caption(images[0], detail=detail, **said),
        text=records.words,
        stream=lambda model, images: model.stream_caption(images[0], detail=detail, **said),
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
    named, sampling = sources.pictures_alone(images, "scene"), generation.sampling()
    pixels = choice.load.max_pixels
    task = Task(
        "scene",
        generation.chosen(),
        run=lambda model, _, images: model.scene(images[0], sampling=sampling, max_pixels=pixels),
        text=records.scene,
    )
    batch.do(task, each(sources.expand(named, recursive=recursive)), choice, result)


@options.grouped()
def ask(
    images: Annotated[
        list[str],
        Argument(
            metavar="IMAGE... QUESTION...",
            help="Files (videos and PDFs too), folders, quoted globs or -; then the question.",
        ),
    ],
    question: Annotated[
        str | None, Option("--question", "-q", help="The question; then every argument is an image.")
    ] = None,
    together: Annotated[
        bool, Option("--together", help="Show all images in one question instead of asking of each.")
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
        text=records.words,
        stream=lambda model, images: model.stream_ask(images, asked, sampling=sampling, max_pixels=pixels),
    )
    batch.do(task, [Job(tuple(names), together=True)] if together else each(names), choice, result)


def split(arguments: Sequence[str], question: str | None) -> tuple[list[str], str]:
    """(images, question). Without --question the question is all words from the first that is not a picture,
    or those before the first picture where the question came first.

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
        count = min(max(count, 1), len(images) - 1)  # the first is meant as a picture
        question = " ".join(images[count:])
        del images[count:]
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    return images, question.strip()


Format = Literal["json", "coco", "yolo", "csv"]
FORMATS = {"coco": "COCO", "yolo": "YOLO", "csv": "CSV"}


Output = Annotated[
    Path | None, Option("--output", "-o", metavar="FILE", help="Write there instead of printing.")
]


@options.grouped()
def detect(
    images: options.Pictures,
    objects: Annotated[
        list[str] | None,
        Option("--object", metavar="NAME", help="What to look for; again for more. Default: everything."),
    ] = None,
    draw: Annotated[
        Path | None, Option(metavar="PATH", help="Picture with the boxes; a folder for several images.")
    ] = None,
    format_: Annotated[
        Format | None, Option("--format", help="json is JSON Lines; yolo needs a folder as --output.")
    ] = None,
    recursive: options.Recursive = False,
    *,
    choice: options.ModelChoice,
    generation: options.GenerationOptions,
    json: options.Json = False,
    output: Output = None,
    resume: options.Resume = False,
    quiet: options.Quiet = False,
) -> None:
    """Find objects: boxes in pixels of the original image."""
    from snugvl.tasks.detect import check_names

    images, asked = _asked(images, objects, quiet=quiet)
    names, jobs = check_names(asked), each(sources.expand(images, recursive=recursive))
    pictures = _targets(draw, [job.names[0] for job in jobs]) if draw else {}
    drawn: list[Path] = []
    chosen = _format(format_, json, resume)
    sink = _gathering(chosen, output, jobs, names, tell=not quiet)
    task = Task(
        "detect",
        {"objects": list(names), **generation.chosen()},
        run=_runner(names, generation.sampling(), choice.load.max_pixels, pictures, drawn),
        text=lambda found: records.detections(found, names),
        videos=False,
    )
    if choice.server is None:
        choice = replace(choice, load=replace(choice.load, purpose="detect"))
    where = options.OutputChoice(chosen == "json", None if sink else output, resume and not sink, quiet)
    try:
        batch.do(task, jobs, choice, where, sink)
    finally:
        if drawn and not quiet:
            one = drawn[0] if len(drawn) == 1 else f"{drawn[0].parent}/: {len(drawn)} pictures"
            say(f"the boxes are drawn in {one}")


def _asked(
    images: Sequence[str], objects: Sequence[str] | None, *, quiet: bool
) -> tuple[list[str], list[str]]:
    """(pictures, names of objects). Words before or after the pictures are one name, or several between
    commas; where one of them has spaces, as in `'red circle' cup`, each is one.

    Raises:
        typer.BadParameter: there are such words and --object as well.
    """
    pictures, words = sources.words_beside(images)
    text = " ".join(words)
    if words and objects:
        raise typer.BadParameter(f"{text!r} is not a file; name what to look for with another --object")
    if any(len(word.split()) > 1 for word in words):
        asked = sources.objects(words)
    else:
        asked = sources.objects([text] if words else objects or [])
    if words and not quiet:
        line = " ".join(f"--object {shlex.quote(name.strip())}" for name in asked)
        named = ", ".join(map(repr, words)) if len(asked) > 1 < len(words) else repr(text)
        more = (
            f"; several have commas between them: {', '.join(words)}" if len(asked) == 1 < len(words) else ""
        )
        say(f"{named}: no such file, so this is looked for: {line}{more}")
    return pictures, asked


def _format(chosen: Format | None, json: bool, resume: bool) -> Format | None:
    if json and chosen not in (None, "json"):
        raise typer.BadParameter(f"--json and --format {chosen} are two formats; choose one")
    if resume and chosen not in (None, "json"):
        raise typer.BadParameter(f"--resume continues JSON Lines; --format {chosen} is written at the end")
    return "json" if json else chosen


def _runner(
    names: Sequence[str], sampling: SamplingParams, max_pixels: int | None, pictures: dict[str, Path],
    drawn: list[Path],
) -> Any:  # fmt: skip
    """A function that does one picture; it puts the path of each drawing into `drawn`."""

    def run(model: Model | Client, job: Job, images: Sequence[ImageSource]) -> Detections:
        target, picture = pictures.get(job.names[0]), None
        if target:  # first: what can't be drawn on isn't asked about
            from snugvl.model import decode

            picture = decode(images[0])
        found = model.detect(images[0], names, sampling=sampling, max_pixels=max_pixels)
        if target and picture:
            from snugvl.tasks import export

            export.save(export.annotate(picture, found), target)
            drawn.append(target)
        return found

    return run


def _gathering(
    chosen: Format | None, output: Path | None, jobs: Sequence[Job], names: Sequence[str], *, tell: bool
) -> Opener | None:
    """The writer of COCO, YOLO or CSV at the end, checked before the work; None for other formats."""
    from snugvl.tasks import export

    if chosen in (None, "json"):
        return None
    if chosen == "yolo":
        if output is None:
            raise typer.BadParameter("--format yolo writes a file per image: name a folder with --output")
        export.yolo_names([job.names[0] for job in jobs])
        if output.is_file() or (output.is_dir() and any(output.iterdir())):
            raise InputError(f"{output} exists and isn't an empty folder; choose another")
    elif output is not None:
        from snugvl.cli.records import check_new

        check_new(output)

    def finish(outcomes: Sequence[Outcome]) -> None:
        def told() -> None:
            if tell:
                found = sum(len(result.objects) for _, result in items)
                boxes, images = several(found, "box"), several(len(items), "image")
                say(f"{boxes} of {images} in {output}, as {FORMATS[chosen]}")

        items: list[Any] = [(outcome.job.names[0], outcome.result) for outcome in outcomes]
        if chosen == "yolo":
            assert output is not None
            output.mkdir(parents=True, exist_ok=True)
            for file, text in export.yolo(items, names).items():
                write_named(output / file, text)
            told()
            return
        text = export.coco(items, names) if chosen == "coco" else export.table(items)
        if output is None:
            write(text)
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_named(output, text)
            told()

    return lambda: Gathered(finish)


def _targets(where: Path, images: Sequence[str]) -> dict[str, Path]:
    """Image → picture. `where` is a file for one image; a folder for several, or without a picture's suffix.

    In a folder a picture keeps the image's name, with .png where its own format isn't written.

    Raises:
        InputError: a picture would replace an input, or another picture.
    """
    from snugvl.tasks.export import SUFFIXES, check_suffix

    if str(where) == sources.STDIN:
        raise InputError("--draw writes files, not to standard output; name a file, or a folder")
    folder = where.is_dir() or not where.suffix
    if not folder and len(images) > 1:
        raise InputError(f"--draw {where} is one picture, but there are {len(images)} images; name a folder")
    if not folder:
        check_suffix(where)
    chosen: dict[str, Path] = {}
    for image in images:
        name = Path("stdin.png" if image == sources.STDIN else image)
        suffix = name.suffix if name.suffix.lower() in SUFFIXES else ".png"
        chosen[image] = where / f"{name.stem}{suffix}" if folder else where
    _check_targets(chosen)
    return chosen


def _check_targets(chosen: dict[str, Path]) -> None:
    inputs = {Path(image).resolve() for image in chosen if image != sources.STDIN}
    owners: dict[Path, str] = {}
    for image, target in chosen.items():
        path = target.resolve()
        if path in inputs:
            raise InputError(f"--draw would replace the input {target}; choose another place")
        if path in owners:
            raise InputError(
                f"--draw would give {owners[path]} and {image} the same picture {target}; rename one"
            )
        owners[path] = image
