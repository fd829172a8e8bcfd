"""`snugvl compare`: its plan, how far it is, a table, and answers that differ, side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer
from typer import Argument, Option

from snugvl.cli import options, records, session, sources
from snugvl.cli.options import ModelChoice, OutputChoice
from snugvl.cli.terminal import INTERRUPTED, SOME_FAILED, ended_like_ctrl_c, printable, say, several, write
from snugvl.cli.terminal import show as show_lines
from snugvl.core.formats import WeightsName
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import format_size, megapixels
from snugvl.core.wrapping import columns
from snugvl.errors import InputError, SnugvlError

if TYPE_CHECKING:
    from snugvl.fidelity.comparison import Comparison
    from snugvl.fidelity.results import Figures, QuestionOutcome
    from snugvl.fidelity.stages import Item
    from snugvl.fidelity.variants import Question, Variant
    from snugvl.fidelity.work import Tell

PASSES: Final = 4
COMPARED = options.load_options("compare")
TaskName = Literal["caption", "ask", "detect", "scene"]

Model = Annotated[str, options.model_argument("A folder or a Hub id: the reference, as its files have it.")]


@options.grouped(COMPARED)
def compare(
    model: Model,
    images: Annotated[
        list[str],
        Argument(metavar="IMAGE...", help="Files (PDFs too), folders or quoted globs ('photos/**/*.jpg')."),
    ],
    weights: Annotated[
        str | None,
        Option(metavar="FORMAT,...", help=f"Formats of the weights: {', '.join(get_args(WeightsName)[1:])}."),
    ] = None,
    kv_cache: Annotated[
        str | None, Option(metavar="FORMAT,...", help="Formats of keys and values: bf16, fp8.")
    ] = None,
    tower_weights: Annotated[
        str | None, Option(metavar="FORMAT,...", help="Formats of the vision tower: bf16, int8.")
    ] = None,
    max_pixels: Annotated[
        str | None, Option(metavar="N,...", help="Pixels that larger images are scaled down to.")
    ] = None,
    other_model: Annotated[
        list[str] | None,
        Option(metavar="MODEL", help="Compare this model with MODEL; it must have the same tokenizer."),
    ] = None,
    task: Annotated[
        TaskName | None,
        Option(help="What is asked: ask with --question, detect with --object, else caption."),
    ] = None,
    question: Annotated[
        list[str] | None, Option("--question", "-q", help="A question about each; again for more.")
    ] = None,
    objects: Annotated[
        list[str] | None, Option("--object", metavar="NAME", help="What to look for; again for more.")
    ] = None,
    reference_pixels: Annotated[
        int | None, Option(min=1, help="The reference's image size; default: the variants' largest.")
    ] = None,
    passes: Annotated[
        int,
        Option(
            min=1,
            max=64,
            help="Times that the reference is read: the first finds the figures, each other one how its "
            "answers go on where they differ.",
        ),
    ] = PASSES,
    max_tokens: options.MaxTokens = None,
    recursive: options.Recursive = False,
    *,
    load: LoadOptions,
    json: Annotated[
        bool, Option("--json", help="JSON Lines: an object an answer, then one a variant.")
    ] = False,
    output: options.Output = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with an unfinished comparison of the same --output.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what formats, image sizes or another model cost on these pictures.

    Every combination answers; MODEL as published checks it, read layer by layer from the disk.
    """
    axes: dict[str, list[Any]] = {
        "weights": _listed(weights),
        "kv_cache": _listed(kv_cache),
        "tower_weights": _listed(tower_weights),
        "max_pixels": _numbers(max_pixels),
        "models": list(other_model or []),
    }
    result = OutputChoice(json, output, resume, quiet)
    names = sources.expand(images, recursive=recursive)
    if sources.STDIN in names:
        raise InputError("compare reads each picture several times, and standard input only once; give files")
    asked = _asked(task, question or [], sources.objects(objects or []))
    if _finished(result):
        return
    numbers = (max_tokens, reference_pixels, passes)
    try:
        with ended_like_ctrl_c():
            _compare(replace(load, model=model), axes, names, asked, numbers, result)
    except KeyboardInterrupt:
        how = "; the same command with --resume continues" if result.path else ""
        say(f"interrupted{how}")
        raise typer.Exit(INTERRUPTED) from None


def _compare(
    base: LoadOptions,
    axes: dict[str, list[Any]],
    names: Sequence[str],
    asked: Sequence[tuple[TaskName, str, tuple[str, ...]]],
    numbers: tuple[int | None, int | None, int],
    result: OutputChoice,
) -> None:
    from snugvl.fidelity.comparison import comparison_of
    from snugvl.fidelity.variants import Question, variants_of
    from snugvl.tasks.detect import check_names

    max_tokens, reference_pixels, passes = numbers
    variants = variants_of(base, **axes)
    questions = [Question(task, text, check_names(objects), max_tokens or 0) for task, text, objects in asked]
    choice = ModelChoice(base.model, pocket=session.of_drawings(base.model))
    items, failed = _items(choice, names, questions)
    if not result.quiet:
        session.tell(choice)
    with progress(shown=not result.quiet) as tell:
        comparison, work = comparison_of(
            base,
            _purposed(variants, questions),
            items,
            passes=passes,
            tell=tell,
            pictures={name: _mark(name) for name in dict.fromkeys(item.name for item in items)},
            reference_pixels=reference_pixels,
            output=result.path,
            resume=result.resume,
        )
        with closing(comparison):
            if not result.quiet:
                for line in plan_lines(comparison):
                    say(line)
            outcomes = comparison.run()
    show(comparison, outcomes, result)
    work.remove()
    broken = failed + sum(each.error is not None for each in outcomes)
    if broken:
        say(f"{broken} of {len(names) * len(questions) * len(variants)} answers failed")
        raise typer.Exit(SOME_FAILED)


def _items(
    choice: ModelChoice, names: Sequence[str], questions: Sequence[Question]
) -> tuple[list[Item], int]:
    """(questions about readable pictures, number of answers missing because a picture can't be read).

    Raises:
        SnugvlError: the only picture can't be read, or none can.
    """
    from snugvl.fidelity.stages import Item

    read = session.opener(choice)
    items: list[Item] = []
    failed = 0
    for name in names:
        reading = partial(read, name)
        try:
            size = reading().size
        except SnugvlError as error:
            if len(names) == 1:
                raise
            say(str(error) if name in str(error) else f"{name}: {error}")
            failed += len(questions)
            continue
        items += [Item(name, size, reading, question) for question in questions]
    if not items:
        raise InputError(f"none of the {len(names)} pictures can be read, for the reasons above")
    return items, failed


def _purposed(variants: Sequence[Variant], questions: Sequence[Question]) -> list[Variant]:
    """The variants, planned for the purpose "detect" where boxes are asked for, as `snugvl detect` does."""
    if not any(question.task == "detect" for question in questions):
        return list(variants)
    return [replace(variant, load=replace(variant.load, purpose="detect")) for variant in variants]


def _asked(
    task: TaskName | None, questions: Sequence[str], objects: Sequence[str]
) -> list[tuple[TaskName, str, tuple[str, ...]]]:
    """(task, text, objects) of each question."""
    chosen: TaskName = task or ("ask" if questions else "detect" if objects else "caption")
    if questions and chosen != "ask":
        raise typer.BadParameter(f"--question is for --task ask, not {chosen}")
    if objects and chosen != "detect":
        raise typer.BadParameter(f"--object is for --task detect, not {chosen}")
    if chosen != "ask":
        return [(chosen, "", tuple(objects))]
    if not questions or not all(text.strip() for text in questions):
        raise typer.BadParameter("--task ask needs a question: --question 'What is on the sign?'")
    return [("ask", text.strip(), ()) for text in dict.fromkeys(questions)]


def _listed(text: str | None) -> list[str]:
    """Words between commas."""
    return [word for part in (text or "").split(",") if (word := part.strip())]


def _numbers(text: str | None) -> list[int]:
    words = _listed(text)
    if wrong := [word for word in words if not word.isdecimal() or len(word) > 12]:
        raise typer.BadParameter(
            f"--max-pixels takes numbers between commas, such as 1000000,4000000, not {wrong[0]!r}"
        )
    return [int(word) for word in words]


def _finished(result: OutputChoice) -> bool:
    """Whether the file has its results already; a new one must not be there."""
    if result.path is None:
        return False
    if not result.resume:
        records.check_new(result.path)
        return False
    if result.path.exists() and result.path.stat().st_size:
        if not result.quiet:
            say(f"nothing to do: {result.path} has the results")
        return True
    return False


def _mark(name: str) -> list[int] | None:
    """(size in bytes, time of change) of a file, by which a changed one is recognised; None for no file."""
    try:
        found = os.stat(Path(name.partition("#page=")[0]))  # noqa: PTH116 (a name may be no path)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_mtime_ns]


UNKNOWN = " …"  # behind an answer that isn't known to its end


def plan_lines(comparison: Comparison) -> Iterator[str]:
    """Lines on what will be done, the memory it takes, and how long the reading takes."""
    reference, rivals = comparison.reference, comparison.rivals
    pixels = reference.max_pixels
    size = "" if pixels is None else f", pictures of up to {megapixels(pixels)}"
    questions = f"{len(comparison.items)} question{'s' * (len(comparison.items) != 1)}"
    yield (
        f"compares {'; '.join(rival.name for rival in rivals)} with {reference.capabilities.model} "
        f"as published ({reference.settings.weights}{size}): {questions}"
    )
    plans = comparison.plans().values()
    held = max(plan.footprint.total_bytes for plan in plans)
    host = max(plan.host_bytes for plan in plans)
    beside = f" and {format_size(host)} of host memory" if host else ""
    engines = max(rival.engine_bytes for rival in rivals)
    usable = min(plan.usable_bytes for plan in plans)
    yield (
        f"memory: {format_size(usable)} may be used; an engine takes {format_size(engines)}, and then a "
        f"reading of the reference {format_size(held)}{beside}; at most "
        f"{format_size(comparison.reading_bytes)} are read from the disk"
    )
    yield f"the reading takes up to {_time(comparison.estimate())}; the answers come on top"


@contextmanager
def progress(*, shown: bool) -> Iterator[Tell]:
    """A bar on standard error where that is a terminal, else a line for each stage."""
    if not shown:
        yield lambda _stage, _detail, _done, _left: None
        return
    if not sys.stderr.isatty():
        begun = ""

        def line(stage: str, _detail: str, done: float, left: float | None) -> None:
            nonlocal begun
            if stage != begun:
                begun = stage
                say(f"{stage} ({done:.0%} done{'' if left is None else f', {_time(left)} left'})")

        yield line
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[left]}", markup=False),
    )
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, redirect_stdout=False, transient=True) as display:
        bar = display.add_task("planning", total=1.0, left="")

        def tell(stage: str, detail: str, done: float, left: float | None) -> None:
            text = f"{stage}: {detail}" if detail else stage
            remaining = "" if left is None else f"{_time(left)} left"
            display.update(bar, description=text, completed=done, left=remaining)

        yield tell


def show(comparison: Comparison, outcomes: Sequence[QuestionOutcome], result: OutputChoice) -> None:
    """Print all results, or write records."""
    from snugvl.fidelity.results import figures

    model = comparison.reference.capabilities.model
    rows = [
        figures(rival.name, [each for each in outcomes if each.variant == rival.name])
        for rival in comparison.rivals
    ]
    if not (result.json or result.path):
        width = columns(sys.stdout)
        show_lines("\n".join([*_table(rows, width), "", *_differences(outcomes, result)]).rstrip(), 4)
        return
    found: list[dict[str, Any]] = [each.record(model) for each in outcomes]
    found += [row.record(model) for row in rows]
    found.append(
        {
            "model": model,
            "run": {
                "seconds": round(comparison.seconds, 3),
                "memory": [
                    {"stage": row.stage, "planned_bytes": row.planned_bytes, "held_bytes": row.held_bytes}
                    for row in comparison.rows
                ],
            },
        }
    )
    if result.path is not None:
        records.rewrite(result.path, found)
        if not result.quiet:
            say(f"{several(len(outcomes), 'answer')} and {several(len(rows), 'variant')} in {result.path}")
    else:
        write("".join(map(records.encode, found)))


def _table(rows: Sequence[Figures], width: int | None) -> list[str]:
    """The table, a line for each variant; on a terminal narrower than that, a line for each figure."""
    boxes = any(row.iou is not None for row in rows)
    heads = ["", "KL, nats a token", "likeliest token", "same answers", *(["boxes' IoU"] if boxes else [])]
    cells = [heads]
    for row in rows:
        spread = "" if row.kl_error is None else f" ± {row.kl_error:.5f}"
        known = (
            f" (of {row.answers}, {row.incomplete} unfinished)" if row.incomplete else f" of {row.answers}"
        )
        line = [row.variant, f"{row.kl:.5f}{spread}", f"{row.likeliest:.2%}", f"{row.same}{known}"]
        cells.append([*line, *(["–" if row.iou is None else f"{row.iou:.3f}"] if boxes else [])])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None and width < sum(widths) + 2 * len(widths[1:]):
        heads = [f"  {head}: " for head in heads[1:]]
        return [line for name, *rest in cells[1:] for line in (name, *map(str.__add__, heads, rest))]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for name, *rest in cells]


def _differences(outcomes: Sequence[QuestionOutcome], result: OutputChoice) -> Iterator[str]:
    """Lines with answers that differ from the reference's, beside it, question by question."""
    differ = [each for each in outcomes if each.score is not None and not each.same]
    differ.sort(key=_question)
    for _, some in groupby(differ, key=_question):
        group = list(some)
        first = group[0]
        width = max(len("reference"), *(len(each.variant) for each in group))
        asked = f" {first.question.text}" if first.question.text else ""
        yield printable(f"{first.picture}:{asked}")
        yield _beside("reference", width, first.reference + ("" if first.complete else UNKNOWN))
        for each in group:
            overlap = ""
            if each.boxes is not None and each.boxes.iou is not None:
                overlap = f" (IoU {each.boxes.iou:.2f}, {each.boxes.missed} missed, {each.boxes.added} added)"
            yield _beside(each.variant, width, each.answer + overlap)


def _question(outcome: QuestionOutcome) -> tuple[str, str]:
    return outcome.picture, outcome.question.text


def _beside(name: str, width: int, text: str) -> str:
    """A name and a text whose further lines are indented under its first one."""
    first, *rest = printable(text).splitlines() or [""]
    return "\n".join([f"  {name.ljust(width)}  {first}", *(f"  {'':{width}}  {line}" for line in rest)])


def _time(seconds: float) -> str:
    """A span for people: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
