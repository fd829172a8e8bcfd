"""From frames with times to patches, and what tells the model when each pair of frames was.

Equal to transformers' `Qwen3VLVideoProcessor` and `Qwen3VLProcessor`, where times are text in the prompt, and
to `Qwen2VLVideoProcessor` and `Qwen2_5_VLProcessor`, where they are positions. Frames are scaled by torch's
uint8 bicubic filter, the very function torchvision calls, not by Pillow as images are: the two differ by a
level here and there, and transformers has it so.

The vision tower's memory is planned for the largest picture. `limited` holds a video to as many patches, all
frames together: frames are scaled down until they fit, as transformers does within its own limit.
"""

import math
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.checkpoint.resize import check_frames, smart_resize, smart_resize_video
from snugvl.core.messages import Video
from snugvl.engine.request import VisionItem
from snugvl.errors import RequestError, RequestTooLarge
from snugvl.inputs.image import to_rgb
from snugvl.inputs.pixels import digest, every_byte, normalise, patches_of
from snugvl.inputs.settings import (
    FrameCap,
    PixelSettings,
    has_video_settings,
    read_frame_cap,
    read_pixel_settings,
)
from snugvl.models.batch import GridTHW


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
        """What stands before each temporal patch: the mean of its first and last frame's time."""
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
        """Nothing is written."""
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
    """The preprocessor of videos for a checkpoint folder, or None where it has no settings for them.

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
