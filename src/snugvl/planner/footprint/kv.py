"""Memory of keys and values, and of recurrent states.

    full attention     2 · kv_heads · head_dim · bytes · tokens           tokens rounded up to blocks of 16
    sliding window     the same with min(tokens, window)                  where the engine honours windows
    recurrent state    matrices in float32 and a few inputs of a convolution, per sequence

Summed over layers, times concurrency. Image tokens are tokens like any other. Our own engine allocates states
for all sequences that may run, and one more for rows that only pad a CUDA graph. Its prefix cache also needs
state snapshots: as many as the solver finds room for.
Source: the attention layers themselves; PagedAttention (https://arxiv.org/abs/2309.06180) for the blocks.

Windows are honoured by vLLM, whose blocks have a module of their own (`engines/vllm/footprint.py`), and by
transformers: its cache keeps `window - 1` tokens of such a layer (`DynamicSlidingWindowLayer`), but as a view
of the prompt's own keys and values, which live until the first new token replaces them. So one prompt's are
whole meanwhile.

`kv_bytes` and `kv_component` ask the engine's `rules.py`, which is written with the other functions.
"""

from functools import lru_cache

from snugvl.core.config import RECENT
from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines import rules_of
from snugvl.planner.footprint.total import LARGE_ROUND_BYTES, Component, up
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import BLOCK_TOKENS, Settings


def kv_bytes(model: Inventory, settings: Settings, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens on one GPU, with its states."""
    return rules_of(settings.engine).kv_bytes(model, settings, tokens)


def blocks_bytes(model: Inventory, settings: Settings, tokens: int, *, windows: bool = False) -> int:
    """Bytes of one sequence in blocks of `BLOCK_TOKENS`, with its states. `windows`: whether layers with
    sliding windows keep no more than the window."""
    rounded = up(tokens, BLOCK_TOKENS)
    total = 0
    for layer, count in model.kv_layers:
        kept = min(rounded, layer.window) if windows and layer.window is not None else rounded
        total += layer.token_values(settings.tensor_parallel) * settings.kv_itemsize * kept * count
    return -(-total // settings.pipeline_parallel) + state_bytes(model, settings)


def block_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of one block of keys and values in our own engine."""
    return blocks_bytes(model, settings, BLOCK_TOKENS) - state_bytes(model, settings)


def state_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of one sequence's recurrent states on one GPU; 0 for models without."""
    return _state_bytes(model, settings.itemsize, settings.tensor_parallel, settings.pipeline_parallel)


@lru_cache(maxsize=1024)
def _state_bytes(model: Inventory, itemsize: int, tensor: int, pipeline: int) -> int:
    total = sum(-(-layer.state(itemsize) // tensor) * count for layer, count in model.kv_layers)
    return -(-total // pipeline)


def state_component(model: Inventory, settings: Settings) -> Component:
    """The component of recurrent states that our engine allocates at start; others' are in the KV cache."""
    each = state_bytes(model, settings)
    slots = settings.sequences + 1
    why = f"{slots} × {each / 2**20:,.1f} MiB, whatever their context"
    return Component(Kind.STATES.value, Kind.STATES, each * slots, why=why)


def predictor_component(model: Inventory, settings: Settings) -> Component:
    """The component of each sequence's last hidden states, from which our engine's predictor goes on."""
    each = model.facts.text.hidden_size * settings.itemsize if model.facts.predicts else 0
    rows = settings.sequences * RECENT + 1
    return Component(
        "predictor: hidden states", Kind.OTHER, each * rows, why=f"{RECENT} tokens of each sequence"
    )


def checkpoint_component(model: Inventory, settings: Settings) -> Component:
    """The component of state snapshots, from which the next turn, or another question, may start."""
    each, count = state_bytes(model, settings), settings.state_snapshots
    why = f"{count} × {each / 2**20:,.1f} MiB, where the next turn can start"
    return Component("recurrent state, kept", Kind.STATES, each * count, why=why)


def pool_component(model: Inventory, settings: Settings) -> Component:
    """The component of our own engine's KV pool, which all requests share."""
    tokens, each = settings.kv_tokens, block_bytes(model, settings) // BLOCK_TOKENS
    nbytes = settings.kv_blocks * block_bytes(model, settings)
    why = f"{tokens:,} tokens × {each / 1024:,.0f} KiB ({settings.kv_name})"
    return Component(Kind.CACHE.value, Kind.CACHE, up(nbytes, LARGE_ROUND_BYTES), why=why)


def sequences_component(model: Inventory, settings: Settings, *, windows: bool = False) -> Component:
    """The component of all sequences at full context; `windows`: some layers keep their windows alone."""
    nbytes = kv_bytes(model, settings, settings.context) * settings.concurrency
    sequences = f"{settings.concurrency} × " if settings.concurrency > 1 else ""
    kept = f"{sequences}{settings.context:,} tokens"
    each = block_bytes(model, settings) // BLOCK_TOKENS
    why = f"{kept} × {each / 1024:,.0f} KiB ({settings.kv_name})"
    if windows:
        why = f"{kept}, of layers with windows no more than the window ({settings.kv_name})"
    return Component(Kind.CACHE.value, Kind.CACHE, up(nbytes, LARGE_ROUND_BYTES), why=why)
