"""A loaded model of transformers as a backend: put together, asked (`engine.py`), measured.

How many tokens fit beside the weights follows from a configuration of transformers of any family. For
families that the planner knows, `snugvl plan` decides context and placement before anything is loaded. This
is for all others, and for refusals with a reason.

    cache       2 · heads · head_dim bytes a value, of every layer with attention; windows count in full
    workspace   6 · intermediate + 8 · hidden bytes a token of the prompt in 16 bit (transformers computes a
                prompt at once; see `planner/engines/transformers/footprint.py`), and an eighth of what is
                free for the vision tower, whose need no configuration tells
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
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
from snugvl.checkpoint.locate import training_of
from snugvl.checkpoint.safetensors import read_tensors, weight_files
from snugvl.core.formats import BITSANDBYTES
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Capabilities
from snugvl.core.options import LoadOptions
from snugvl.core.service import Load
from snugvl.core.sizes import format_size
from snugvl.engine.claims import DeviceClaim
from snugvl.errors import CheckpointError, DoesNotFit, RequestError
from snugvl.hardware import host
from snugvl.inputs.reasoning import PLAIN, ThinkingDefault

CONTEXTS = (8192, 4096, 2048, 1024)  # tokens, tried in this order
_VISION_SHARE = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes a token costs: in the cache, and while its prompt is computed."""

    cache_bytes: int
    workspace_bytes: int

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> "Costs":
        """Costs by a configuration of transformers."""
        text = config.get_text_config(decoder=True)
        heads = _number(text, ("num_attention_heads", "n_head", "num_heads"), 1)
        hidden = _number(text, ("hidden_size", "n_embd", "d_model"), 1)
        kv_heads = _number(text, ("num_key_value_heads", "n_head_kv"), heads)
        head_dim = _number(text, ("head_dim",), hidden // heads)
        inner = _number(text, ("intermediate_size", "n_inner", "ffn_dim", "d_ff"), 4 * hidden)
        kinds = getattr(text, "layer_types", None) or ["attention"] * _number(
            text, ("num_hidden_layers", "n_layer", "num_layers"), 1
        )
        layers = sum("linear" not in kind and kind not in ("conv", "mamba") for kind in kinds)
        return cls(
            2 * layers * kv_heads * head_dim * dtype.itemsize, (6 * inner + 8 * hidden) * dtype.itemsize // 2
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """The context that was decided, and the bytes it comes to."""

    context: int
    cache_bytes: int
    workspace_bytes: int


def longest(config: Any) -> int:
    """Number of tokens that the model's positions reach."""
    text = config.get_text_config(decoder=True)
    return _number(text, ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 1 << 20)


def fit(costs: Costs, most: int, wished: int | None, free_bytes: int, *, sees: bool) -> Fit:
    """The context for `free_bytes` beside the weights. `most`: tokens that the model's positions reach;
    `wished`: tokens of one choice, as asked for.

    One that was asked for, as a plan does, only has to fit into the cache: who asked may know better what the
    rest needs, and a prompt that doesn't fit is refused when it comes.

    Raises:
        RequestError: more than the model's positions reach.
        DoesNotFit: not even the least context fits, or not the one asked for.
    """
    if wished is not None and not 1 <= wished <= most:
        raise RequestError(f"context must be 1 to {most:,} tokens, not {wished:,}", field="context")
    usable = max(free_bytes, 0) * (_VISION_SHARE - sees) // _VISION_SHARE
    a_token = costs.cache_bytes if wished else costs.cache_bytes + costs.workspace_bytes
    fits = usable // max(a_token, 1)
    tried = [wished] if wished else [min(context, most) for context in CONTEXTS]
    context = next((context for context in tried if context <= fits), None)
    if context is None:
        raise DoesNotFit(
            f"a context of {tried[-1]:,} tokens needs {format_size(tried[-1] * a_token)} beside the weights, "
            f"but {format_size(usable)} are left; {_way_out(int(fits))}"
        )
    return Fit(context, context * costs.cache_bytes, context * costs.workspace_bytes)


def parameters_in(folder: Path, config: Any) -> int:
    """Weights that are loaded, or 0 where they are in files of another format.

    Scales aren't weights, and a head that the model ties to its embedding is left out where files store it.
    """
    tied = getattr(config, "tie_word_embeddings", False)
    try:
        tensors = read_tensors(folder)
    except CheckpointError:
        return 0
    return sum(
        prod(entry.shape)
        for name, entry in tensors.items()
        if not name.endswith("_scale_inv") and not (tied and name == "lm_head.weight")
    )


def stored_bytes(folder: Path) -> int:
    """Bytes of the files that hold weights."""
    try:
        files: Iterable[Path] = weight_files(folder)
    except CheckpointError:
        files = [*folder.glob("*.bin"), *folder.glob("*.safetensors")]
    return sum(path.stat().st_size for path in files)


def _way_out(fits: int) -> str:
    if fits > 0:
        return f"a context of {fits:,} tokens fits"
    return "free some memory, keep layers in host memory (snugvl plan says how many), or take a smaller model"


def _number(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first of these fields that is a number."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), default)


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
        return {"weights": sum(self._weights.values()), **self._engine.memory()}

    def stats(self) -> Load:
        return self._engine.stats()

    def close(self) -> None:
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
    """The loaded model, with its settings. `placed`: module to device, or None for plain host memory;
    `parameters`: of the files; 0 where they don't tell."""

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
        RequestError: the context or the pixels that were asked for don't fit or exist.
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
        thinks=preparer.thinks,
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
    beside a GPU, where they are not part of its sum.
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
