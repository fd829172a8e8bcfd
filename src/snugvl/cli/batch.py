"""Does the jobs of a command: several at once, outcomes in the order of the jobs, errors kept apart.

Eight images are in flight at a time: while the engine batches some, others are being decoded. One job that
fails ends alone. A single image on a terminal is streamed instead.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import typer

from snugvl.cli import records, session
from snugvl.cli.options import ModelChoice, OutputChoice
from snugvl.cli.records import Job, JsonLines, Opener, Outcome, Readable, Task
from snugvl.cli.sources import STDIN
from snugvl.cli.terminal import (
    HANG,
    INTERRUPTED,
    SOME_FAILED,
    about,
    flow,
    line,
    named,
    printable,
    say,
    several,
    trace,
    write,
)
from snugvl.core.wrapping import wrapped
from snugvl.errors import ImageError, InputError, SnugvlError

if TYPE_CHECKING:
    from snugvl.client import Client
    from snugvl.core.messages import Delta
    from snugvl.inputs.given import VisualSource
    from snugvl.model import Model

    Reader = Callable[[Job], list[VisualSource]]

IN_FLIGHT = 8
WAKE_S = 0.5


def do(
    task: Task, jobs: Sequence[Job], choice: ModelChoice, output: OutputChoice, sink: Opener | None = None
) -> None:
    """Do `jobs` and put the outcomes where `output` says, or into `sink`.

    Raises:
        SnugvlError: the error of the job, when there is only one; the model can't be loaded; a file to
            resume is of other work.
        typer.Exit: with 7 when some of several jobs failed, with 130 when interrupted.
    """
    choice = session.resolve(choice, task.name)
    left = _left(task, jobs, choice, output)
    if not left:
        if not output.quiet:
            say(f"nothing to do: {output.path} has a result for each of {len(jobs)} images")
        return
    try:
        _load_and_do(task, jobs, left, choice, output, sink)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def _load_and_do(
    task: Task,
    jobs: Sequence[Job],
    left: Sequence[Job],
    choice: ModelChoice,
    output: OutputChoice,
    sink: Opener | None,
) -> None:
    # One image is read before the model is loaded, so that a mistyped path is reported at once.
    opener = sink or _opener(task, jobs, choice, output)
    read = session.reader(choice, videos=task.videos)
    with _named(jobs):
        images = _read_or_told(jobs[0], read, opener) if len(jobs) == 1 else None
    if not output.quiet:
        session.tell(choice)
    with session.load_model(choice) as model, _named(left):
        for_a_terminal = sys.stdout.isatty() and not output.json and output.path is None
        if images is not None and task.stream and for_a_terminal:
            with about(jobs[0].called):
                _streamed(task, model, images, output)
        elif images is not None:
            ready = images
            _single(_attempt(task, model, jobs[0], lambda _: ready), opener, output)
        else:
            _batch(lambda job: _attempt(task, model, job, read), task.name, left, opener, output)


@contextmanager
def _named(jobs: Sequence[Job]) -> Iterator[None]:
    """Put the picture's file name into the error of a lone job: a server doesn't know it."""
    try:
        yield
    except ImageError as error:
        said, (job, *others) = str(error), jobs
        if not others and not any(name in said for name in job.called):
            text = named(said, job.called)
            error.args = (text if text != said else f"{', '.join(job.called)}: {said}", *error.args[1:])
        raise


def _left(task: Task, jobs: Sequence[Job], choice: ModelChoice, output: OutputChoice) -> Sequence[Job]:
    """The jobs to do. A file to continue is put in order first: no failures, no torn line."""
    if output.path is None:
        return jobs
    if not output.resume:
        records.check_new(output.path)
        return jobs
    if any(STDIN in job.names for job in jobs):
        raise InputError("--resume can't tell whether standard input is the same picture; give files")
    have = records.results_in(output.path, task, choice.name)
    records.rewrite(output.path, have)
    return records.remaining(jobs, have)


def _opener(task: Task, jobs: Sequence[Job], choice: ModelChoice, output: OutputChoice) -> Opener:
    if output.path or output.json:
        return lambda: JsonLines(task, choice.name, output.path)
    return lambda: Readable(task.text, several=len(jobs) > 1)


def _read_or_told(job: Job, read: Reader, sink: Opener) -> list[VisualSource]:
    try:
        return read(job)
    except SnugvlError as error:
        with sink() as results:
            results.put(Outcome(job, None, error, 0.0))
        raise


def _streamed(
    task: Task, model: Model | Client, images: Sequence[VisualSource], output: OutputChoice
) -> None:
    from snugvl.tasks.ask import collect
    from snugvl.tasks.parse import answer_text

    assert task.stream is not None
    deltas: list[Delta] = []
    started, out = False, flow()
    with task.stream(model, images) as stream:
        try:
            for delta in stream:
                deltas.append(delta)
                text = printable(delta.text)
                write(out.feed(text if started else text.lstrip()))
                started = started or bool(text.strip())
        finally:
            write(f"{out.end()}\n" if started else "")
    reply = collect(deltas)
    answer_text(reply.text)
    _note_cut(reply.truncated, output)


def _single(outcome: Outcome, sink: Opener, output: OutputChoice) -> None:
    with sink() as results:
        results.put(outcome)
    if outcome.error:
        raise outcome.error
    assert outcome.result is not None
    _note_cut(outcome.result.truncated, output)
    _told(output, 1)


def _told(output: OutputChoice, results: int) -> None:
    """Print where the results are."""
    if output.path is not None and not output.quiet:
        say(f"{several(results, 'new result' if output.resume else 'result')} in {output.path}")


def _note_cut(truncated: bool, output: OutputChoice) -> None:
    if truncated and not output.quiet:
        say("the answer was cut at its token limit; --max-tokens raises it")


def _batch(
    attempt: Callable[[Job], Outcome], label: str, jobs: Sequence[Job], sink: Opener, output: OutputChoice
) -> None:
    done = failed = 0
    # Results that are printed on the same terminal are the progress.
    shown = not output.quiet and (output.path is not None or not sys.stdout.isatty())
    try:
        with sink() as results, _progress(len(jobs), label, shown=shown) as (advance, tell):
            for outcome in _outcomes(attempt, jobs):
                results.put(outcome)
                done += 1
                failed += outcome.error is not None
                _report(outcome, tell)
                advance()
    except KeyboardInterrupt:
        how = "; the same command with --resume continues" if output.path else ""
        say(f"interrupted after {done} of {len(jobs)} images{how}")
        raise typer.Exit(INTERRUPTED) from None
    _told(output, done - failed)
    if failed:
        say(f"{failed} of {len(jobs)} images failed")
        raise typer.Exit(SOME_FAILED)


def _report(outcome: Outcome, tell: Callable[[str], None]) -> None:
    if outcome.error is None:
        return
    message = str(outcome.error)
    if not isinstance(outcome.error, SnugvlError):
        message = f"unexpected {type(outcome.error).__name__}: {message}"
    if not any(name in message for name in outcome.job.called):
        message = f"{outcome.job.title}: {message}"
    tell(message)
    trace(outcome.error)


def _outcomes(attempt: Callable[[Job], Outcome], jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Outcomes in the order of `jobs`; at most `IN_FLIGHT` are being worked on or wait to be taken."""
    waiting: deque[Future[Outcome]] = deque()
    pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="snugvl-batch")
    try:
        for job in jobs:
            if len(waiting) == IN_FLIGHT:
                yield _taken(waiting.popleft())
            waiting.append(pool.submit(attempt, job))
        while waiting:
            yield _taken(waiting.popleft())
    finally:
        # After an interruption the requests that run are aborted when the model closes.
        pool.shutdown(wait=False, cancel_futures=True)


def _taken(work: Future[Outcome]) -> Outcome:
    """Wait for a job's outcome and return it.

    Python can't end a wait by a signal that came in the instant before it began: the batch would ignore
    Ctrl+C, and never end where a server doesn't answer. So this wakes now and then.
    """
    while not wait((work,), WAKE_S).done:
        pass
    return work.result()


def _attempt(task: Task, model: Model | Client, job: Job, read: Reader) -> Outcome:
    start = time.perf_counter()
    try:
        with about(job.called):
            result = task.run(model, job, read(job))
    except Exception as error:
        if isinstance(error, ImageError):
            error.args = (named(str(error), job.called), *error.args[1:])
        return Outcome(job, None, error, time.perf_counter() - start)
    return Outcome(job, result, None, time.perf_counter() - start)


@contextmanager
def _progress(
    total: int, label: str, *, shown: bool
) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """Functions that count a step of `total`, and that say a line: beside a bar on standard error, where that
    is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda: None, say
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn(label, markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, redirect_stdout=False, transient=True) as display:
        bar = display.add_task(label, total=total)

        def tell(message: str) -> None:
            text = wrapped(line(message), console.width, HANG)
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield partial(display.advance, bar), tell
