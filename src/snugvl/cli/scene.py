"""`snugvl scene`."""

from snugvl.cli import batch, options, render, sources
from snugvl.cli.task import Task, each


def scene(
    images: options.Images,
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
    """Analyse images: summary, setting, objects with counts and positions, text, relations."""
    generation = options.Generation(max_tokens, temperature, seed)
    sampling = generation.sampling()
    task = Task(
        "scene",
        generation.chosen(),
        run=lambda model, _, images: model.scene(images[0], sampling=sampling, max_pixels=max_pixels),
        text=render.scene,
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
