"""The decoder at work in plain torch: ours on a CPU, and transformers'. (Ours on a GPU: `engines/native`.)

With h hidden, i intermediate, q = heads · head_dim, k = kv_heads · head_dim, d = head_dim, 16-bit values.

Prefill per token, MLP being the peak (traced on our network and on transformers 5.23):
    native           8i + 4h + 4d
    transformers     6i + 8h + 4d + 16, and per image token 10h + 2 · merge² · width of the vision tower

On an H200 the latter is 0 to 0.5 % off in 18 cells (2B and 4B, three images, three contexts).

Where SDPA has no fused kernel for grouped heads (GPUs before Ampere) it computes all scores in float32: per
(new token × cached token) 8 · heads + 3 bytes, per cached token 8q + 12k + 8, per new token
4h + 14q + 6k + 4d.
"""

from typing import Final

from snugvl.core.formats import LOW_BIT
from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines.native import hybrid
from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.images import largest_image
from snugvl.planner.footprint.kv import kv_component, unwindowed_component
from snugvl.planner.footprint.vision import features_per_token
from snugvl.planner.inventory import Inventory, widths
from snugvl.planner.settings import Settings

WIDE_ROWS: Final = 4096  # of `layers/linear.py`
WIDE_BYTES: Final = 16  # a code of few bits as int32, as float32, less its zero point, times its scale
LOGIT_BYTES: Final = 2 + 4  # as computed, and as float32
# transformers' cache grows by concatenation, which leaves holes: 8 to 30 % of cache and workspace on an H200.
FRAGMENTATION_PERCENT: Final = 30


def native_prefill(model: Inventory, tokens: int, itemsize: int = 2) -> int:
    """Workspace of `tokens` new tokens that see only themselves (fused attention)."""
    w = widths(model)
    return tokens * itemsize * (4 * w.i + 2 * w.h + 2 * w.d)


def native_chunk_attention(model: Inventory, new: int, context: int) -> int:
    """Workspace of a chunk of `new` tokens over `context` tokens in the cache, in plain torch."""
    w = widths(model)
    scores = new * context * (8 * w.heads + 3)
    return scores + context * (8 * w.q + 12 * w.k + 8) + new * (4 * w.h + 14 * w.q + 6 * w.k + 4 * w.d)


def widened(model: Inventory, settings: Settings) -> int:
    """What reading low-bit weights without kernels takes: some thousand rows of a matrix at a time."""
    if settings.weights not in LOW_BIT:
        return 0
    w = widths(model)
    return WIDE_ROWS * max(w.h, w.q, w.i) * (WIDE_BYTES + settings.itemsize)


def gathered_keys(model: Inventory, settings: Settings, itemsize: int) -> int:
    """Keys and values of one layer, gathered for a decode step with a fused kernel."""
    return settings.kv_tokens * 2 * widths(model).k * itemsize


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


def transformers_components(model: Inventory, settings: Settings, *, fused: bool = True) -> list[Component]:
    """Workspaces of prefill and decode with transformers.

    Args:
        fused: the GPU has a fused attention kernel for grouped heads (compute capability 8.0 and later).
    """
    image = largest_image(model, settings.max_pixels)
    images = image.tokens * settings.images
    wide = settings.itemsize // 2  # the formulas are of 16-bit values
    prefill = transformers_prefill(model, settings.context, min(images, settings.context)) * wide
    if not fused:
        prefill += native_chunk_attention(model, settings.context, settings.context)
    # Requests run one after the other (`backends/transformers/engine.py`).
    why = f"{settings.context:,} tokens at once, without chunks"
    beyond = unwindowed_component(model, settings)
    dynamic = prefill + kv_component(model, settings).nbytes + beyond.nbytes
    holes = dynamic * FRAGMENTATION_PERCENT // 100
    share = f"{FRAGMENTATION_PERCENT} % of KV cache and workspace"
    return [
        Component("fragmentation", Kind.OTHER, holes, "prefill", "predicted", share),
        beyond,
        Component("prefill workspace", Kind.WORKSPACE, prefill, "prefill", "predicted", why),
        Component("logits", Kind.WORKSPACE, logits(model, 1) * wide, "prefill"),
        Component(
            "decode workspace",
            Kind.WORKSPACE,
            transformers_decode(model, settings) * wide,
            "decode",
            "predicted",
            "KV growth",
        ),
        Component("logits", Kind.WORKSPACE, logits(model, settings.concurrency) * wide, "decode"),
    ]


def native_cpu_components(model: Inventory, settings: Settings) -> list[Component]:
    """Workspaces of our engine on a CPU, where torch's attention takes masks and grouped heads: no scores are
    stored."""
    itemsize = settings.itemsize
    chunk = min(settings.chunk, settings.kv_tokens)
    wide = widened(model, settings)
    attention = hybrid.attention_bytes(model, itemsize, chunk, kernels=False)
    layer = max(native_prefill(model, chunk, itemsize), attention)
    prefill, why = layer + wide, f"{chunk:,} tokens of a chunk"
    if model.facts.vision is not None and settings.images:
        prefill += chunk * (1 + model.facts.vision.deepstack_levels) * widths(model).h * itemsize
    rows = settings.sequences
    decode = gathered_keys(model, settings, itemsize) + wide
    return [
        Component("prefill workspace", Kind.WORKSPACE, prefill, "prefill", "predicted", why),
        Component("logits", Kind.WORKSPACE, logits(model, rows), "prefill"),
        Component(
            "decode workspace",
            Kind.WORKSPACE,
            decode,
            "decode",
            "predicted",
            f"{settings.kv_tokens:,} tokens",
        ),
        Component("logits", Kind.WORKSPACE, logits(model, rows), "decode"),
    ]
