"""The model behind a command: loaded here, or behind a server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from snugvl.cli.options import DEFAULT_MODEL, ModelChoice
from snugvl.cli.sources import STDIN
from snugvl.cli.stderr import say
from snugvl.cli.task import Job
from snugvl.errors import EngineUnavailable

if TYPE_CHECKING:
    from snugvl.client import Client
    from snugvl.client.pictures import ImageSource
    from snugvl.model import Model

POCKET_NOTE = (
    "pocket, the built-in model, knows drawn shapes, pictograms and words, not photographs; "
    "for those: --model FOLDER_OR_ID, such as Qwen/Qwen3-VL-2B-Instruct"
)


def resolve(choice: ModelChoice) -> ModelChoice:
    """The choice with the model's name, which a server has to be asked for.

    Raises:
        SnugvlError: the server can't be reached or refuses.
    """
    if choice.model is not None:
        return choice
    if choice.server is None:
        return replace(choice, model=DEFAULT_MODEL)
    from snugvl.client import Client

    with Client(choice.server, api_key=choice.api_key) as client:
        names = client.models()
    if not names:
        raise EngineUnavailable(f"{choice.server} serves no model; name one with --model")
    return replace(choice, model=names[0])


def load_model(choice: ModelChoice) -> Model | Client:
    """Load the chosen model, or connect to the server that has it."""
    import snugvl

    if choice.server is not None:
        return snugvl.Client(choice.server, api_key=choice.api_key, model=choice.name)
    from snugvl.loading import load_with

    return load_with(replace(choice.load, model=choice.name))


def reader(choice: ModelChoice) -> Callable[[Job], list[ImageSource]]:
    """How the pictures of a job are read: decoded for a model here, as they are for a server."""
    return _uploads if choice.server is not None else _decoded


def note_about(choice: ModelChoice, *, quiet: bool) -> None:
    """Tell a person at a terminal what the default model is for."""
    local = choice.server is None
    if local and choice.model == DEFAULT_MODEL and not quiet and sys.stderr.isatty():
        say(POCKET_NOTE)


def _decoded(job: Job) -> list[ImageSource]:
    from snugvl.model import decode

    return [decode(sys.stdin.buffer if name == STDIN else name) for name in job.names]


def _uploads(job: Job) -> list[ImageSource]:
    from snugvl.client.pictures import URL_SCHEMES, read_bytes

    return [
        name if name.startswith(URL_SCHEMES) else read_bytes(sys.stdin.buffer if name == STDIN else name)
        for name in job.names
    ]
