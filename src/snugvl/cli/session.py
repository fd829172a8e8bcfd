"""The model behind a command: loaded here, or behind a server.

It also keeps pocket, the built-in model, to its purpose: a note whenever it answers; photographs and videos
are refused. Pocket learned drawn scenes alone. A photograph it would describe as what its patches resemble
("two large gray rectangles"), so a picture that looks like one is refused before it is asked about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Final, NoReturn, cast

from snugvl.cli.options import DEFAULT_MODEL, ModelChoice
from snugvl.cli.records import Job
from snugvl.cli.sources import STDIN, as_video
from snugvl.cli.terminal import say
from snugvl.core.options import LoadOptions
from snugvl.core.training import read_training
from snugvl.errors import EngineUnavailable, ImageError, SnugvlError

if TYPE_CHECKING:
    from PIL.Image import Image

    from snugvl.client import Client
    from snugvl.core.messages import Picture
    from snugvl.inputs.given import VisualSource
    from snugvl.model import Model

KNOWS: Final = (
    "the built-in model: it knows drawn shapes, pictograms and words, not photographs; "
    "for those: --model FOLDER_OR_ID, such as Qwen/Qwen3-VL-2B-Instruct-FP8"
)
NOTE: Final = f"pocket answers, {KNOWS}"


def refuse_photograph(image: Image, name: str) -> None:
    """Refuse a picture that looks like a photograph, as pocket would answer with nonsense.

    Raises:
        ImageError: `name` looks like a photograph; says which model to download.
    """
    from snugvl.tasks.training import looks_like_a_photograph

    if looks_like_a_photograph(image):
        raise ImageError(
            f"{name} looks like a photograph. Pocket, the built-in model, can't describe photographs; "
            f"{_way_out()}"
        )


def refuse_video(name: str) -> NoReturn:
    """Refuse a video: pocket never learned any.

    Raises:
        ImageError: always; says which model to download.
    """
    raise ImageError(
        f"{name} is a video. Pocket, the built-in model, learned single pictures and can't describe videos; "
        f"{_way_out()}"
    )


def _way_out() -> str:
    """The sentence with the best model of the catalogue that fits this machine, and how to get it."""
    from snugvl.checkpoint.locate import POCKET
    from snugvl.cli.options import MachineChoice, machine_from
    from snugvl.planner.recommend import catalogue_candidates
    from snugvl.planner.solve import require, solve
    from snugvl.planner.wishes import Wishes

    try:
        best = require(solve(catalogue_candidates(), machine_from(MachineChoice()), Wishes()))
        name = best.option.model.name
    except SnugvlError:
        name = POCKET
    if name == POCKET:
        return "no model that can fits this machine: `snugvl plan` says what is missing"
    return f"download one that can: snugvl pull {name}"


def resolve(choice: ModelChoice, task: str | None) -> ModelChoice:
    """The choice with the model's name. Where neither model nor server was given: the snugvl server that runs
    on this machine, else the best model that is downloaded and fits, else pocket.

    Args:
        task: task that the model must be able to do, as `/v1/models` names it; None: to talk.

    Raises:
        SnugvlError: the server can't be reached or refuses; nothing fits.
    """
    if choice.server is not None and choice.model is None:
        choice = _first_of(choice)
    elif choice.model is None:
        choice = _running(choice, task)
    here = choice.server is None and choice.model is not None and of_drawings(choice.model)
    return replace(choice, pocket=True) if here else choice


def of_drawings(model: str) -> bool:
    """Whether a model of this machine learned drawings alone, as pocket and its copies did."""
    from snugvl.checkpoint.locate import training_of  # with readers of files, which --help needs not

    return training_of(model).drawings


def tell(choice: ModelChoice) -> None:
    """Print which model answers where it wasn't named, and what pocket is for."""
    for note in choice.notes:
        say(note)
    if choice.pocket:
        say(f"it is {KNOWS}" if choice.server and choice.notes else NOTE)


def _first_of(choice: ModelChoice) -> ModelChoice:
    """The choice of a named server, with the first name that it serves."""
    from snugvl.client import Client
    from snugvl.client.answers import model_names, understood

    assert choice.server is not None
    with Client(choice.server, api_key=choice.api_key) as client:
        answer = client.get("/v1/models")
    names = understood(model_names, answer)
    if not names:
        raise EngineUnavailable(f"{choice.server} serves no model; name one with --model")
    return replace(choice, model=names[0], pocket=read_training(answer["data"][0].get("training")).drawings)


def _running(choice: ModelChoice, task: str | None) -> ModelChoice:
    """The choice of this user's server that is ready for the task now, else of the best model here. Options
    of loading rule out a running server, which has loaded its model already."""
    asked = choice.load.said()
    pixels = asked.pop("max_pixels", None)
    if asked.keys() - {"purpose"}:  # detect says that by itself
        return _best_here(choice)
    from snugvl.cli import running

    passed = []
    for server in running.running():
        card, why = running.ready(server, task, choice.api_key)
        if why is not None:
            passed.append(f"{server.url} (snugvl serve, process {server.pid}) is passed over: it {why}")
            continue
        name = str(card["id"])
        note = f"{name} answers, which runs at {server.url} (snugvl serve, process {server.pid})"
        load = LoadOptions(max_pixels=pixels)
        pocket = read_training(card.get("training")).drawings
        return ModelChoice(name, server.url, choice.api_key, load, pocket, (*passed, note))
    return _best_here(replace(choice, notes=tuple(passed)))


def _best_here(choice: ModelChoice) -> ModelChoice:
    """The best model of the catalogue that is downloaded and fits here; pocket always is there."""
    from snugvl.cli.serve_plan import best_downloaded

    name = best_downloaded(choice.load)
    said = () if name == DEFAULT_MODEL else (f"{name} answers: it is the best that is downloaded and fits",)
    return replace(choice, model=name, notes=(*choice.notes, *said))


def load_model(choice: ModelChoice) -> Model | Client:
    """Load the chosen model, or connect to the server that has it."""
    import snugvl

    if choice.server is not None:
        return snugvl.Client(choice.server, api_key=choice.api_key, model=choice.name)
    from snugvl.loading import load_with

    return load_with(replace(choice.load, model=choice.name))


def reader(choice: ModelChoice, *, videos: bool = True) -> Callable[[Job], list[VisualSource]]:
    """A function that reads a job's pictures, and with `videos` its videos: decoded for a model here,
    unchanged for a server. It refuses photographs and videos for pocket."""
    read = _uploads if choice.server is not None else _videos if videos else _pictures
    return (lambda job: _drawn(job, read(job), videos)) if choice.pocket else read


def opener(choice: ModelChoice) -> Callable[[str], Image]:
    """A function that reads and decodes the picture of a name: see `reader`."""
    read = reader(choice, videos=False)
    return lambda name: cast("Picture", read(Job((name,)))[0]).image


def _drawn(job: Job, sources: list[VisualSource], videos: bool) -> list[VisualSource]:
    from snugvl.core.messages import Video
    from snugvl.inputs.given import look, still

    for name, source in zip(job.names, sources, strict=True):
        if isinstance(source, str):  # a URL is fetched by the server
            continue
        called = "standard input" if name == STDIN else name
        seen = look(source, called) if videos or isinstance(source, Video) else still(source, called)
        if isinstance(seen, Video):
            refuse_video(called)
        else:
            refuse_photograph(seen.image, called)
    return sources


def _pictures(job: Job) -> list[VisualSource]:
    from snugvl.inputs.given import still

    for name in job.names:
        if as_video(name):
            raise ImageError(f"{name} asks for a video, and one picture is looked at here; leave #video out")
    return [still(_file(name)) for name in job.names]


def _videos(job: Job) -> list[VisualSource]:
    from snugvl.inputs.given import look, video

    return [video(moving) if (moving := as_video(name)) else look(_file(name)) for name in job.names]


def _file(name: str) -> str | BinaryIO:
    return sys.stdin.buffer if name == STDIN else name


def _uploads(job: Job) -> list[VisualSource]:
    from snugvl.core.messages import Video
    from snugvl.inputs import pdf
    from snugvl.inputs.image import ImageLimits, read_source
    from snugvl.inputs.looks_like import URL_SCHEMES

    read = partial(read_source, limits=ImageLimits())
    return [
        name
        if name.startswith(URL_SCHEMES)
        else Video((), (), read(moving, name))  # the server decodes it
        if (moving := as_video(name))
        else pdf.page(name) or read(_file(name), name)
        for name in job.names
    ]
