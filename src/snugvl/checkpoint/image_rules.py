"""Rules from an image's size to its prompt tokens and vision patches, one a family, equal to transformers'.

`max_pixels` lowers the checkpoint's limit where the family has one: the scaled area (Qwen), the area of all
tiles (InternVL), the square of the longest side (SmolVLM). Gemma 3 always works on one fixed square.

Source of `smart_resize`: Qwen2-VL's image processor and Qwen3-VL's video processor in Hugging Face
transformers. Python's `round` is banker's rounding, which decides sizes that are an odd multiple of half a
factor, so it must stay `round`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from snugvl.errors import ImageError, RequestError

MAX_ASPECT = 200


@dataclass(frozen=True, slots=True)
class SmartResize:
    """Qwen2-VL and its successors: any aspect, sides multiples of `patch_size` · `merge_size` pixels."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        return self.patch_size * self.merge_size

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Number of prompt tokens: patches / merge_size²."""
        return self.patches(width, height, max_pixels) // self.merge_size**2

    def patches(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Number of patches of the vision tower.

        Raises:
            ImageError: one side is more than 200 times the other.
            RequestError: `max_pixels` is smaller than one token.
        """
        limit = _limit(self.max_pixels, max_pixels, self.factor**2)
        new_height, new_width = smart_resize(
            height, width, factor=self.factor, min_pixels=min(self.min_pixels, limit), max_pixels=limit
        )
        return (new_height // self.patch_size) * (new_width // self.patch_size)


@dataclass(frozen=True, slots=True)
class FixedSquare:
    """Gemma 3 without pan & scan: every image becomes `side`² pixels and `image_tokens` tokens."""

    side: int
    patch_size: int
    image_tokens: int

    @property
    def min_pixels(self) -> int:
        """Pixels of the one size of pictures."""
        return self.side**2

    @property
    def max_pixels(self) -> int:
        """Pixels of the one size of pictures."""
        return self.side**2

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Always the same."""
        return self.image_tokens

    def patches(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Always the same."""
        return (self.side // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class FilledArea:
    """Gemma 4: every image is scaled, up or down, to fill `image_tokens` at most, and keeps its aspect."""

    patch_size: int
    merge_size: int
    image_tokens: int

    @property
    def min_pixels(self) -> int:
        """Pixels of the one area of pictures."""
        return self.image_tokens * (self.patch_size * self.merge_size) ** 2

    @property
    def max_pixels(self) -> int:
        """Pixels of the one area of pictures."""
        return self.min_pixels

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Squares of `merge_size`² patches, each a token; both sides are rounded down."""
        factor = math.sqrt(self.image_tokens / (width * height))
        wide, high = math.floor(factor * width), math.floor(factor * height)
        if wide and high:
            return wide * high
        return min(max(width, height) // min(width, height), self.image_tokens)

    def patches(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Patches of the vision tower."""
        return self.tokens(width, height) * self.merge_size**2


@dataclass(frozen=True, slots=True)
class _Tiled(ABC):
    """`side`² pixels a tile, as many tokens for each."""

    side: int
    patch_size: int
    tokens_per_tile: int

    @abstractmethod
    def tiles(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Tiles of the image, the thumbnail included."""

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Number of prompt tokens: tiles · tokens of a tile."""
        return self.tiles(width, height, max_pixels) * self.tokens_per_tile

    def patches(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Number of patches: tiles · patches of a tile (without InternVL's class token)."""
        return self.tiles(width, height, max_pixels) * (self.side // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class TilesAndThumbnail(_Tiled):
    """InternVL: the grid of `side`² tiles whose aspect is nearest, and a thumbnail beside two tiles or more.

    Source: `get_optimal_tiled_canvas` of transformers' GotOcr2ImageProcessor, InternVL's image processor.
    """

    min_tiles: int
    max_tiles: int

    @property
    def min_pixels(self) -> int:
        """Pixels of one tile."""
        return self.side**2 * self.min_tiles

    @property
    def max_pixels(self) -> int:
        """Pixels of all tiles, without the thumbnail."""
        return self.side**2 * self.max_tiles

    def tiles(self, width: int, height: int, max_pixels: int | None = None) -> int:
        limit = _limit(self.max_pixels, max_pixels, self.side**2) // self.side**2
        columns, rows = _canvas(width, height, self.side, min(self.min_tiles, limit), limit)
        count = columns * rows
        return count + 1 if count > 1 else 1


@dataclass(frozen=True, slots=True)
class ScaledTiles(_Tiled):
    """SmolVLM (Idefics 3): the longest side is scaled, also up, to `longest`; `side`² tiles and a thumbnail.

    Source: `get_number_of_image_patches` of transformers' Idefics3ImageProcessor. `split` False: one tile.
    """

    longest: int
    split: bool = True

    @property
    def min_pixels(self) -> int:
        """The smallest limit that has an effect: the pixels of one tile."""
        return self.side**2

    @property
    def max_pixels(self) -> int:
        """The square of the longest side."""
        return self.longest**2

    def tiles(self, width: int, height: int, max_pixels: int | None = None) -> int:
        longest = self.longest
        if max_pixels is not None and max_pixels < self.max_pixels:
            edge = math.isqrt(_limit(self.max_pixels, max_pixels, self.side**2))
            longest = edge // self.side * self.side
        if not self.split:
            return 1
        height, width = _longest_to(height, width, longest)
        height, width = _whole_tiles(height, width, self.side)
        rows, columns = math.ceil(height / self.side), math.ceil(width / self.side)
        return rows * columns + 1 if max(height, width) > self.side else 1


def _limit(own: int, wished: int | None, least: int) -> int:
    if wished is None or wished >= own:
        return own
    if wished < least:
        raise RequestError(f"max_pixels is {wished}; at least {least} are needed", field="max_pixels")
    return wished


def _canvas(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of the nearest aspect; among equally near ones the larger if the image fills half."""
    grids = sorted(
        (
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if least <= columns * rows <= most
        ),
        key=lambda grid: grid[0] * grid[1],
    )
    aspect, best, nearest = width / height, (1, 1), math.inf
    for columns, rows in grids:
        distance = abs(aspect - columns / rows)
        if distance < nearest or (
            distance == nearest and width * height > 0.5 * side**2 * columns * rows
        ):  # fmt: skip
            nearest, best = distance, (columns, rows)
    return best


def _longest_to(height: int, width: int, longest: int) -> tuple[int, int]:
    """Scale so that the longest side is `longest`, the other one even and at least 1."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Sides rounded up to whole tiles, the longer one first and the other one from its aspect."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / aspect) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * aspect) / side) * side


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width, multiples of `factor` pixels, with an area between the two limits.

    The aspect ratio is kept as closely as that allows. A side never falls below one factor, so a very long
    strip may exceed `max_pixels`.

    Raises:
        ImageError: one side is more than 200 times the other.
    """
    _check_aspect(height, width)
    return _scaled(1, 1, height, width, factor, min_pixels, max_pixels)


def smart_resize_video(
    frames: int,
    height: int,
    width: int,
    *,
    factor: int,
    temporal_factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Height and width of each frame of a video; the limits count the pixels of all frames together.

    Raises:
        ImageError: one side is more than 200 times the other, or fewer frames than `temporal_factor`.
    """
    check_frames(frames, temporal_factor)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    whole = round(frames / temporal_factor) * temporal_factor
    return _scaled(frames, whole, height, width, factor, min_pixels, max_pixels)


def _scaled(
    frames: int, whole: int, height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) in multiples of `factor`, as near as the limits allow. `whole`: `frames`, rounded up to
    whole temporal patches."""
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    volume = whole * new_height * new_width
    if volume > max_pixels:
        beta = math.sqrt((frames * height * width) / max_pixels)
        return (
            max(factor, math.floor(height / beta / factor) * factor),
            max(factor, math.floor(width / beta / factor) * factor),
        )
    if volume < min_pixels:
        beta = math.sqrt(min_pixels / (frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return new_height, new_width


def check_frames(frames: int, temporal_factor: int) -> None:
    """Raise ImageError unless a video has enough frames for one temporal patch."""
    if frames < temporal_factor:
        raise ImageError(
            f"the video is too short ({frames} of at least {temporal_factor} frames); send it as a picture"
        )


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise ImageError(
            f"the image is {width}×{height} pixels, one side more than {MAX_ASPECT} times as long as the "
            "other; crop it or cut it into pieces"
        )
