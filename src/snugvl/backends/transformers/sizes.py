"""How many tokens fit beside the weights, from a configuration of transformers of any family.

For families that the planner knows, `snugvl plan` decides context and placement before anything is loaded.
This is for all others, and for refusals with a reason.

    cache       2 · heads · head_dim bytes a value, of every layer with attention; windows count in full
    workspace   6 · intermediate + 8 · hidden bytes a token of the prompt in 16 bit (transformers computes a
                prompt at once; see `planner/engines/transformers/footprint.py`), and an eighth of what is
                free for the vision tower, whose need no configuration tells
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from snugvl.checkpoint.safetensors import read_tensors, weight_files
from snugvl.core.sizes import format_size
from snugvl.errors import CheckpointError, DoesNotFit, RequestError

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
            2 * layers * kv_heads * head_dim * dtype.itemsize,
            (6 * inner + 8 * hidden) * dtype.itemsize // 2,
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
    """The context for `free_bytes` beside the weights.

    Args:
        most: tokens that the model's positions reach.
        wished: tokens of one choice, as asked for.

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
