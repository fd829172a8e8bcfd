"""From RGB images and frames with times to the patches that Qwen's vision towers read in our engine.

Equal to transformers' `Qwen2VLImageProcessorPil`: Pillow resizes, pixels become `(x·rescale − mean) / std`
in float32, and patches are ordered so that the merge_size² patches of one token are neighbours.

A byte has 256 values, so the arithmetic is done once for each, and patches stay bytes until they are on the
device of the network: an eighth of the memory, the copies and the time. Bytes are moved a patch's row at a
time, which numpy does as one item:

    plane    │ 16 bytes │ 16 bytes │ …      → row y of patch 0, row y of patch 1, …

Videos are equal to transformers' `Qwen3VLVideoProcessor` and `Qwen3VLProcessor`, where times are text in the
prompt, and to `Qwen2VLVideoProcessor` and `Qwen2_5_VLProcessor`, where they are positions. Frames are scaled
by torch's uint8 bicubic filter, the very function torchvision calls, not by Pillow as images are: the two
differ by a level here and there, and transformers has it so.

The vision tower's memory is planned for the largest picture. `limited` holds a video to as many patches, all
frames together: frames are scaled down until they fit, as transformers does within its own limit.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.checkpoint.image_rules import check_frames, smart_resize, smart_resize_video
from snugvl.core.messages import Video
from snugvl.engine.request import VisionItem
from snugvl.errors import RequestError, RequestTooLarge
from snugvl.inputs.image import to_rgb
from snugvl.inputs.settings import (
    FrameCap,
    PixelSettings,
    has_video_settings,
    read_frame_cap,
    read_pixel_settings,
)
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
        """Resize, normalise and cut into patches. `max_pixels`: lowers the checkpoint's limit for this image;
        `file`: hash of the file that it was decoded from, which is far smaller than its patches.

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
    """Cut frames into patches. `frames`: the three planes of each, `[height, width]`; sides are multiples of
    a token's, frames a multiple of the temporal patch size, or 1.

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
    """A hash of what an encoding depends on: `content` (patches, or their file), grid, settings."""
    state = blake2b(f"{kind} {grid} {settings}".encode(), digest_size=32)
    state.update(content)
    return state.digest()


class VideoPreprocessor:
    """Prepares videos as one checkpoint wants them: a Qwen3-VL, which reads times as text."""

    def __init__(self, settings: PixelSettings, cap: FrameCap) -> None:
        self.settings = settings
        self.cap = cap
        self.most_patches: int | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "VideoPreprocessor":
        """Read video_preprocessor_config.json.

        Raises:
            CheckpointError: the file is missing or holds nonsense.
        """
        return cls(read_pixel_settings(folder, video=True), read_frame_cap(folder))

    def limited(self, patches: int) -> Self:
        """A preprocessor for videos of at most that many patches, all frames together."""
        made = copy(self)
        made.most_patches = patches
        return made

    def grid(self, frames: int, width: int, height: int) -> GridTHW:
        """Patches of a video of that many frames of that size, without touching pixels.

        Raises:
            ImageError: fewer frames than a temporal patch, or an extreme aspect ratio.
            RequestTooLarge: even the smallest frames have more patches than `limited` allows.
        """
        check_frames(frames, self.settings.temporal_patch_size)
        grid = self._grid(frames, width, height)
        if self._within(grid):
            return grid
        fits = (n for n in range(frames - 1, 1, -1) if self._within(self._grid(n, width, height)))
        most = next(fits, None)
        way_out = "crop them" if most is None else f"send at most {most:,} of them"
        raise RequestTooLarge(
            f"{frames:,} frames of {width}×{height} pixels are {math.prod(grid):,} patches even at their "
            f"smallest; the vision tower's memory holds {self.most_patches:,}: {way_out}, or load the model "
            "with larger max_pixels",
            field="messages",
        )

    def _grid(self, frames: int, width: int, height: int) -> GridTHW:
        """Patches of a video, whether they fit or not."""
        settings = self.settings
        new_height, new_width = self._scaled(frames, width, height)
        side = settings.patch_size
        return -(-frames // settings.temporal_patch_size), new_height // side, new_width // side

    def _scaled(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """Height and width of each frame as the tower sees it."""
        settings, limit = self.settings, self._max_pixels(frames)
        return smart_resize_video(
            frames,
            height,
            width,
            factor=settings.factor,
            temporal_factor=settings.temporal_patch_size,
            min_pixels=min(settings.min_pixels, limit),
            max_pixels=limit,
        )

    def _within(self, grid: GridTHW) -> bool:
        return self.most_patches is None or math.prod(grid) <= self.most_patches

    def tokens(self, frames: int, width: int, height: int) -> int:
        """Prompt tokens of the pixels (not of the timestamps) of a video of that size."""
        depth, rows, columns = self.grid(frames, width, height)
        return depth * rows * columns // self.settings.merge_size**2

    def runs(self, frames: int, width: int, height: int) -> list[int]:
        """Tokens of each unbroken run of placeholders of a video of that size: one a temporal patch."""
        depth, rows, columns = self.grid(frames, width, height)
        return [rows * columns // self.settings.merge_size**2] * depth

    def check(self, video: Video) -> None:
        """Raise RequestError unless frames and timestamps make one video."""
        sizes = {frame.size for frame in video.frames}
        if not video.frames:
            raise RequestError("a video has no frames; send at least two", field="messages")
        if len(sizes) > 1:
            listed = ", ".join(f"{w}×{h}" for w, h in sorted(sizes)[:3])
            raise RequestError(
                f"frames of a video differ in size ({listed}); scale them alike", field="messages"
            )
        if len(video.frames) != len(video.timestamps):
            raise RequestError(
                f"a video has {len(video.frames)} frames but {len(video.timestamps)} timestamps; "
                "give one per frame, in seconds",
                field="messages",
            )
        times = video.timestamps
        if not all(np.isfinite(times)) or times[0] < 0 or any(b < a for a, b in pairwise(times)):
            raise RequestError(
                "timestamps of a video must be seconds from 0 that never fall", field="messages"
            )

    def prepare(self, video: Video) -> VisionItem:
        """Resize, normalise and cut into patches; an odd last frame is repeated.

        Returns:
            `[t·rows·columns, 3·temporal_patch_size·patch_size²]` bytes with their grid and meaning.

        Raises:
            RequestError: frames of different sizes, or not one timestamp per frame.
            ImageError: too few frames, or an extreme aspect ratio.
        """
        self.check(video)
        settings = self.settings
        grid = self.grid(len(video.frames), *video.frames[0].size)
        size = (grid[1] * settings.patch_size, grid[2] * settings.patch_size)
        frames = [_resized(to_rgb(frame), size) for frame in video.frames]
        frames += [frames[-1]] * (-len(frames) % settings.temporal_patch_size)
        patches = patches_of(frames, settings)
        # transformers fuses the two steps for videos: mean and std in levels instead of pixels in units.
        scale = torch.tensor(1 / settings.rescale_factor)
        mean, std = torch.tensor(settings.mean) * scale, torch.tensor(settings.std) * scale
        levels = normalise(every_byte(), tuple(mean.tolist()), tuple(std.tolist()))
        step = self.time_step(video)
        # The positions are none of the encoding's, but of the keys and values that the prefix cache keeps.
        kind = "video" if step is None else f"video {step}"
        return VisionItem(
            patches, grid, digest(patches.numpy().data, grid, settings, kind), levels, time_step=step
        )

    def time_step(self, video: Video) -> float | None:
        """Positions of time between temporal patches; None where times are text."""
        return None

    def timestamps(self, video: Video) -> tuple[str, ...]:
        """Text before each temporal patch, "<1.5 seconds>": the mean of its first and last frame's time."""
        depth = self.settings.temporal_patch_size
        times = list(video.timestamps)
        times += [times[-1]] * (-len(times) % depth)
        return tuple(
            f"<{(times[i] + times[i + depth - 1]) / 2:.1f} seconds>" for i in range(0, len(times), depth)
        )

    def _max_pixels(self, frames: int) -> int:
        """The area of all frames together, or less where the checkpoint also caps each frame."""
        limit = self.settings.max_pixels
        if self.cap.applies:
            most = self.cap.max_tokens * self.settings.factor**2
            limit = frames * max(min(most, limit // frames), int(self.settings.min_pixels * 1.05))
        # The rule counts an odd last frame as half a pair, or not at all; the tower sees a whole one.
        depth = self.settings.temporal_patch_size
        return min(limit, self._frame_room(frames) * (frames // depth * depth))

    def _frame_room(self, frames: int) -> int:
        """The area that each frame may have within `most_patches`; without them, no limit."""
        if self.most_patches is None:
            return 1 << 62
        slices = -(-frames // self.settings.temporal_patch_size)
        return self.most_patches * self.settings.patch_size**2 // slices


class PositionedVideoPreprocessor(VideoPreprocessor):
    """Videos for a Qwen2.5-VL: one run of placeholders, limits for each frame, times as positions."""

    def __init__(self, settings: PixelSettings, cap: FrameCap, tokens_per_second: int) -> None:
        super().__init__(settings, cap)
        self.tokens_per_second = tokens_per_second

    def _scaled(self, frames: int, width: int, height: int) -> tuple[int, int]:
        settings, limit = self.settings, self._max_pixels(frames)
        return smart_resize(
            height,
            width,
            factor=settings.factor,
            min_pixels=min(settings.min_pixels, limit),
            max_pixels=limit,
        )

    def runs(self, frames: int, width: int, height: int) -> list[int]:
        """Tokens of the one run of placeholders of a video of that size."""
        return [self.tokens(frames, width, height)]

    def timestamps(self, video: Video) -> tuple[str, ...]:
        """Empty: the times are positions, not text."""
        return ()

    def time_step(self, video: Video) -> float:
        """Positions of time between temporal patches, by the mean distance of frames."""
        times = video.timestamps
        apart = (times[-1] - times[0]) / (len(times) - 1)
        # In float32 as transformers': rounded down later, a hair less would be a position less.
        seconds = torch.tensor(self.settings.temporal_patch_size * apart, dtype=torch.float32)
        return float(self.tokens_per_second * seconds)

    def _max_pixels(self, frames: int) -> int:
        """The area of a frame; less where the checkpoint shares out a number of tokens among all of them."""
        settings, cap = self.settings, self.cap
        limit = settings.max_pixels
        if cap.applies:
            shared = int(cap.max_tokens * settings.factor**2 * 0.9)
            share = shared * settings.temporal_patch_size // frames
            limit = max(min(limit, share), int(settings.min_pixels * 1.05))
        return min(limit, self._frame_room(frames))


def read_video_preprocessor(folder: Path, vision: VisionConfig) -> VideoPreprocessor | None:
    """The preparation of videos for the model in a folder, or None if the folder says nothing of them.

    Raises:
        CheckpointError: a file holds nonsense.
    """
    if vision.tokens_per_second is None:
        return VideoPreprocessor.from_folder(folder) if has_video_settings(folder) else None
    return PositionedVideoPreprocessor(
        read_pixel_settings(folder, video=True),
        read_frame_cap(folder, video_tokens=128_000),
        vision.tokens_per_second,
    )


def _resized(frame: Image.Image, size: tuple[int, int]) -> list[npt.NDArray[np.uint8]]:
    """The planes of `frame` scaled to `size` (height, width)."""
    planes = [np.asarray(band) for band in frame.split()]
    if planes[0].shape == size:
        return planes
    scaled = torch.nn.functional.interpolate(
        torch.from_numpy(np.stack(planes))[None],
        size=size,
        mode="bicubic",
        align_corners=False,
        antialias=True,
    )
    return list(scaled[0].numpy())
