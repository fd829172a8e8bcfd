"""From an RGB image to the patches that Qwen's vision towers read, the ones that our engine runs.

Equal to transformers' `Qwen2VLImageProcessorPil`: Pillow resizes, pixels become `(x·rescale − mean) / std`
in float32, and patches are ordered so that the merge_size² patches of one token are neighbours.

A byte has 256 values, so the arithmetic is done once for each, and patches stay bytes until they are on the
device of the network: an eighth of the memory, the copies and the time. Bytes are moved a patch's row at a
time, which numpy does as one item:

    plane    │ 16 bytes │ 16 bytes │ …      → row y of patch 0, row y of patch 1, …
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from snugvl.checkpoint.resize import smart_resize
from snugvl.engine.request import VisionItem
from snugvl.errors import RequestError
from snugvl.inputs.image import to_rgb
from snugvl.inputs.settings import PixelSettings, read_pixel_settings
from snugvl.models.batch import GridTHW


class ImagePreprocessor:
    """Prepares images as one checkpoint wants them."""

    def __init__(self, settings: PixelSettings) -> None:
        self.settings = settings

    @classmethod
    def from_folder(cls, folder: Path, *, max_pixels: int | None = None) -> "ImagePreprocessor":
        """Read preprocessor_config.json; `max_pixels` lowers its limit for every image.

        Raises:
            CheckpointError: the file is missing or holds nonsense.
            RequestError: `max_pixels` is smaller than one token.
        """
        return cls(read_pixel_settings(folder)).limited(max_pixels)

    def limited(self, max_pixels: int | None) -> "ImagePreprocessor":
        """A preprocessor with a lower limit for every image.

        Raises:
            RequestError: `max_pixels` is smaller than one token.
        """
        return ImagePreprocessor(self._limited(max_pixels))

    def grid(self, width: int, height: int, max_pixels: int | None = None) -> GridTHW:
        """Patches of an image of that size, without touching pixels.

        Raises:
            ImageError: longer than 200 times its width, or the other way round.
            RequestError: `max_pixels` is smaller than one token.
        """
        settings = self._limited(max_pixels)
        new_height, new_width = smart_resize(
            height,
            width,
            factor=settings.factor,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
        )
        return 1, new_height // settings.patch_size, new_width // settings.patch_size

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Prompt tokens that an image of that size costs."""
        _, rows, columns = self.grid(width, height, max_pixels)
        return rows * columns // self.settings.merge_size**2

    def prepare(
        self, image: Image.Image, max_pixels: int | None = None, file: bytes | None = None
    ) -> VisionItem:
        """Resize, normalise and cut into patches.

        Args:
            max_pixels: lowers the checkpoint's limit for this image.
            file: hash of the file that it was decoded from, which is far smaller than its patches.

        Returns:
            `[rows·columns, 3·patch_size²]` bytes with their grid and meaning.
        """
        grid = self.grid(image.width, image.height, max_pixels)
        side = self.settings.patch_size
        image = to_rgb(image)
        size = (grid[2] * side, grid[1] * side)
        # Asking Pillow for the same size would copy.
        resized = image if image.size == size else image.resize(size, self.settings.resample)
        planes = [np.asarray(band) for band in resized.split()]
        patches = patches_of([planes], self.settings)
        scale = 1 / self.settings.rescale_factor  # dividing by 255 rounds like transformers' float64
        levels = normalise(every_byte().div_(scale), self.settings.mean, self.settings.std)
        # The one frame fills every temporal slot of its patch.
        slots = self.settings.temporal_patch_size
        if file is None:
            content = digest(patches.numpy().data, grid, self.settings, "image")
        else:
            content = digest(file, grid, self.settings, "file")
        return VisionItem(patches, grid, content, levels, slots)

    def _limited(self, max_pixels: int | None) -> PixelSettings:
        """The settings with a lower limit, which also wins over `min_pixels`."""
        settings = self.settings
        if max_pixels is None or max_pixels >= settings.max_pixels:
            return settings
        if max_pixels < settings.factor**2:
            raise RequestError(
                f"max_pixels is {max_pixels}; at least {settings.factor**2} are needed "
                f"({settings.factor}×{settings.factor}, one token)",
                field="max_pixels",
            )
        return replace(settings, max_pixels=max_pixels, min_pixels=min(settings.min_pixels, max_pixels))


def patches_of(frames: Sequence[Sequence[npt.NDArray[np.uint8]]], settings: PixelSettings) -> torch.Tensor:
    """Cut frames into patches.

    Args:
        frames: the three planes of each, `[height, width]`; sides are multiples of a token's, frames a
            multiple of the temporal patch size, or 1.

    Returns:
        `[patches, 3 · frames per patch · patch_size²]` uint8.
    """
    depth = min(len(frames), settings.temporal_patch_size)
    side, merge = settings.patch_size, settings.merge_size
    height, width = frames[0][0].shape
    tokens_high, tokens_wide = height // (merge * side), width // (merge * side)
    line = np.dtype(f"V{side}")  # a row of a patch
    # [t, token row, token column, row in token, column in token, channel, frame, y]
    shape = (len(frames) // depth, tokens_high, tokens_wide, merge, merge, 3, depth, side)
    ordered = np.empty(shape, line)
    for index, planes in enumerate(frames):
        for channel, plane in enumerate(planes):
            lines = np.ascontiguousarray(plane).view(line)
            lines = lines.reshape(tokens_high, merge, side, tokens_wide, merge).transpose(0, 3, 1, 4, 2)
            ordered[index // depth, ..., channel, index % depth, :] = lines
    return torch.from_numpy(ordered.view(np.uint8).reshape(-1, 3 * depth * side * side))


def every_byte() -> torch.Tensor:
    """0 … 255 for each channel, `[3, 256]` float32."""
    return torch.arange(256, dtype=torch.float32).repeat(3, 1)


def normalise(values: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """`(values - mean) / std` per channel, in place; `values` is `[3, …]` float32."""
    for channel, (m, s) in enumerate(zip(mean, std, strict=True)):
        values[channel].sub_(m).div_(s)
    return values


def digest(content: bytes | memoryview, grid: GridTHW, settings: PixelSettings, kind: str) -> bytes:
    """A hash of all that an encoding depends on: `content` (patches, or the file they are made of), grid,
    settings."""
    state = blake2b(f"{kind} {grid} {settings}".encode(), digest_size=32)
    state.update(content)
    return state.digest()
