"""Keys and values, and recurrent states.

    full attention     2 · kv_heads · head_dim · bytes · tokens           tokens rounded up to blocks of 16
    sliding window     the same with min(tokens, window)                  where the engine honours windows
    recurrent state    state_bytes per sequence

Summed over layers, times concurrency. Image tokens are tokens like any other.
Source: the attention layers themselves; PagedAttention (https://arxiv.org/abs/2309.06180) for the blocks.
"""

from snugvl.planner.footprint.allocator import LARGE_ROUND_BYTES, up
from snugvl.planner.footprint.component import Component
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import BLOCK_TOKENS, KV_BYTES, Settings


def kv_bytes(model: Inventory, settings: Settings, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens on one GPU."""
    itemsize = 4 if settings.itemsize == 4 else KV_BYTES[settings.kv]
    rounded = up(tokens, BLOCK_TOKENS)
    total = states = 0
    for layer, count in model.kv_layers:
        kept = rounded
        if layer.window is not None and settings.engine == "vllm":
            # A step writes its whole chunk before old blocks are given back.
            kept = min(rounded, up(layer.window + settings.chunk, BLOCK_TOKENS))
        heads = -(-layer.kv_heads // settings.tensor_parallel)
        total += 2 * heads * layer.head_dim * itemsize * kept * count
        states += -(-layer.state_bytes // settings.tensor_parallel) * count
    return -(-(total + states) // settings.pipeline_parallel)


def kv_component(model: Inventory, settings: Settings) -> Component:
    """The pool for all sequences at their full context. vLLM keeps one block for itself."""
    per_sequence = kv_bytes(model, settings, settings.context)
    nbytes = per_sequence * settings.concurrency
    if settings.engine == "vllm":
        nbytes += kv_bytes(model, settings, BLOCK_TOKENS)
    sequences = f"{settings.concurrency} × " if settings.concurrency > 1 else ""
    each = kv_bytes(model, settings, BLOCK_TOKENS) // BLOCK_TOKENS
    return Component(
        "KV cache",
        up(nbytes, LARGE_ROUND_BYTES),
        why=f"{sequences}{settings.context:,} tokens × {each / 1024:,.0f} KiB ({settings.kv_name})",
    )
