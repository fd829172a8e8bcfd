"""`snugvl quantize`: a checkpoint of few bits, rounded for these pictures and texts."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from typer import Argument, Option

from snugvl.cli import options, session, sources
from snugvl.cli.options import ModelChoice
from snugvl.cli.terminal import INTERRUPTED, ended_like_ctrl_c, say, several, show, write
from snugvl.core.folders import read_small
from snugvl.core.formats import GROUPS, FewBits
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import format_size
from snugvl.core.wrapping import cells, columns, wrapped_command
from snugvl.errors import InputError

if TYPE_CHECKING:
    from snugvl.quantize.copying import CopyJob
    from snugvl.quantize.setup import Given, QuantizeJob, WrittenCheckpoint

DEFAULT_BITS: Final = 4.75
MAX_PIXELS: Final = 1_000_000
MOST_TEXT_BYTES: Final = 16 << 20
TEXTS: Final = (".txt", ".md", ".rst")
GGUF: Final = ".gguf"
LOADED = options.load_options("quantize")

Model = Annotated[str, options.model_argument("A folder or a Hub id, in 16 or 32 bits or FP8.")]


@options.grouped(LOADED)
def quantize(
    model: Model,
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to write, which isn't there yet.")],
    with_: Annotated[
        list[str] | None,
        Option(
            "--with",
            metavar="FILE",
            help="Pictures and texts (.txt, .md, .rst) to round for, or a folder of them; again for more.",
        ),
    ] = None,
    bits: Annotated[
        float | None, Option(help="Mean bits of a weight of the decoder's matrices, scales included (4.75).")
    ] = None,
    weights: Annotated[
        FewBits | None, Option(help="Instead of --bits: a copy of what this makes while loading.")
    ] = None,
    group: Annotated[
        int | None, Option(metavar="32|64|128", help="Columns that share a scale in 4 bits (64).")
    ] = None,
    format_: Annotated[
        Literal["snugvl", "gguf"],
        Option(
            "--format", help="Our own, or a GGUF with its mmproj, for llama.cpp and what stands on it, too."
        ),
    ] = "snugvl",
    *,
    load: LoadOptions,
    json: Annotated[bool, Option("--json", help="One JSON object with what was made.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a checkpoint of few bits, which starts without rounding.

    What few bits cost each matrix is measured; where they cost most, more take their place. With pictures or
    texts of yours, errors are compensated for what is like them.
    """
    if group is not None and group not in GROUPS:
        raise typer.BadParameter(f"--group must be 32, 64 or 128, not {group}")
    load = replace(load, model=model, max_pixels=load.max_pixels or MAX_PIXELS)
    if out.suffix == GGUF:
        raise typer.BadParameter(
            f"OUT is a folder; --format gguf writes {out.name} in it: name it {out.stem}"
        )
    as_gguf = format_ == "gguf"
    if as_gguf and group is not None:
        raise typer.BadParameter(
            "--group has no place beside --format gguf, whose blocks have their own groups"
        )
    from snugvl.quantize.copying import CopyJob
    from snugvl.quantize.setup import QuantizeJob

    if weights is None:
        given = _given(ModelChoice(model, pocket=session.of_drawings(model)), with_ or [])
        mean = DEFAULT_BITS if bits is None else bits
        job: Callable[..., QuantizeJob | CopyJob] = partial(
            QuantizeJob, load, out, given, bits=mean, group=group, as_gguf=as_gguf
        )
    else:
        for name, said in (("--bits", bits), ("--with", with_), ("--format gguf", as_gguf)):
            if said:
                raise typer.BadParameter(
                    f"{name} has no place beside --weights, whose copy is what {weights} is while loading"
                )
        job = partial(CopyJob, load, out, weights, group=group)
    try:
        with ended_like_ctrl_c():
            _quantize(load, out, job, json=json, quiet=quiet)
    except KeyboardInterrupt:
        say(f"interrupted; nothing was written to {out}")
        raise typer.Exit(INTERRUPTED) from None


def _quantize(
    load: LoadOptions, out: Path, job_of: Callable[..., QuantizeJob | CopyJob], *, json: bool, quiet: bool
) -> None:
    from snugvl.cli import compare

    with compare.progress(shown=not quiet) as tell, closing(job_of(tell=tell)) as job:
        if not quiet:
            for line in _plan_lines(job):
                say(line)
        made = job.run()
    if json:
        write(json_format.dumps({"model": load.model, "out": str(out)} | asdict(made)) + "\n")
    else:
        _show(out, made)


def _plan_lines(job: QuantizeJob | CopyJob) -> list[str]:
    return [
        f"{several(len(job.matrices), 'matrix')} will be rounded to {job.aim}",
        f"memory: it takes {format_size(job.plan.held_bytes)} of the {format_size(job.plan.usable_bytes)} "
        f"that may be used; it writes up to {format_size(job.plan.disk_bytes)}",
    ]


def _show(out: Path, made: WrittenCheckpoint) -> None:
    wide = f"; {made.wide} stay as they are, as their sides don't divide" if made.wide else ""
    counts = Counter(made.widths.values())
    found = ", ".join(f"{counts[bits]} in {bits} bits" for bits in sorted(counts))
    folder, width = shlex.quote(str(out)), columns(sys.stdout)
    show(f"{out}: {format_size(made.nbytes)}, {made.bits:.2f} bits a weight in memory and in its files", 2)
    show(f"{made.matrices} matrices: {found}{wide}", 2)
    for label, command in (
        ("check it later with", f"cd {folder} && sha256sum --check --quiet SHA256SUMS"),
        ("serve it with", f"snugvl serve {folder}"),
    ):
        whole = f"{label}: {command}"
        fits = width is None or cells(whole) <= width
        write(f"{whole}\n" if fits else f"{label}:\n{wrapped_command(command, width, 2)}\n")


def _given(choice: ModelChoice, names: Sequence[str]) -> Given:
    """The user's pictures and texts in these files and folders.

    Raises:
        InputError: a file isn't there, or a folder has nothing to read.
    """
    from snugvl.quantize.setup import Given

    texts = [path for name in names for path in _texts(Path(name))]
    pictured = [name for name in names if Path(name) not in texts and not _only_texts(Path(name))]
    if not pictured:
        return Given(texts=[(str(path), _text(path)) for path in texts])
    read = session.opener(choice)
    pictures = [(name, partial(read, name)) for name in sources.expand(pictured)]
    return Given(pictures, [(str(path), _text(path)) for path in texts])


def _texts(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.is_file() and each.suffix.lower() in TEXTS)
    return [path] if path.suffix.lower() in TEXTS else []


def _only_texts(path: Path) -> bool:
    """Whether a folder holds only texts, so that no pictures are looked for."""
    if not path.is_dir():
        return False
    pictures = any(each.suffix.lower() in sources.SUFFIXES for each in path.iterdir())
    return bool(_texts(path)) and not pictures


def _text(path: Path) -> str:
    try:
        return read_small(path, MOST_TEXT_BYTES).decode()
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text in UTF-8") from None
