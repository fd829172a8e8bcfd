"""A loaded network, its processor and what is free made into a backend."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from snugvl.backends.protocol import Capabilities
from snugvl.backends.transformers.backend import TransformersBackend
from snugvl.backends.transformers.engine import TransformersEngine
from snugvl.backends.transformers.opening import Checkpoint, Inputs
from snugvl.backends.transformers.placement import split_bytes
from snugvl.backends.transformers.prompts import Preparer
from snugvl.backends.transformers.resolution import Resolution, resolution_of
from snugvl.backends.transformers.sizes import Costs, fit, longest
from snugvl.backends.transformers.tokenizer import tokenizer_of
from snugvl.hardware import host
from snugvl.place import Place


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What was loaded, and how.

    Attributes:
        placed: module to device, or None for plain main memory.
        parameters: of the files; 0 where they don't tell.
    """

    checkpoint: Checkpoint
    inputs: Inputs
    network: Any
    place: Place
    dtype: torch.dtype
    placed: Mapping[str, str] | None
    language_only: bool
    parameters: int

    @property
    def device(self) -> torch.device:
        """Where inputs go: the GPU, unless nothing is there."""
        on_gpu = self.placed is None or str(self.place.device) in self.placed.values()
        return self.place.device if on_gpu else torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A backend, its weights and what else is planned, in bytes by row of the ledger."""

    backend: TransformersBackend
    weights: Mapping[str, int]
    planned: dict[str, int]


def assemble(
    parts: Parts,
    *,
    context: int | None,
    max_pixels: int | None,
    max_waiting: int | None,
    weights: str,
) -> Made:
    """Decide what runs at once, and start the engine.

    Raises:
        DoesNotFit: no room for a context beside the weights.
        RequestError: `context` or `max_pixels` can't be had.
        CheckpointError, UnsupportedModel: the tokenizer or the chat template can't be used.
    """
    config = parts.checkpoint.config
    sees = parts.checkpoint.sees and not parts.language_only
    resolution = resolution_of(parts.inputs.processor.image_processor, max_pixels) if sees else None
    decided = fit(
        Costs.of(config, parts.dtype), longest(config), context, _free(parts), parts.device.type, sees=sees
    )
    limits = decided.limits if max_waiting is None else replace(decided.limits, max_waiting=max_waiting)
    tokenizer = tokenizer_of(parts.checkpoint.folder, parts.inputs.tokenizer, _ends(parts.network))
    preparer = Preparer(parts.checkpoint, parts.inputs, tokenizer, resolution, _vocabulary(parts.network))
    engine = TransformersEngine(parts.network, limits, parts.device, parts.dtype)
    held = split_bytes(parts.network, parts.placed, parts.device)
    capabilities = _capabilities(parts, preparer, resolution, limits.context, weights)
    backend = TransformersBackend(engine, preparer, capabilities, held)
    planned = {"KV cache": decided.cache_bytes, "workspace": decided.workspace_bytes}
    return Made(backend, held, planned)


def _capabilities(
    parts: Parts, preparer: Preparer, resolution: Resolution | None, context: int, weights: str
) -> Capabilities:
    config, quantization = parts.checkpoint.config, parts.checkpoint.quantization
    named = str(parts.dtype).removeprefix("torch.")
    if weights in ("int8", "int4"):
        stored = f"{weights} (bitsandbytes)"
    elif quantization is not None and not parts.checkpoint.widened:
        stored = str(quantization.get("quant_method", "quantised"))
    else:
        stored = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[named]
    return Capabilities(
        model=parts.checkpoint.name,
        context_tokens=context,
        images=resolution is not None,
        video=preparer.videos,
        max_pixels=0 if resolution is None else resolution.max_pixels,
        min_pixels=0 if resolution is None else resolution.smallest,
        engine="transformers",
        device="CPU" if parts.device.type == "cpu" else parts.place.name,
        dtype=named,
        weights=stored,
        architecture=(getattr(config, "architectures", None) or [type(parts.network).__name__])[0],
        parameters=parts.parameters,
        tools=preparer.shows_tools,
        tool_form=preparer.tool_form,
        most_characters=preparer.tokenizer.most_characters(context),
        language_only=parts.language_only and parts.checkpoint.sees,
    )


def _free(parts: Parts) -> int:
    """Bytes that may still be taken, now that the weights are in place."""
    place = parts.place
    if parts.device.type == "cpu":
        free = host.memory().free_bytes - place.margin_bytes
        if place.limit_bytes is not None:
            free = min(free, place.limit_bytes - sum(split_bytes(parts.network, None, parts.device).values()))
        return free
    return place.usable_bytes - place.context_bytes - torch.cuda.memory_reserved(parts.device)


def _vocabulary(network: Any) -> int:
    """Width of the logits."""
    head = network.get_output_embeddings()
    if head is not None and hasattr(head, "out_features"):
        return int(head.out_features)
    return int(network.config.get_text_config(decoder=True).vocab_size)


def _ends(network: Any) -> frozenset[int]:
    """Tokens that end an answer, as the generation settings say."""
    value = network.generation_config.eos_token_id
    listed = value if isinstance(value, list) else [value]
    return frozenset(token for token in listed if isinstance(token, int))
