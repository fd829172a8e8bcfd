"""How large a picture the model sees, by its image processor, and how to make that less.

    kind of processor                        its limit                     lowered by
    Qwen2-VL and its successors              size: pixels in all           size
    Idefics 3, SmolVLM (tiles, scaled up)    size: the longest edge        size, whole tiles
    InternVL (tiles)                         max_patches tiles             max_patches
    Gemma 4 (scaled up to a budget)          max_soft_tokens               max_soft_tokens
    one fixed square (CLIP, SigLIP, Gemma 3) that square                   nothing: it is the only size
    everything else (Pixtral, LLaVA-NeXT)    an edge, or a list of sizes   scaling the picture down before

Sizes in tokens are the processor's business; this only decides pixels.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image, Resampling

from snugvl.errors import RequestError

_SOFT_TOKENS = (70, 140, 280, 560, 1120)  # what Gemma 4 was trained on


@dataclass(frozen=True, slots=True)
class Resolution:
    """The sizes that one image processor makes. `min_pixels`: smallest limit that can be asked for;
    `max_pixels`: its own limit, or what was asked for at load."""

    processor: Any
    min_pixels: int
    max_pixels: int

    @property
    def smallest(self) -> int:
        """Pixels of the smallest picture that the model sees; smaller ones are scaled up to it."""
        if _kind(self.processor) == "area":
            return min(_size(self.processor)["shortest_edge"], self.max_pixels)
        return self.min_pixels

    def arguments(self, limit: int) -> dict[str, Any]:
        """Arguments of the processor: a picture has at most `limit` pixels; {}: it has no such say."""
        edge = _edge(self.processor)
        match _kind(self.processor):
            case "area":
                size = _size(self.processor)
                least = min(size["shortest_edge"], limit)
                return {"size": {"shortest_edge": least, "longest_edge": min(size["longest_edge"], limit)}}
            case "scaled tiles":
                longest = max(math.isqrt(limit) // edge, 1) * edge
                return {"size": {"longest_edge": min(_size(self.processor)["longest_edge"], longest)}}
            case "tiles":
                most = max(limit // edge**2, 1)
                least = min(self.processor.min_patches, most)
                return {"min_patches": least, "max_patches": min(self.processor.max_patches, most)}
            case "soft tokens":
                fitting = [count for count in _SOFT_TOKENS if count * edge**2 <= limit]
                return {"max_soft_tokens": max(fitting, default=_SOFT_TOKENS[0])}
            case _:
                return {}

    def limited(self, image: Image, limit: int) -> Image:
        """The picture scaled down to `limit` pixels, where the processor can't be told."""
        scalable = _kind(self.processor) == "picture"
        if not scalable or image.width * image.height <= limit:
            return image
        scale = math.sqrt(limit / (image.width * image.height))
        size = (max(int(image.width * scale), 1), max(int(image.height * scale), 1))
        return image.resize(size, Resampling.BICUBIC)


def resolution_of(processor: Any, wished: int | None) -> Resolution:
    """Resolution of an image processor. `wished`: most pixels, as asked for at load.

    Raises:
        RequestError: fewer pixels than the processor can do with.
    """
    edge, kind = _edge(processor), _kind(processor)
    least, most = edge**2, _most(processor)
    if kind == "soft tokens":
        least *= _SOFT_TOKENS[0]
    if wished is None or kind == "fixed":
        return Resolution(processor, least, most)
    if wished < least:
        raise RequestError(
            f"max_pixels is {wished:,}; this model needs at least {least:,}", field="max_pixels"
        )
    return Resolution(processor, least, min(most, wished))


def _kind(processor: Any) -> str:
    size = _size(processor)
    if hasattr(processor, "merge_size") and {"shortest_edge", "longest_edge"} <= size.keys():
        return "area"
    if hasattr(processor, "max_soft_tokens"):
        return "soft tokens"
    if getattr(processor, "do_image_splitting", None) is not None and "longest_edge" in size:
        return "scaled tiles"
    if hasattr(processor, "max_patches") and getattr(processor, "min_patches", None) and "height" in size:
        return "tiles"
    if getattr(processor, "image_grid_pinpoints", None):
        return "picture"
    if "height" in size or getattr(processor, "do_center_crop", None):
        return "fixed"
    return "picture"


def _edge(processor: Any) -> int:
    """Side of the smallest thing there is: a token, a tile, the one square."""
    size, kind = _size(processor), _kind(processor)
    if kind == "area":
        return int(processor.patch_size * processor.merge_size)
    if kind == "soft tokens":
        return int(processor.patch_size * processor.pooling_kernel_size)
    if kind == "scaled tiles":
        return int(_as_mapping(processor.max_image_size)["longest_edge"])
    if kind == "fixed":
        size = dict(_as_mapping(getattr(processor, "crop_size", None))) or size
    if "height" in size:
        return int(max(size["height"], size["width"]))
    patch = getattr(processor, "patch_size", None) or 1
    return int(max(_as_mapping(patch).values()))


def _most(processor: Any) -> int:
    size, kind, edge = _size(processor), _kind(processor), _edge(processor)
    if kind == "area":
        return int(size["longest_edge"])
    if kind == "soft tokens":
        return int(processor.max_soft_tokens) * edge**2
    if kind == "tiles":
        return int(processor.max_patches) * edge**2
    if kind == "fixed":
        return edge**2
    pinpoints = getattr(processor, "image_grid_pinpoints", None)
    if pinpoints:
        return max(int(height) * int(width) for height, width in pinpoints)
    return int(size.get("longest_edge") or size.get("shortest_edge") or edge) ** 2


def _size(processor: Any) -> dict[str, int]:
    """`size` as a plain dictionary; processors keep it as one, or as an object of theirs."""
    return {
        name: int(value) for name, value in _as_mapping(getattr(processor, "size", None)).items() if value
    }


def _as_mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, int):
        return {"height": value, "width": value}
    if isinstance(value, Iterable):  # a dictionary, or transformers' SizeDict, which yields pairs
        return dict(value)
    return {}
