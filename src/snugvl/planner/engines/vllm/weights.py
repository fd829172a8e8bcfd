"""Weights as vLLM's classes hold them."""

from collections import defaultdict
from dataclasses import replace

from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines.vllm.tensors import loading_bytes, rotary_caches, tensors_of
from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.weights import KINDS, LABELS, part_why
from snugvl.planner.inventory import PARTS, Inventory, Part
from snugvl.planner.settings import Settings


def vllm_weight_components(model: Inventory, settings: Settings) -> tuple[Component, ...]:
    """What vLLM makes of the tensors on one GPU. The rounding is that of the rotary caches, too.

    "Model loading took" has the rounding in it; what is left over in segments is free for small activations,
    but no segment with a tensor in it goes back to the driver.
    """
    nbytes: dict[Part, int] = defaultdict(int)
    for tensor in tensors_of(model, settings):
        nbytes[tensor.part] += tensor.nbytes
    share = settings.tensor_parallel * settings.pipeline_parallel
    parts = [
        Component(LABELS[part], KINDS[part], nbytes[part], why=part_why(model, part, settings, share))
        for part in PARTS
        if nbytes[part]
    ]
    allocator = loading_bytes(model, replace(settings, chunk=0))
    rounding = allocator.allocated - sum(nbytes.values()) - sum(rotary_caches(model))
    left_over = allocator.reserved - allocator.allocated
    return (
        *parts,
        Component(
            "allocator rounding",
            Kind.ROUNDING,
            rounding,
            basis="predicted",
            why="multiples of 512 bytes and 2 MiB",
        ),
        Component(
            "left over in segments", Kind.OTHER, left_over, basis="predicted", why="segments of 2 and 20 MiB"
        ),
    )
