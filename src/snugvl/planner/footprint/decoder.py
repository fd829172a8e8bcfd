"""The decoder at work: prefill, decode, logits.

With h hidden, i intermediate, q = heads · head_dim, k = kv_heads · head_dim, d = head_dim, 16-bit values.

Prefill per token, MLP being the peak (traced on our network and on transformers 5.23):
    native           8i + 6h + 4d
    transformers     6i + 8h + 4d + 16, and per image token 10h + 2 · merge² · width of the vision tower

On an H200 the latter is 0 to 0.5 % off in 18 cells (2B and 4B, three images, three contexts).

Attention of a chunk over a cached prefix is plain torch today, and SDPA has no fused kernel for a mask with
grouped heads: it computes all scores in float32. Per (new token × cached token) 8 · heads + 3 bytes, per
cached token 8q + 12k + 8, per new token 4h + 14q + 6k + 4d. Decode: 12(q + k) + 4 · heads + 16 per cached
token of each sequence. A paged kernel (issue 5) changes `native_chunk_attention` and `native_decode` alone.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.images import largest_image
from snugvl.planner.footprint.kv import kv_component
from snugvl.planner.footprint.vision import features_per_token
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

LOGIT_BYTES: Final = 2 + 4  # as computed, and as float32
# transformers' cache grows by concatenation, which leaves holes: 8 to 30 % of cache and workspace on an H200.
FRAGMENTATION_PERCENT: Final = 30


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of the decoder's vectors, in values."""

    h: int
    i: int
    q: int
    k: int
    d: int
    heads: int


@lru_cache(maxsize=256)
def widths(model: Inventory) -> Widths:
    """The widest layer counts: Gemma 3's and hybrids' layers differ."""
    text = model.facts.text
    layer = max((layer for layer, _ in model.kv_layers), key=lambda layer: layer.kv_heads * layer.head_dim)
    return Widths(
        text.hidden_size,
        text.intermediate_size,
        text.num_heads * layer.head_dim,
        layer.kv_heads * layer.head_dim,
        layer.head_dim,
        text.num_heads,
    )


def native_prefill(model: Inventory, tokens: int, itemsize: int = 2) -> int:
    """Workspace of `tokens` new tokens that see only themselves (fused attention)."""
    w = widths(model)
    return tokens * itemsize * (4 * w.i + 3 * w.h + 2 * w.d)


def native_chunk_attention(model: Inventory, new: int, context: int) -> int:
    """Workspace of a chunk of `new` tokens over `context` tokens in the cache, in plain torch."""
    w = widths(model)
    scores = new * context * (8 * w.heads + 3)
    return scores + context * (8 * w.q + 12 * w.k + 8) + new * (4 * w.h + 14 * w.q + 6 * w.k + 4 * w.d)


def native_decode(model: Inventory, sequences: int, context: int) -> int:
    """Workspace of one token for each of `sequences`, in plain torch."""
    w = widths(model)
    return sequences * context * (12 * (w.q + w.k) + 4 * w.heads + 16)


def gathered_keys(model: Inventory, settings: Settings, itemsize: int) -> int:
    """Keys and values of one layer, gathered for a decode step with a fused kernel."""
    return settings.concurrency * settings.context * 2 * widths(model).k * itemsize


def transformers_prefill(model: Inventory, tokens: int, image_tokens: int) -> int:
    """Workspace of a whole prompt: transformers doesn't chunk."""
    w = widths(model)
    images = image_tokens * features_per_token(model) if image_tokens else 0
    return tokens * (6 * w.i + 8 * w.h + 4 * w.d + 16) + images


def transformers_decode(model: Inventory, settings: Settings) -> int:
    """`torch.cat` of a layer's keys beside the old ones, for every sequence of the batch."""
    return settings.concurrency * settings.context * widths(model).k * 2


def logits(model: Inventory, rows: int) -> int:
    """Logits of the `rows` positions that sample."""
    return rows * model.facts.text.vocab_size * LOGIT_BYTES


def decoder_components(
    model: Inventory, settings: Settings, *, fused: bool = True, cpu: bool = False
) -> list[Component]:
    """Prefill and decode of native and transformers (vLLM: `vllm.py`).

    `fused`: the GPU has a fused attention kernel for grouped heads (compute capability 8.0 and later).
    `cpu`: torch's kernel for CPUs takes masks and grouped heads.
    """
    if settings.engine == "native":
        return _native(model, settings, fused, cpu)
    image = largest_image(model, settings.max_pixels)
    images = image.tokens * settings.images
    prefill = transformers_prefill(model, settings.context, min(images, settings.context))
    if not fused:
        prefill += native_chunk_attention(model, settings.context, settings.context)
    why = f"{settings.context:,} tokens at once, without chunks"
    dynamic = prefill * settings.concurrency + kv_component(model, settings).nbytes
    holes = dynamic * FRAGMENTATION_PERCENT // 100
    share = f"{FRAGMENTATION_PERCENT} % of KV cache and workspace"
    return [
        Component("fragmentation", holes, "prefill", "predicted", share),
        Component("prefill workspace", prefill * settings.concurrency, "prefill", "predicted", why),
        Component("logits", logits(model, settings.concurrency), "prefill"),
        Component(
            "decode workspace", transformers_decode(model, settings), "decode", "predicted", "KV growth"
        ),
        Component("logits", logits(model, settings.concurrency), "decode"),
    ]


def _native(model: Inventory, settings: Settings, fused: bool, cpu: bool) -> list[Component]:
    itemsize = 4 if settings.weights == "fp32" else 2
    chunk = min(settings.chunk, settings.context * settings.concurrency)
    prefill, why = native_prefill(model, chunk, itemsize), f"{chunk:,} tokens of a chunk"
    alone = settings.concurrency == 1 and settings.context <= settings.chunk
    if not cpu and (not fused or not alone):
        # The longest chunk over the longest prefix. A lone prompt within one chunk never meets a prefix.
        new = min(settings.chunk, settings.context)
        attention = native_chunk_attention(model, new, settings.context)
        if attention > prefill:
            prefill, why = attention, f"scores of {new:,} new over {settings.context:,} cached tokens"
    if model.facts.vision is not None and settings.images:
        prefill += chunk * (1 + model.facts.vision.deepstack_levels) * widths(model).h * itemsize
    rows = settings.concurrency
    decode = gathered_keys(model, settings, itemsize) if cpu else native_decode(model, rows, settings.context)
    return [
        Component("prefill workspace", prefill, "prefill", "predicted", why),
        Component("logits", logits(model, rows), "prefill"),
        Component("decode workspace", decode, "decode", "predicted", f"{rows} × {settings.context:,} tokens"),
        Component("logits", logits(model, rows), "decode"),
    ]
