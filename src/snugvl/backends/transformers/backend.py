"""A loaded model of transformers as a backend: put together, asked (`engine.py`), measured."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from snugvl.backends.hosted import Hosted, PreparedRequest
from snugvl.backends.measure import Meter
from snugvl.backends.place import TargetDevice
from snugvl.backends.transformers.engine import TransformersEngine
from snugvl.backends.transformers.network import HOST_WEIGHTS, split_bytes
from snugvl.backends.transformers.opening import Checkpoint, Inputs, tokenizer_of
from snugvl.backends.transformers.prompts import Preparer
from snugvl.backends.transformers.resolution import Resolution, resolution_of
from snugvl.backends.transformers.sampling import GenerationRequest, ModelPrompt
from snugvl.backends.transformers.sizes import Costs, fit, longest
from snugvl.checkpoint.locate import training_of
from snugvl.core.formats import BITSANDBYTES
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Capabilities
from snugvl.core.options import LoadOptions
from snugvl.core.service import Load
from snugvl.engine.claims import DeviceClaim
from snugvl.hardware import host
from snugvl.inputs.reasoning import PLAIN, ThinkingDefault


class TransformersBackend(Hosted[ModelPrompt]):
    """A loaded model on transformers: see `Hosted`."""

    def __init__(
        self,
        engine: TransformersEngine,
        preparer: Preparer,
        capabilities: Capabilities,
        weights: Mapping[str, int],
        thinking: ThinkingDefault = PLAIN,
    ) -> None:
        """`weights`: bytes of the weights, by row of the ledger."""
        super().__init__(preparer, capabilities, thinking)
        self._engine = engine
        self._weights = dict(weights)
        # The engine's thread doesn't hold this backend: dropped without `close`, it ends that, also at exit.
        weakref.finalize(self, engine.close)

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        return {"weights": sum(self._weights.values()), **self._engine.memory()}

    def stats(self) -> Load:
        """Load and counters of the engine."""
        return self._engine.stats()

    def close(self) -> None:
        """End all requests with an error and stop the engine. Safe to call twice."""
        self._engine.close()
        self._grammars.close()

    def _begin(self, ready: PreparedRequest[ModelPrompt]) -> Callable[[], object]:
        request = GenerationRequest(
            ready.prompt,
            ready.request.sampling,
            ready.stop_ids,
            ready.receiver,
            ready.deadline,
            ready.grammar,
        )
        self._engine.submit(request)
        return request.drop


@dataclass(frozen=True, slots=True, eq=False)
class LoadedParts:
    """The loaded model, with its settings.

    Attributes:
        placed: module to device, or None for plain host memory.
        parameters: of the files; 0 where they don't tell.
    """

    checkpoint: Checkpoint
    inputs: Inputs
    network: Any
    place: TargetDevice
    dtype: torch.dtype
    placed: Mapping[str, str] | None
    options: LoadOptions
    parameters: int
    thinking: ThinkingDefault = PLAIN
    claim: DeviceClaim | None = None

    @property
    def device(self) -> torch.device:
        """The device of inputs: the GPU, unless nothing is there."""
        on_gpu = self.placed is None or str(self.place.device) in self.placed.values()
        return self.place.device if on_gpu else torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A backend, with the bytes of its weights and of the plan, by row of the ledger."""

    backend: TransformersBackend
    weights: Mapping[str, int]
    planned: dict[str, int]


def assemble(parts: LoadedParts) -> Made:
    """Decide how long a conversation may be, and start the engine.

    Raises:
        DoesNotFit: no room for a context beside the weights.
        RequestError: the context or the pixels that were asked for can't be had.
        CheckpointError, UnsupportedModel: the tokenizer or the chat template can't be used.
    """
    config, options = parts.checkpoint.config, parts.options
    sees = parts.checkpoint.sees and not options.language_only
    processor = parts.inputs.processor.image_processor if sees else None
    resolution = resolution_of(processor, options.max_pixels) if sees else None
    decided = fit(Costs.of(config, parts.dtype), longest(config), options.context, _free(parts), sees=sees)
    tokenizer = tokenizer_of(parts.checkpoint.folder, parts.inputs.tokenizer, _ends(parts.network))
    engine = TransformersEngine(
        parts.network,
        parts.device,
        parts.dtype,
        context=decided.context,
        max_waiting=options.max_waiting,
        claim=parts.claim,
    )
    preparer = Preparer(parts.checkpoint, parts.inputs, tokenizer, resolution, engine.vocab_size)
    held = split_bytes(parts.network, parts.placed, parts.device)
    capabilities = _capabilities(parts, preparer, resolution, decided.context)
    backend = TransformersBackend(engine, preparer, capabilities, held, parts.thinking)
    planned: dict[str, int] = {Kind.CACHE: decided.cache_bytes, Kind.WORKSPACE: decided.workspace_bytes}
    return Made(backend, held, planned)


def _capabilities(
    parts: LoadedParts, preparer: Preparer, resolution: Resolution | None, context: int
) -> Capabilities:
    config, quantization = parts.checkpoint.config, parts.checkpoint.quantization
    weights = parts.options.weights
    named = str(parts.dtype).removeprefix("torch.")
    if weights in BITSANDBYTES:
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
        language_only=parts.options.language_only and parts.checkpoint.sees,
        most_images=parts.options.images,
        training=training_of(parts.checkpoint.name),
        counts_by_size=False,
    )


def _free(parts: LoadedParts) -> int:
    """Bytes that may still be taken, now that the weights are in place."""
    place = parts.place
    if parts.device.type == "cpu":
        free = host.memory().free_bytes - place.margin_bytes
        if place.limit_bytes is not None:
            free = min(free, place.limit_bytes - sum(split_bytes(parts.network, None, parts.device).values()))
        return free
    return place.usable_bytes - place.context_bytes - torch.cuda.memory_reserved(parts.device)


def _ends(network: Any) -> frozenset[int]:
    """Tokens that end an answer, as the generation settings say."""
    value = network.generation_config.eos_token_id
    listed = value if isinstance(value, list) else [value]
    return frozenset(token for token in listed if isinstance(token, int))


class TransformersMeter:
    """Measures one model of transformers in this process.

    What differs from our engine: the cache is as large as what is in it, and weights may wait in host memory
    beside a GPU, where they are no part of its sum.
    """

    def __init__(self, meter: Meter, host_weights: int, planned: Mapping[str, int]) -> None:
        self._meter = meter
        self._host_weights = host_weights
        self._planned = planned

    def read(self, memory: Mapping[str, int], load: Load) -> Ledger:
        """The ledger now."""
        ledger = self._meter.read(memory, load)
        rows = [
            replace(row, used_bytes=row.measured_bytes) if row.kind is Kind.CACHE else row
            for row in ledger.rows
            if row.kind is not Kind.ENCODINGS  # they live inside a forward: workspace
        ]
        if self._host_weights:
            rows.append(
                LedgerRow(HOST_WEIGHTS, self._planned.get(HOST_WEIGHTS), self._host_weights, kind=Kind.HOST)
            )
        return replace(ledger, rows=tuple(rows))
