"""How large an image can get under a pixel budget, by the model's own rule."""

from dataclasses import dataclass
from typing import Final

from snugvl.planner.inventory import Inventory

# Width : height of the images that are tried; the rule's rounding makes the shape matter a little.
SHAPES: Final = ((1, 1), (4, 3), (3, 2), (16, 9), (2, 1), (1, 2), (9, 16), (3, 4), (4, 1))
HUGE: Final = 16384  # pixels of a side: beyond every rule's limit, so that the limit decides


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The largest image: prompt tokens and patches of the vision tower."""

    tokens: int
    patches: int


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
        # A dynamic rule may fill its budget to the last cell: the bound that no shape exceeds.
        limit = min(max_pixels or rule.max_pixels, rule.max_pixels)
        side = vision.patch_size * vision.merge_size
        tokens, patches = max(tokens, limit // side**2), max(patches, limit // vision.patch_size**2)
    return ImageSize(tokens, patches)


def scales(model: Inventory) -> bool:
    """Whether an image's tokens follow from its pixels (otherwise they come in fixed tiles)."""
    vision = model.facts.vision
    if vision is None:
        return False
    rule, side = vision.rule, vision.patch_size * vision.merge_size
    small, large = side * 16, side * 32
    low = rule.tokens(small, small, None)
    return low == 256 and rule.tokens(large, large, None) == 1024


def pixels_for(model: Inventory, tokens: int) -> int:
    """The pixel budget under which an image has at most `tokens` tokens."""
    vision = model.facts.vision
    assert vision is not None
    side = vision.patch_size * vision.merge_size
    return min(max(tokens * side**2, vision.rule.min_pixels), vision.rule.max_pixels)
