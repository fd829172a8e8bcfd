"""`snugvl pull`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from snugvl.cli.options import Quiet
from snugvl.cli.stderr import say
from snugvl.cli.stdout import write
from snugvl.cli.values import known_models
from snugvl.errors import DoesNotFit

if TYPE_CHECKING:
    from snugvl.checkpoint.download import Watch
    from snugvl.checkpoint.facts import ModelFacts

Fits = Callable[["ModelFacts"], str | None]


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hub id, as Qwen/Qwen3-VL-2B-Instruct-FP8, or owner/name:Q4_K_M for GGUF files.",
            autocompletion=known_models,
        ),
    ],
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REVISION", help="Branch, tag or commit.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Download even if the disk or the plan has no room.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Download a model from the Hub, or finish or check what is there.

    It downloads only what is needed, continues where an earlier download broke off, and checks every weight
    file against its hash. It refuses before it starts when the disk has no room, or when no engine could run
    the model on this machine. For private and gated models set HF_TOKEN. At the end it prints the folder.
    """
    fetch(model, revision=revision, force=force, quiet=quiet, fits=why_not)


def why_not(facts: ModelFacts) -> str | None:
    """Why no engine can run a model on this machine, or None if one can."""
    from snugvl.cli.machine_options import MachineChoice, machine_from
    from snugvl.planner.solve import Candidate, require, solve
    from snugvl.planner.wishes import Wishes

    wishes = Wishes(images=1 if facts.vision else 0)
    try:
        require(solve([Candidate(facts)], machine_from(MachineChoice()), wishes))
    except DoesNotFit as error:
        return str(error)
    return None


def fetch(
    model: str,
    *,
    revision: str | None = None,
    force: bool = False,
    quiet: bool = False,
    fits: Fits | None = None,
) -> None:
    """The command itself. `fits`: why the model can't be used on this machine, or None if it can."""
    from snugvl.checkpoint import download
    from snugvl.checkpoint.gguf_files import hub_id, repository
    from snugvl.checkpoint.locate import POCKET, near
    from snugvl.core.sizes import GIB

    model = hub_id(model)
    if model == POCKET:
        say("pocket is built in; there is nothing to download")
        write(f"{near(POCKET)}\n")
        return
    with _watch(shown=not quiet and sys.stderr.isatty()) as watch:
        done = download.pull(model, revision=revision, force=force, fits=fits, watch=watch)
    write(f"{done.folder}\n")
    if quiet:
        return
    gib = done.total_bytes / GIB
    how = "downloaded and verified" if done.fetched_bytes else "already there, verified"
    say(f"{model} {how}: {gib:.2f} GiB, commit {done.commit[:12]}")
    if revision is None:
        say(f"next: snugvl {'plan' if repository(model) else 'serve'} {model}")


@contextmanager
def _watch(*, shown: bool) -> Iterator[Watch | None]:
    """A bar of bytes on standard error, where a person watches it."""
    if not shown:
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:

        class Bar:
            def __init__(self) -> None:
                self.task: progress.TaskID | None = None

            def start(self, label: str, total_bytes: int) -> None:
                self.task = display.add_task(label, total=total_bytes)

            def advance(self, count_bytes: int) -> None:
                if self.task is not None:
                    display.advance(self.task, count_bytes)

        yield Bar()
