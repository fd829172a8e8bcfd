"""`snugvl caption`."""

from typing import Annotated, Literal

import typer

from snugvl.cli import batch, options, render, sources
from snugvl.cli.task import Task, each


def caption(
    images: options.Images,
    detail: Annotated[
        Literal["short", "detailed"], typer.Option("--detail", help="One sentence, or all there is to say.")
    ] = "short",
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
    """Describe images."""
    generation = options.Generation(max_tokens, temperature, seed)
    sampling = generation.sampling()
    task = Task(
        "caption",
        {"detail": detail, **generation.chosen()},
        run=lambda model, _, images: model.caption(
            images[0], detail=detail, sampling=sampling, max_pixels=max_pixels
        ),
        text=render.words,
        stream=lambda model, images: model.stream_caption(
            images[0], detail=detail, sampling=sampling, max_pixels=max_pixels
        ),
    )
    loaded = options.ModelChoice(
        model, device, dtype, context, max_pixels, server, api_key, weights, memory, backend,
        trust_remote_code, tower, kv_cache, embedding,
    )  # fmt: skip
    batch.do(
        task,
        each(sources.expand(images, recursive=recursive)),
        loaded,
        options.OutputChoice(json, output, resume, quiet),
    )
