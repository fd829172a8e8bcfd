"""`snugvl ask`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from snugvl.cli import batch, options, render, sources
from snugvl.cli.task import Job, Task, each


def ask(
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... QUESTION",
            help="Files, folders, quoted globs or - for standard input; then the question.",
        ),
    ],
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="The question; then every argument is an image.")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Show all images in one question instead of asking of each.")
    ] = False,
    recursive: options.Recursive = False,
    model: options.Model = None,
    server: options.Server = None,
    api_key: options.ApiKey = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = "auto",
    kv_cache: options.KVCache = "auto",
    context: options.Context = None,
    max_pixels: options.MaxPixels = None,
    memory: options.Memory = None,
    backend: options.Backend = "auto",
    tower: options.Tower = "auto",
    embedding: options.Embedding = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    json: options.Json = False,
    output: options.Output = None,
    resume: options.Resume = False,
    quiet: options.Quiet = False,
) -> None:
    """Ask a question about images: of each, or of all of them together."""
    arguments, asked = split(images, question)
    names = sources.expand(arguments, recursive=recursive)
    generation = options.Generation(max_tokens, temperature, seed)
    sampling = generation.sampling()
    task = Task(
        "ask",
        {"question": asked, **generation.chosen()},
        run=lambda model, _, images: model.ask(images, asked, sampling=sampling, max_pixels=max_pixels),
        text=render.words,
        stream=lambda model, images: model.stream_ask(
            images, asked, sampling=sampling, max_pixels=max_pixels
        ),
    )
    loaded = options.ModelChoice(
        model, device, dtype, context, max_pixels, server, api_key, weights, memory, backend,
        trust_remote_code, tower, kv_cache, embedding,
    )  # fmt: skip
    batch.do(
        task,
        [Job(tuple(names), together=True)] if together else each(names),
        loaded,
        options.OutputChoice(json, output, resume, quiet),
    )


def split(arguments: Sequence[str], question: str | None) -> tuple[list[str], str]:
    """The images and the question, which is the last argument unless --question gave it.

    Raises:
        typer.BadParameter: one of the two is missing.
    """
    images = list(arguments)
    if question is None:
        question = images.pop()
        if question == sources.STDIN or Path(question).exists():
            raise typer.BadParameter(
                f"the question is missing: {question} is an image; put the question last, in quotes"
            )
        if not images:
            raise typer.BadParameter(f"which image? Give it before the question {question!r}")
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    return images, question.strip()
