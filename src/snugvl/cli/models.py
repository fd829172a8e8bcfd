"""`snugvl pull`, `snugvl list` and `snugvl rm`: the models on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from snugvl.cli.options import DownloadedModel, Quiet, known_models
from snugvl.cli.terminal import printable, say, show, write, write_json
from snugvl.core.sizes import format_size
from snugvl.errors import DoesNotFit, InputError, SnugvlError

if TYPE_CHECKING:
    from snugvl.checkpoint.cached import Cached
    from snugvl.checkpoint.download import Watch
    from snugvl.checkpoint.facts import ModelFacts

Fits = Callable[["ModelFacts"], str | None]


def pull(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="Hub id, as Qwen/Qwen3-VL-2B-Instruct-FP8, or owner/name:Q4_K_M for GGUF files.",
            autocompletion=known_models,
        ),
    ],
    revision: Annotated[str | None, Option(metavar="REVISION", help="Branch, tag or commit.")] = None,
    force: Annotated[
        bool, Option("--force", help="Download even if the disk or the plan has no room.")
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
    from snugvl.cli.options import MachineChoice, machine_from
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
    """Do what `pull` does. `fits`: why the model can't be used on this machine, or None if it can."""
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
    """A bar of bytes on standard error, where that is a terminal."""
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


Judge = Callable[["ModelFacts"], str | None]


def list_models(
    json: Annotated[bool, Option("--json", help="Print a list of objects, with sizes in bytes.")] = False,
) -> None:
    """Show the models on this machine: size, format, whether each fits now, and where it is.

    GGUF files of the Hub cache, of Ollama, LM Studio and llama.cpp are among them; what belongs to those
    three is never changed.
    """
    from snugvl.checkpoint.cached import Cached, cached
    from snugvl.checkpoint.gguf_files import ggufs_here, hub_models
    from snugvl.checkpoint.locate import POCKET, locate
    from snugvl.checkpoint.read import facts_of

    pocket = Cached(POCKET, locate(POCKET), facts_of(POCKET).download_bytes)
    others = {name.partition(":")[0] for name in hub_models()}
    ggufs = [_gguf(name) for name in ggufs_here()]
    models = [each for each in cached() if each.name not in others]
    rows = [_row(each, why_not) for each in (*models, *ggufs, pocket)]
    if json:
        write_json(rows)
        return
    cells = [(row["model"], format_size(row["bytes"]), row["format"] or "–", _fits(row)) for row in rows]
    titles = ("model", "size", "format", "fits now")
    widths = [max(len(line[index]) for line in (titles, *cells)) for index in range(3)]
    for line, row in zip((titles, *cells), (None, *rows), strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, (*widths, 0), strict=True)).rstrip()
        show(printable(text), 4)
        if row is not None:
            show(printable(f"    {row['folder']}"), 4)
            if row["why"]:
                show(printable(f"    {row['why']}"), 4)


def _gguf(name: str) -> Cached:
    """A GGUF model, wherever it is, as a row of the list. A broken one has 0 bytes; its row says why."""
    from snugvl.checkpoint.cached import Cached
    from snugvl.checkpoint.gguf_files import gguf_files

    try:
        files = gguf_files(name)
    except SnugvlError:
        files = None
    return Cached(name, Path(), 0) if files is None else Cached(name, files.parts[0], files.nbytes)


def _row(model: Cached, why_not: Judge) -> dict[str, Any]:
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of

    row: dict[str, Any] = {"model": model.name, "bytes": model.nbytes, "format": None, "fits": None}
    row |= {"why": None, "folder": str(model.folder)}
    try:
        row["folder"] = str(locate(model.name))
        facts = facts_of(model.name, offline=True)
    except SnugvlError as error:
        return row | {"why": str(error)}
    reason = why_not(facts)
    return row | {"format": _format(facts), "fits": reason is None, "why": reason}


def _format(facts: ModelFacts) -> str:
    """How the weights are stored: the quantization, else the type of most bytes."""
    if facts.gguf is not None:
        return facts.gguf.file_type
    if facts.quantization is not None:
        return facts.quantization
    held: dict[str, int] = {}
    for tensor in facts.tensors:
        held[tensor.dtype] = held.get(tensor.dtype, 0) + tensor.nbytes
    return max(held, key=lambda name: held[name]).lower() if held else "none"


def _fits(row: dict[str, Any]) -> str:
    return {True: "yes", False: "no", None: "unknown"}[row["fits"]]


def rm(
    model: DownloadedModel,
    revision: Annotated[str | None, Option(metavar="REVISION", help="Branch, tag or commit (main).")] = None,
    every: Annotated[bool, Option("--all", help="Remove every revision, and unfinished downloads.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Remove a downloaded model from the Hub cache. Other revisions and shared files stay."""
    from snugvl.checkpoint.cached import removal, remove
    from snugvl.checkpoint.locate import POCKET

    if model == POCKET:
        raise InputError("pocket is built in and part of snugvl; it can't be removed")
    if every and revision is not None:
        raise typer.BadParameter("--all removes every revision; leave --revision out")
    what = removal(model, revision=revision, every=every)
    _check_idle(model)
    size = format_size(what.nbytes)
    if not yes:
        _confirm(f"Remove {model} ({size}) from {what.folder}?")
    remove(what)
    say(f"{model} is removed, which frees {size}{_stays(what.others)}")


def _stays(others: Sequence[str]) -> str:
    if not others:
        return ""
    stay = "1 other revision of it stays" if len(others) == 1 else f"{len(others)} other revisions of it stay"
    return f"; {stay} (--all removes every one)"


def _check_idle(model: str) -> None:
    from snugvl.cli.running import running

    for server in running():
        if server.model == model:
            raise InputError(
                f"{model} is served at {server.url} (process {server.pid}); stop that server first"
            )


def _confirm(question: str) -> None:
    """Ask for confirmation.

    Raises:
        typer.BadParameter: there is no terminal to ask on.
        typer.Exit: with 1, after a no.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; say --yes to remove without being asked")
    if not typer.confirm(printable(question), err=True):
        say("nothing was removed")
        raise typer.Exit(1)
