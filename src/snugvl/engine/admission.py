"""Checks a request before any work: an invalid one is refused, and one that can't fit, with numbers.

Every request that passes can finish. The cache need of a request with `n` choices, in blocks (P = prompt
tokens, M = new tokens, drawn for n = 2):

    choice 0   ├── shared: P // block ──┤├─ own ──┤       shared + n · own ≤ blocks in the pool
    choice 1                             ├─ own ──┤       own = ⌈(P + M) / block⌉ - shared

`max_tokens=None` asks for no number, so it is never refused for its choices: it takes what the context
leaves to one choice, and choices that don't fit beside each other take turns.
"""

from dataclasses import replace
from itertools import accumulate

import torch

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.core.config import EngineConfig
from snugvl.engine.request import CheckedPrompt, EngineRequest, Sampled, VisionItem
from snugvl.errors import OutOfMemory, RequestError, RequestTooLarge
from snugvl.models.rope import mrope_positions


def check_prompt(request: EngineRequest, model: ModelConfig) -> CheckedPrompt:
    """Check a request's prompt; returns it with its positions and placeholders.

    Raises:
        RequestError: no tokens, token ids outside the vocabulary, patches that are not their grid's, or
            placeholders that are not the images'.
    """
    ids, vocab = request.prompt_ids, model.text.vocab_size
    if not ids:
        raise RequestError("the prompt is empty; it needs at least one token", field="prompt_ids")
    _check_ids("the prompt", ids, vocab, "prompt_ids")
    _check_ids("logit_bias", tuple(request.sampling.logit_bias), vocab, "logit_bias")
    vision, pads = model.vision, model.placeholders
    if vision is None and request.vision:
        raise RequestError("this model reads text alone; it takes no images and videos", field="vision")
    merge = 1 if vision is None else vision.spatial_merge_size
    for number, item in enumerate(request.vision):
        _check_item(number, item, merge, 0 if vision is None else vision.patch_dim)
    placeholders = tuple(index for index, token in enumerate(ids) if token in pads)
    sizes = [t * h * w // merge**2 for t, h, w in (item.grid_thw for item in request.vision)]
    if sum(sizes) != len(placeholders):
        raise RequestError(
            f"the prompt has {len(placeholders)} image and video placeholders, but its "
            f"{len(sizes)} images and videos have {sum(sizes)} tokens",
            field="vision",
        )
    try:
        positions, delta = mrope_positions(
            ids,
            [item.grid_thw for item in request.vision],
            placeholders=pads,
            merge_size=merge,
            time_steps=[item.time_step for item in request.vision],
        )
    except ValueError as error:
        raise RequestError(str(error), field="vision") from None
    starts = tuple(accumulate(sizes, initial=0))
    scores: list[Sampled] | None = [] if request.sampling.prompt_logprobs else None
    return CheckedPrompt(ids, positions, delta, request.vision, placeholders, starts, frozenset(ids), scores)


def _check_ids(where: str, ids: tuple[int, ...], vocab: int, field: str) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise RequestError(
                f"{where} has token id {token}; this model's vocabulary is 0 to {vocab - 1}", field=field
            )


def _check_item(number: int, item: VisionItem, merge: int, patch_dim: int) -> None:
    """Refuse an item whose patches don't match its grid, which would fail inside the network."""
    name = f"image or video {number + 1}"
    t, h, w = item.grid_thw
    if min(t, h, w) < 1 or h % merge or w % merge:
        raise RequestError(
            f"{name} has the grid {t}×{h}×{w}; its sides must be positive, rows and columns "
            f"multiples of {merge}",
            field="vision",
        )
    if not item.holds(t * h * w, patch_dim):
        raise RequestError(
            f"{name} has patches {list(item.patches.shape)} of {_name(item.patches.dtype)}; its grid "
            f"{t}×{h}×{w} needs [{t * h * w}, {patch_dim}] of float32",
            field="vision",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resolve_max_tokens(request: EngineRequest, prompt: CheckedPrompt, config: EngineConfig) -> int:
    """Number of new tokens that each choice may have.

    Raises:
        RequestTooLarge: prompt and new tokens, for all choices, exceed the context or the cache.
    """
    asked, n = request.sampling.max_tokens, request.sampling.n
    fits = _fitting(len(prompt), config, n if asked else 1)
    if fits >= (asked or 1):
        return asked or fits
    raise RequestTooLarge(
        _refusal(prompt, config, asked, n, fits), field="max_tokens" if fits > 0 else "prompt_ids"
    )


def max_tokens_now(
    request: EngineRequest, prompt: CheckedPrompt, config: EngineConfig, blocks: int | None
) -> int:
    """Most tokens that an answer can have while other programs leave the cache `blocks`; None: all of them.

    Raises:
        RequestTooLarge: it exceeds the whole cache.
        OutOfMemory: it exceeds what is left of it.
    """
    if blocks is None or blocks >= config.num_blocks:
        return resolve_max_tokens(request, prompt, config)
    try:
        return resolve_max_tokens(request, prompt, replace(config, num_blocks=blocks))
    except RequestTooLarge as error:
        resolve_max_tokens(request, prompt, config)
        raise OutOfMemory(
            f"out of memory: other programs have taken a part of the KV cache's memory; {error}, or try "
            "again when they have given it back"
        ) from None


def _fitting(prompt: int, config: EngineConfig, n: int) -> int:
    """New tokens that context and cache leave to each of `n` choices; negative: the prompt is too long."""
    shared = prompt // config.block_size
    own = (config.num_blocks - shared) // n
    return min(config.max_model_len, (shared + own) * config.block_size) - prompt


def _refusal(prompt: CheckedPrompt, config: EngineConfig, asked: int | None, n: int, fits: int) -> str:
    """The refusal's text: tokens needed, tokens there are, and what would fit."""
    image = f", {len(prompt.placeholders)} of them image tokens" if prompt.placeholders else ""
    new = f"{asked or 1} new" + (f" for each of {n} choices" if asked and n > 1 else "")
    return (
        f"the request needs {len(prompt) + (asked or 1)} tokens{' a choice' if n > 1 else ''}: "
        f"{len(prompt)} of the prompt{image}, and {new}; the context holds {config.max_model_len} and the "
        f"KV cache {config.cache_tokens}. What fits: {_advice(prompt, config, asked or 1, n, fits)}"
    )


def _advice(prompt: CheckedPrompt, config: EngineConfig, asked: int, n: int, fits: int) -> str:
    options = [f"max_tokens up to {fits}"] if fits > 0 else []
    choices = next((k for k in range(n - 1, 0, -1) if _fitting(len(prompt), config, k) >= asked), 0)
    if choices:
        options.append(f"n up to {choices}")
    alone = _fitting(len(prompt), config, 1)
    if options or alone > 0:
        return ", or ".join(options) or f"n 1 with max_tokens up to {alone}"
    most = min(config.max_model_len, config.cache_tokens) - 1
    smaller = ", or smaller or fewer images" if prompt.placeholders else ""
    return f"a prompt of up to {most} tokens{smaller}"
