"""`snugvl bench`: how fast a server answers, at which load, in how much memory."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from snugvl.cli import options
from snugvl.cli.terminal import SOME_FAILED, ended_like_ctrl_c, printable, say, write
from snugvl.core.folders import write_named
from snugvl.core.options import LoadOptions, typed
from snugvl.errors import EngineError

if TYPE_CHECKING:
    from snugvl.bench.measure import BenchmarkRun
    from snugvl.bench.report import BenchmarkReport
    from snugvl.bench.result import BenchmarkResult

Tell = Callable[[str], None]
MOST_SIDE = 20_000
SEED = 1000

Model = Annotated[
    str | None,
    Argument(
        metavar="MODEL",
        envvar="SNUGVL_MODEL",
        help="What to serve, as for snugvl serve; with --server a name that it serves.",
    ),
]
ServeOptions = Annotated[
    list[str] | None,
    Argument(metavar="SERVE_OPTION", help="More options of snugvl serve, after -- and a MODEL."),
]
Server = Annotated[
    str | None, options.server_option("Measure a running server of OpenAI's API instead of starting one.")
]
Compare = Annotated[
    tuple[Path, Path] | None, Option(metavar="A.json B.json", help="Print the ratios of two saved results.")
]
Levels = Annotated[
    str,
    Option(
        metavar="CLIENTS:REQUESTS,...",
        callback=lambda value: value if _levels(value) else None,
        help="How many clients send how many requests.",
    ),
]
Image = Annotated[
    str,
    Option(
        metavar="WIDTHxHEIGHT",
        callback=lambda value: value if _size(value) else None,
        help="Size of each picture in pixels.",
    ),
]
NoImage = Annotated[bool, Option("--no-image", help="Send text only.")]
SameImage = Annotated[bool, Option("--same-image", help="One picture for all, so that caches may help.")]
PromptTokens = Annotated[
    int | None, Option(min=1, help="About how many tokens of text a request has; default: one question.")
]
MaxTokens = Annotated[int, Option(min=1, help="Tokens of each answer, where the server takes ignore_eos.")]
Repeat = Annotated[int, Option(min=1, help="How often all levels run.")]
Warmup = Annotated[int, Option(min=0, help="Requests of each client before a level, not counted.")]
Seed = Annotated[
    int | None,
    Option(min=0, help="Seed of pictures and texts; without: new ones for a --server, else always the same."),
]
Timeout = Annotated[float, Option(min=0.001, help="Seconds without an answer after which a request fails.")]
Json = Annotated[Path | None, Option(metavar="FILE", help="Save every request's times and more.")]


@options.grouped(options.load_options("bench"))
def bench(
    model: Model = None,
    *,
    serve_options: ServeOptions = None,
    server: Server = None,
    api_key: options.ApiKey = None,
    levels: Levels = "1:8,8:32,32:96",
    image: Image = "1024x1024",
    no_image: NoImage = False,
    same_image: SameImage = False,
    prompt_tokens: PromptTokens = None,
    max_tokens: MaxTokens = 128,
    repeat: Repeat = 1,
    warmup: Warmup = 1,
    seed: Seed = None,
    timeout: Timeout = 300.0,
    load: LoadOptions,
    json: Json = None,
    compare: Compare = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure a server: first token, inter-token latency, throughput, memory, start.

    Without --server it starts `snugvl serve MODEL`, measures it and stops it. With --server it measures any
    server of OpenAI's API. Ctrl+C prints what was measured until then.
    """
    if compare is not None:
        _compare(*compare, saving=json is not None)
        return
    from snugvl.bench.measure import BenchmarkRun, BenchmarkSettings
    from snugvl.bench.workload import Workload

    chosen = [word for name, value in load.said().items() for word in typed(name, value)]
    start = [*chosen, *(serve_options or ())]
    if server is not None and start:
        raise typer.BadParameter(
            f"{' '.join(start)} can't be chosen for a server that runs ({server}); leave it or --server out"
        )
    if model is not None and model.startswith("-"):
        raise typer.BadParameter(f"{model} stands where the MODEL belongs: snugvl bench MODEL -- {model} ...")
    seed = seed if seed is not None else (int(time.time()) if server else SEED)
    picture = None if no_image else _size(image)
    workload = Workload(picture, prompt_tokens, max_tokens, same_image, seed)
    settings = BenchmarkSettings(
        server, api_key, model, tuple(start), _levels(levels), workload, repeat, warmup, timeout
    )
    _check_folder(json)
    tell: Tell = (lambda text: None) if quiet else say
    _measure(BenchmarkRun(settings, tell), json, tell)


def _measure(measurement: BenchmarkRun, json: Path | None, tell: Tell) -> None:
    """Run the measurement, print and save its result; the exit code says how it went."""
    interrupt = None
    with ended_like_ctrl_c():
        try:
            measurement.run()
        except KeyboardInterrupt as error:
            interrupt = error
    result = measurement.result
    if result is not None and (result.runs or interrupt is None):
        _put(result, json, tell)
    if interrupt is not None:
        say("interrupted")  # Typer makes an exit code of it, without a word
        raise interrupt
    assert result is not None
    bad = [record for record in result.records if record.error is not None]
    if bad and len(bad) == len(result.records):
        raise EngineError(f"every request failed: {bad[0].error}: {bad[0].message}")
    if bad:
        raise typer.Exit(SOME_FAILED)


def _put(result: BenchmarkResult, json: Path | None, tell: Tell) -> None:
    from snugvl.bench.report import report

    _keep(result)
    if json is not None:
        from snugvl.bench.result import to_json

        write_named(json, to_json(result))
        tell(f"every request's times are in {json}")
    _print(report(result))


def _keep(result: BenchmarkResult) -> None:
    """Keep the first level's speed for `snugvl doctor --report`, where the server was started for it."""
    from snugvl.bench.result import METRICS
    from snugvl.core.ledger import keep_last_start, last_start_file

    if result.start is not None and result.levels:
        level = result.levels[0]
        figures = {f"{metric.name}, {metric.unit}": metric.shown(level) for metric in METRICS}
        about = {"when": result.taken_at, "clients": level.clients}
        keep_last_start(last_start_file(), "speed", about | figures)


def _print(found: BenchmarkReport) -> None:
    from snugvl.bench.report import as_text, print_to_terminal

    if sys.stdout.isatty():
        print_to_terminal(found, sys.stdout)
    else:
        write(printable(as_text(found)))


def _compare(first: Path, second: Path, *, saving: bool) -> None:
    if saving:
        raise typer.BadParameter("--compare measures nothing that --json could keep")
    from snugvl.bench.report import compare
    from snugvl.bench.result import load

    _print(compare(load(first), load(second), (str(first), str(second))))


def _check_folder(path: Path | None) -> None:
    """Refuse a missing folder before the measurement, whose result would be lost."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{path} can't be written: name a file in a folder that is there")


def _levels(text: str) -> tuple[tuple[int, int], ...]:
    """`1:8,8:32` as pairs."""
    how = "--levels is CLIENTS:REQUESTS,... such as 1:8,8:32"
    found: list[tuple[int, int]] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", part)
        if match is None:
            raise typer.BadParameter(f"{part!r} is not a level: {how}")
        clients, requests = int(match[1]), int(match[2])
        if not 0 < clients <= requests:
            raise typer.BadParameter(f"{part!r}: at least one client, and a request for each; {how}")
        if clients in (level[0] for level in found):
            raise typer.BadParameter(f"{clients} clients come twice; --repeat measures again")
        found.append((clients, requests))
    return tuple(found)


def _size(text: str) -> tuple[int, int]:
    """`1024x768` as a pair."""
    match = re.fullmatch(r"([0-9]{1,5})[x×]([0-9]{1,5})", text.strip().lower())
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE):
        raise typer.BadParameter(
            f"--image {text!r} is not a size; write WIDTHxHEIGHT, such as 1024x768, up to {MOST_SIDE:,} each"
        )
    return width, height
