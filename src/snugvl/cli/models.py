"""`snugvl list` and `snugvl rm`: the models on this machine."""

from __future__ import annotations

import json as encoder
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugvl.cli.options import DownloadedModel
from snugvl.cli.stderr import printable, say
from snugvl.cli.stdout import write
from snugvl.core.sizes import format_size
from snugvl.errors import InputError, SnugvlError

if TYPE_CHECKING:
    from snugvl.checkpoint.cached import Cached
    from snugvl.checkpoint.facts import ModelFacts

Judge = Callable[["ModelFacts"], str | None]


def list_models(
    json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects, with sizes in bytes.")
    ] = False,
) -> None:
    """Show the models on this machine: size, format, whether each fits now, and where it is.

    GGUF files of the Hub cache, of Ollama and of LM Studio are among them; those two are never changed.
    """
    from snugvl.checkpoint.cached import Cached, cached
    from snugvl.checkpoint.gguf_files import hub_models, lm_studio_models, ollama_models
    from snugvl.checkpoint.locate import POCKET, locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.cli.pull import why_not

    pocket = Cached(POCKET, locate(POCKET), facts_of(POCKET).download_bytes)
    names = list(hub_models())
    others = {name.partition(":")[0] for name in names}
    ggufs = [_gguf(name) for name in (*names, *ollama_models(), *lm_studio_models())]
    models = [each for each in cached() if each.name not in others]
    rows = [_row(each, why_not) for each in (*models, *ggufs, pocket)]
    if json:
        write(encoder.dumps(rows, ensure_ascii=False, indent=2) + "\n")
        return
    cells = [(row["model"], format_size(row["bytes"]), row["format"] or "–", _fits(row)) for row in rows]
    titles = ("model", "size", "format", "fits now")
    widths = [max(len(line[index]) for line in (titles, *cells)) for index in range(3)]
    for line, row in zip((titles, *cells), (None, *rows), strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, (*widths, 0), strict=True)).rstrip()
        write(printable(text) + "\n")
        if row is not None:
            write(printable(f"    {row['folder']}") + "\n")
            if row["why"]:
                write(printable(f"    {row['why']}") + "\n")


def _gguf(name: str) -> Cached:
    """A GGUF model, wherever it is. One that is broken has no bytes; its row says why."""
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
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REVISION", help="Branch, tag or commit (main).")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Remove every revision, and unfinished downloads.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
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
    """Ask. No is no error of anybody's, but nothing was done.

    Raises:
        typer.BadParameter: nobody is there to be asked.
        typer.Exit: with 1, after a no.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; say --yes to remove without being asked")
    if not typer.confirm(printable(question), err=True):
        say("nothing was removed")
        raise typer.Exit(1)
