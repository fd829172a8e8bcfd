"""Workspace of transformers, and weights in host memory that are copied to the GPU for every forward pass.

With h hidden, i intermediate, q = heads · head_dim, k = kv_heads · head_dim, d = head_dim, 16-bit values, a
prompt takes per token, MLP being the peak (traced on transformers 5.23)

    6i + 8h + 4d + 16, and per image token 10h + 2 · merge² · width of the vision tower

On an H200 this is 0 to 0.5 % off in 18 cells (2B and 4B, three images, three contexts). Where SDPA has no
fused kernel for grouped heads (GPUs before Ampere) it computes all scores in float32: per (new token × cached
token) 8 · heads + 3 bytes, per cached token 8q + 12k + 8, per new token 4h + 14q + 6k + 4d.

accelerate (`hooks.AlignDevicesHook`) copies each module's weights to the GPU before its forward and drops
them after it: nothing is kept, nothing is fetched ahead. So on the GPU the largest decoder layer that is
offloaded has to fit beside the rest (its matrices come one by one, but the allocator keeps their places),
or the largest matrix of the vision tower. Keys and values stay on the GPU.

The embedding and lm_head stay on the GPU: a byte of them costs as much as a byte of a layer, and an embedding
would cross whole for the few rows that are read.
"""

import re
from functools import lru_cache
from math import prod
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.planner.footprint.kv import blocks_bytes
from snugvl.planner.footprint.total import Component, predicted
from snugvl.planner.footprint.vision import features_per_token, largest_image
from snugvl.planner.inventory import Inventory, widths
from snugvl.planner.settings import Settings

LAYER: Final = re.compile(r"^(?P<module>.*\blayers\.(?P<number>\d+))\.")
LOGIT_BYTES: Final = 2 + 4  # as computed, and as float32
# transformers' cache grows by concatenation, which leaves holes: 8 to 30 % of cache and workspace on an H200.
FRAGMENTATION_PERCENT: Final = 30
HOST_PROCESS_BYTES: Final = 1 << 30  # assumed: Python, torch and CUDA's libraries in host memory


@lru_cache(maxsize=64)
def layer_elements(model: Inventory) -> tuple[int, ...]:
    """Number of weights of each decoder layer."""
    found = [0] * model.facts.text.num_layers
    for tensor in model.facts.tensors:
        named = LAYER.match(tensor.name)
        if named and tensor.loaded and tensor.role not in ("vision", "connector"):
            found[int(named["number"])] += prod(tensor.shape)
    return tuple(found)


def layer_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of the decoder layers that are offloaded: the last ones."""
    kept = model.facts.text.num_layers - settings.offloaded
    return sum(layer_elements(model)[kept:]) * settings.itemsize


def vision_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of the vision tower where it is offloaded."""
    if settings.vision != "cpu" or settings.language_only:
        return 0
    return sum(group.elements * group.count for group in model.groups if group.part == "vision") * (
        settings.itemsize
    )


def host_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of host memory that the process takes."""
    return layer_bytes(model, settings) + vision_bytes(model, settings) + HOST_PROCESS_BYTES


def offload_components(model: Inventory, settings: Settings) -> list[Component]:
    """Components of the place on the GPU that offloaded weights pass through."""
    passing = 0
    if settings.offloaded:
        kept = model.facts.text.num_layers - settings.offloaded
        passing = max(layer_elements(model)[kept:]) * settings.itemsize
    if vision_bytes(model, settings):
        largest = max(group.elements for group in model.groups if group.part == "vision")
        passing = max(passing, largest * settings.itemsize)
    why = "the largest layer that crosses from host memory"
    return [predicted("place of offloaded weights", Kind.OTHER, passing, why=why)]


def plain_attention(model: Inventory, new: int, context: int) -> int:
    """Bytes of workspace of `new` tokens over `context` tokens in the cache, without a fused kernel."""
    w = widths(model)
    scores = new * context * (8 * w.heads + 3)
    return scores + context * (8 * w.q + 12 * w.k + 8) + new * (4 * w.h + 14 * w.q + 6 * w.k + 4 * w.d)


def transformers_prefill(model: Inventory, tokens: int, image_tokens: int) -> int:
    """Bytes of workspace of a whole prompt: transformers computes it in one step."""
    w = widths(model)
    images = image_tokens * features_per_token(model) if image_tokens else 0
    return tokens * (6 * w.i + 8 * w.h + 4 * w.d + 16) + images


def logits(model: Inventory, rows: int) -> int:
    """Bytes of the logits of the `rows` positions that sample."""
    return rows * model.facts.text.vocab_size * LOGIT_BYTES


def unwindowed_component(model: Inventory, settings: Settings) -> Component:
    """The component of keys and values beyond layers' windows, held while a prompt is computed."""
    whole = blocks_bytes(model, settings, settings.context)
    beyond = whole - blocks_bytes(model, settings, settings.context, windows=True)
    return Component(
        "keys and values beyond windows",
        Kind.OTHER,
        beyond,
        "prefill",
        why="of one prompt, until its first new token",
    )


def transformers_components(
    model: Inventory, settings: Settings, cache_bytes: int, *, fused: bool = True
) -> list[Component]:
    """Components of workspace of prefill and decode with transformers.

    Args:
        cache_bytes: bytes of keys and values.
        fused: whether the GPU has a fused attention kernel for grouped heads (compute capability 8.0 on).
    """
    image = largest_image(model, settings.max_pixels)
    images = image.tokens * settings.images
    wide = settings.itemsize // 2  # the formulas are of 16-bit values
    prefill = transformers_prefill(model, settings.context, min(images, settings.context)) * wide
    if not fused:
        prefill += plain_attention(model, settings.context, settings.context)
    # Requests run one after the other (`backends/transformers/engine.py`).
    why = f"{settings.context:,} tokens at once, without chunks"
    beyond = unwindowed_component(model, settings)
    dynamic = prefill + cache_bytes + beyond.nbytes
    # `torch.cat` of a layer's keys beside the old ones, for every sequence of the batch.
    growth = settings.concurrency * settings.context * widths(model).k * 2 * wide
    holes = dynamic * FRAGMENTATION_PERCENT // 100
    share = f"{FRAGMENTATION_PERCENT} % of KV cache and workspace"
    return [
        predicted("fragmentation", Kind.OTHER, holes, "prefill", why=share),
        beyond,
        predicted("prefill workspace", Kind.WORKSPACE, prefill, "prefill", why=why),
        Component("logits", Kind.WORKSPACE, logits(model, 1) * wide, "prefill"),
        predicted("decode workspace", Kind.WORKSPACE, growth, "decode", why="KV growth"),
        Component("logits", Kind.WORKSPACE, logits(model, settings.concurrency) * wide, "decode"),
    ]
