"""Keys and values, and recurrent states.

    full attention     2 · kv_heads · head_dim · bytes · tokens           tokens rounded up to blocks of 16
    sliding window     the same with min(tokens, window)                  where the engine honours windows
    recurrent state    matrices in float32 and a few inputs of a convolution, per sequence

Summed over layers, times concurrency. Image tokens are tokens like any other. Our own engine allocates states
for all sequences that may run, and one more for rows that only fill up a CUDA graph: a row of their own.
Source: the attention layers themselves; PagedAttention (https://arxiv.org/abs/2309.06180) for the blocks.
"""

from snugvl.planner.footprint.allocator import LARGE_ROUND_BYTES, up
from snugvl.planner.footprint.component import Component
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import BLOCK_TOKENS, Settings


def kv_bytes(model: Inventory, settings: Settings, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens on one GPU, with its states."""
    rounded = up(tokens, BLOCK_TOKENS)
    total = 0
    for layer, count in model.kv_layers:
        kept = rounded
        if layer.window is not None and settings.engine == "vllm":
            # A step writes its whole chunk before old blocks are given back.
            kept = min(rounded, up(layer.window + settings.chunk, BLOCK_TOKENS))
        heads = -(-layer.kv_heads // settings.tensor_parallel)
        total += 2 * heads * layer.head_dim * settings.kv_itemsize * kept * count
    return -(-total // settings.pipeline_parallel) + state_bytes(model, settings)


def block_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of one block of keys and values on one GPU."""
    return kv_bytes(model, settings, BLOCK_TOKENS) - state_bytes(model, settings)


def state_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of one sequence's recurrent states on one GPU; 0 for models without."""
    total = 0
    for layer, count in model.kv_layers:
        total += -(-layer.state(settings.itemsize) // settings.tensor_parallel) * count
    return -(-total // settings.pipeline_parallel)


def state_component(model: Inventory, settings: Settings) -> Component:
    """Of our own engine, which allocates them at its start. Others keep them with the KV cache."""
    each = state_bytes(model, settings) if settings.engine == "native" else 0
    slots = settings.sequences + 1
    why = f"{slots} × {each / 2**20:,.1f} MiB, whatever their context"
    return Component("recurrent state", each * slots, why=why)


def kv_component(model: Inventory, settings: Settings) -> Component:
    """The pool for all sequences at their full context. vLLM keeps one block for itself."""
    states = state_bytes(model, settings)
    apart = states if settings.engine == "native" else 0
    per_sequence = kv_bytes(model, settings, settings.context) - apart
    nbytes = per_sequence * settings.concurrency
    if settings.engine == "vllm":
        nbytes += kv_bytes(model, settings, BLOCK_TOKENS)
    sequences = f"{settings.concurrency} × " if settings.concurrency > 1 else ""
    each = block_bytes(model, settings) // BLOCK_TOKENS
    return Component(
        "KV cache",
        up(nbytes, LARGE_ROUND_BYTES),
        why=f"{sequences}{settings.context:,} tokens × {each / 1024:,.0f} KiB ({settings.kv_name})",
    )
