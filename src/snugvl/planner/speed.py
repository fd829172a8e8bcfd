"""How fast it could be at best: a roofline, an upper bound that no engine reaches.

    decode tokens/s   ≤ bandwidth / (weights read for a token + keys and values of half the context)
    time to first     ≥ operations / peak, and ≥ weights / bandwidth, for the vision tower and for prefill

Operations: 2 per parameter and patch or token, and 4 · width · length² / 2 (causal) or · length² (vision) per
layer of attention. Source: Williams et al. 2009, https://doi.org/10.1145/1498765.1498785.
"""

from dataclasses import dataclass

from snugvl.hardware.machine import Gpu
from snugvl.planner.footprint.images import largest_image
from snugvl.planner.footprint.kv import kv_bytes
from snugvl.planner.footprint.weights import sizes
from snugvl.planner.footprint.widths import widths
from snugvl.planner.inventory import Inventory, Part
from snugvl.planner.settings import Settings

PROMPT_TEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Upper bounds for one request alone: tokens per second, seconds to the first token of one full image."""

    decode_tokens_per_s: float | None
    first_token_s: float | None


def roofline(model: Inventory, settings: Settings, gpu: Gpu | None) -> Speed:
    """The bounds on one GPU; None where its bandwidth or peak is unknown, or experts make it a guess."""
    if gpu is None or gpu.bandwidth is None:
        return Speed(None, None)
    routed = any(tensor.role == "expert" for tensor in model.facts.tensors)
    bandwidth = gpu.bandwidth * settings.tensor_parallel
    read = _bytes(model, settings, "decoder") + _head_bytes(model, settings)
    cache = kv_bytes(model, settings, settings.context // 2) * settings.gpus
    decode = None if routed else bandwidth / (read + cache)
    if gpu.bf16_flops is None or routed:
        return Speed(decode, None)
    peak = gpu.bf16_flops * settings.tensor_parallel
    image = largest_image(model, settings.max_pixels)
    tokens = min(settings.context, settings.images * image.tokens + PROMPT_TEXT_TOKENS)
    prefill = max(_prefill_flops(model, tokens) / peak, read / bandwidth)
    vision = settings.images * _vision_seconds(model, settings, image.patches, peak, bandwidth)
    return Speed(decode, prefill + vision)


def _prefill_flops(model: Inventory, tokens: int) -> float:
    w = widths(model)
    attention = 2.0 * w.q * tokens**2 * model.facts.text.num_layers
    return 2.0 * _elements(model, "decoder") * tokens + attention


def _vision_seconds(
    model: Inventory, settings: Settings, patches: int, peak: float, bandwidth: float
) -> float:
    vision = model.facts.vision
    if vision is None or not patches:
        return 0.0
    attention = 4.0 * vision.hidden_size * float(patches) ** 2 * vision.depth
    flops = 2.0 * _elements(model, "vision") * patches + attention
    return max(flops / peak, _bytes(model, settings, "vision") / bandwidth)


def _bytes(model: Inventory, settings: Settings, part: Part) -> int:
    return sum(size * count for size, count in sizes(model, settings, part))


def _head_bytes(model: Inventory, settings: Settings) -> int:
    """The output projection: the embedding itself where it is tied."""
    return _bytes(model, settings, "lm_head") or _bytes(model, settings, "embedding")


def _elements(model: Inventory, part: Part) -> int:
    return sum(
        group.elements * group.count for group in model.groups if group.part == part and group.kind != "scale"
    )
