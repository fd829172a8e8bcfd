"""Keys and values, and recurrent states.

    full attention     2 · kv_heads · head_dim · bytes · tokens           tokens rounded up to blocks of 16
    sliding window     the same with min(tokens, window)                  where the engine honours windows
    recurrent state    matrices in float32 and a few inputs of a convolution, per sequence

Summed over layers, times concurrency. Image tokens are tokens like any other. Our own engine allocates states
for all sequences that may run, and one more for rows that only fill up a CUDA graph: a row of their own. Its
prefix cache needs copies of states besides, checkpoints: as many as the solver finds room for.
Source: the attention layers themselves; PagedAttention (https://arxiv.org/abs/2309.06180) for the blocks.

Windows are honoured by vLLM, whose blocks are a chapter of their own (`planner/engines/vllm/pages.py`), and by transformers:
its cache keeps `window - 1` tokens of such a layer (`DynamicSlidingWindowLayer`), but as a view of the
prompt's own keys and values, which live until the first new token replaces them. So one prompt's are whole
meanwhile.
"""

from dataclasses import replace

from snugvl.core.config import RECENT
from snugvl.planner.engines.vllm.pages import pages, sequence_bytes
from snugvl.planner.footprint.allocator import LARGE_ROUND_BYTES, up
from snugvl.planner.footprint.component import Component
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import BLOCK_TOKENS, Settings


def kv_bytes(model: Inventory, settings: Settings, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens on one GPU, with its states."""
    if settings.engine == "vllm":
        return sequence_bytes(model, settings, tokens)
    rounded = up(tokens, BLOCK_TOKENS)
    total = 0
    for layer, count in model.kv_layers:
        kept = rounded
        if layer.window is not None and settings.engine == "transformers":
            kept = min(rounded, layer.window)
        heads = -(-layer.kv_heads // settings.tensor_parallel)
        total += 2 * heads * layer.head_dim * settings.kv_itemsize * kept * count
    return -(-total // settings.pipeline_parallel) + state_bytes(model, settings)


def block_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of one block of keys and values of our own engine."""
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


def predictor_component(model: Inventory, settings: Settings) -> Component:
    """The last hidden states of each sequence, from which our engine's predictor goes on."""
    each = model.facts.text.hidden_size * settings.itemsize if model.facts.predicts else 0
    rows = settings.sequences * RECENT + 1
    return Component("predictor: hidden states", each * rows, why=f"{RECENT} tokens of each sequence")


def checkpoint_component(model: Inventory, settings: Settings) -> Component:
    """States that our own engine keeps where the next turn, or another question, may start."""
    each, count = state_bytes(model, settings), settings.state_checkpoints
    why = f"{count} × {each / 2**20:,.1f} MiB, where the next turn can start"
    return Component("recurrent state, kept", each * count, why=why)


def kv_component(model: Inventory, settings: Settings) -> Component:
    """Ours: the pool. Others': all sequences at their full context; vLLM keeps one block for itself."""
    if settings.engine == "native":
        tokens = settings.kv_tokens
        each = block_bytes(model, settings) // BLOCK_TOKENS
        nbytes = settings.kv_blocks * block_bytes(model, settings)
        why = f"{tokens:,} tokens × {each / 1024:,.0f} KiB ({settings.kv_name})"
        return Component("KV cache", up(nbytes, LARGE_ROUND_BYTES), why=why)
    nbytes = kv_bytes(model, settings, settings.context) * settings.concurrency
    if settings.engine == "vllm":
        nbytes += pages(model, settings).block_bytes
    sequences = f"{settings.concurrency} × " if settings.concurrency > 1 else ""
    return Component("KV cache", up(nbytes, LARGE_ROUND_BYTES), why=sequences + _why(model, settings))


def unwindowed_component(model: Inventory, settings: Settings) -> Component:
    """transformers, while a prompt is computed: what layers with windows hold of it beyond their windows."""
    whole = replace(settings, engine="native")
    beyond = kv_bytes(model, whole, settings.context) - kv_bytes(model, settings, settings.context)
    return Component(
        "keys and values beyond windows", beyond, "prefill", why="of one prompt, until its first new token"
    )


def _why(model: Inventory, settings: Settings) -> str:
    """The formula with its numbers."""
    kept = f"{settings.context:,} tokens"
    if settings.engine == "vllm":
        pool = pages(model, settings)
        blocks = pool.blocks(settings.context, settings.chunk)
        return f"{kept}, {blocks:,} blocks of {pool.block_bytes / 2**20:,.2f} MiB ({settings.kv_name})"
    if any(layer.window for layer, _ in model.kv_layers) and settings.engine == "transformers":
        return f"{kept}, of layers with windows no more than the window ({settings.kv_name})"
    each = block_bytes(model, settings) // BLOCK_TOKENS
    return f"{kept} × {each / 1024:,.0f} KiB ({settings.kv_name})"
