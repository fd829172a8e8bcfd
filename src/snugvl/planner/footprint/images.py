"""The largest image under a pixel budget, in tokens and patches, by the model's own rule."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from snugvl.planner.inventory import Inventory

# Width : height of the images that are tried; the rule's rounding makes the shape matter a little.
SHAPES: Final = ((1, 1), (4, 3), (3, 2), (16, 9), (2, 1), (1, 2), (9, 16), (3, 4), (4, 1))
LONGEST: Final = 200  # times as long as wide, at most, in every rule that scales
HUGE: Final = 16384  # pixels of a side: beyond every rule's limit, so that the limit decides


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The largest image: prompt tokens and patches of the vision tower."""

    tokens: int
    patches: int


@lru_cache(maxsize=4096)
def largest_image(model: Inventory, max_pixels: int | None) -> ImageSize:
    """Most tokens and patches of an image within `max_pixels` (None: the model's own limit)."""
    vision = model.facts.vision
    if vision is None:
        return ImageSize(0, 0)
    rule, tokens, patches = vision.rule, 0, 0
    for wide, high in SHAPES:
        unit = HUGE // max(wide, high)
        width, height = unit * wide, unit * high
        tokens = max(tokens, rule.tokens(width, height, max_pixels))
        patches = max(patches, rule.patches(width, height, max_pixels))
    if scales(model):
        # A dynamic rule may fill its budget to the last cell, and a strip is one cell high at least: the
        # bound that no shape exceeds.
        limit = min(max_pixels or rule.max_pixels, rule.max_pixels)
        side = vision.patch_size * vision.merge_size
        strip = -(-math.isqrt(LONGEST * limit) // side) + 1
        tokens = max(tokens, limit // side**2, strip)
        patches = max(patches, tokens * vision.merge_size**2)
    return ImageSize(tokens, patches)


@lru_cache(maxsize=256)
def scales(model: Inventory) -> bool:
    """Whether an image's tokens follow from its pixels alone; else it is a square, or cut into pieces."""
    vision = model.facts.vision
    if vision is None:
        return False
    rule, side = vision.rule, vision.patch_size * vision.merge_size
    few, many = -(-math.isqrt(rule.min_pixels) // side), math.isqrt(rule.max_pixels) // side
    return few < many and all(rule.tokens(n * side, n * side, None) == n * n for n in (few, many))


def pixels_for(model: Inventory, tokens: int) -> int:
    """The pixel budget under which an image has at most `tokens` tokens."""
    vision = model.facts.vision
    assert vision is not None
    side = vision.patch_size * vision.merge_size
    return min(max(tokens * side**2, vision.rule.min_pixels), vision.rule.max_pixels)
