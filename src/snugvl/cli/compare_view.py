"""What `snugvl compare` shows: its plan, how far it is, a table, and answers that differ, side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from snugvl.cli import records
from snugvl.cli.options import OutputChoice
from snugvl.cli.stderr import printable, say, several
from snugvl.cli.stdout import write
from snugvl.core.sizes import format_size, megapixels
from snugvl.fidelity.results import Figures, QuestionOutcome, figures

if TYPE_CHECKING:
    from snugvl.fidelity.comparison import Comparison
    from snugvl.fidelity.progress import Tell

UNKNOWN = " …"  # behind an answer that isn't known to its end


def plan_lines(comparison: Comparison) -> Iterator[str]:
    """What will be done, what it will hold, and how long the reading takes."""
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
    beside = f" and {format_size(host)} of main memory" if host else ""
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
    """A bar on standard error where a person watches it there, else a line for each stage."""
    if not shown:
        yield lambda _stage, _detail, _done, _left: None
        return
    if not sys.stderr.isatty():
        yield _Lines()
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


class _Lines:
    """One line when a stage begins."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, stage: str, _detail: str, done: float, left: float | None) -> None:
        if stage != self._last:
            self._last = stage
            say(f"{stage} ({done:.0%} done{'' if left is None else f', {_time(left)} left'})")


def show(comparison: Comparison, outcomes: Sequence[QuestionOutcome], result: OutputChoice) -> None:
    """Print all, or write records."""
    model = comparison.reference.capabilities.model
    rows = [
        figures(rival.name, [each for each in outcomes if each.variant == rival.name])
        for rival in comparison.rivals
    ]
    if not (result.json or result.path):
        write("\n".join([*_table(rows), "", *_differences(outcomes, result)]).rstrip() + "\n")
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


def _table(rows: Sequence[Figures]) -> list[str]:
    """A line for each variant."""
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
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for name, *rest in cells]


def _differences(outcomes: Sequence[QuestionOutcome], result: OutputChoice) -> Iterator[str]:
    """Answers that aren't the reference's, beside it, question by question."""
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
    """A name and a text, whose further lines stand under its first one."""
    first, *rest = printable(text).splitlines() or [""]
    return "\n".join([f"  {name.ljust(width)}  {first}", *(f"  {'':{width}}  {line}" for line in rest)])


def _time(seconds: float) -> str:
    """A span for people: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
