"""Weights that stay in main memory and cross to the GPU for every forward pass, as accelerate does it.

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
from snugvl.planner.footprint.component import Component
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

LAYER: Final = re.compile(r"^(?P<module>.*\blayers\.(?P<number>\d+))\.")
HOST_PROCESS_BYTES: Final = 1 << 30  # assumed: Python, torch and CUDA's libraries in main memory


@lru_cache(maxsize=64)
def layer_elements(model: Inventory) -> tuple[int, ...]:
    """Weights of each decoder layer."""
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
    """Main memory that the process takes."""
    return layer_bytes(model, settings) + vision_bytes(model, settings) + HOST_PROCESS_BYTES


def offload_components(model: Inventory, settings: Settings) -> list[Component]:
    """The place on the GPU that offloaded weights pass through."""
    passing = 0
    if settings.offloaded:
        kept = model.facts.text.num_layers - settings.offloaded
        passing = max(layer_elements(model)[kept:]) * settings.itemsize
    if vision_bytes(model, settings):
        largest = max(group.elements for group in model.groups if group.part == "vision")
        passing = max(passing, largest * settings.itemsize)
    why = "the largest layer that crosses from main memory"
    return [Component("place of offloaded weights", Kind.OTHER, passing, basis="predicted", why=why)]
