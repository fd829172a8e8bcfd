"""Videos: sampling, sizes, timestamps and patches equal transformers'. The prompt is in test_prompt.py."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from snugvl.core.messages import Video
from snugvl.errors import CheckpointError, RequestTooLarge
from snugvl.inputs.frames import VideoLimits, frame_indices
from snugvl.inputs.pixels import PositionedVideoPreprocessor, VideoPreprocessor
from snugvl.inputs.settings import read_pixel_settings


@pytest.fixture(scope="session")
def videos(checkpoint: Path) -> VideoPreprocessor:
    return VideoPreprocessor.from_folder(checkpoint)


def clip(frames: int, width: int, height: int) -> Video:
    values = np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return Video(tuple(map(Image.fromarray, values)), tuple(i / 2 for i in range(frames)))


@pytest.mark.parametrize("shape", [(2, 64, 64), (3, 100, 61), (8, 33, 200), (5, 20, 20), (6, 400, 300)])
@pytest.mark.parametrize("cap", [False, True])
def test_patches_equal_transformers(
    videos: VideoPreprocessor, video_oracle: Any, shape: tuple[int, int, int], cap: bool
) -> None:
    video = clip(*shape)
    array = np.stack([np.asarray(frame) for frame in video.frames])
    theirs = video_oracle([array], do_sample_frames=False, cap_pixels_per_frame=cap, return_tensors="pt")
    capped = VideoPreprocessor(videos.settings, replace(videos.cap, applies=cap))
    ours = capped.prepare(video)
    assert list(ours.grid_thw) == theirs["video_grid_thw"][0].tolist()
    assert torch.equal(ours.values(), theirs["pixel_values_videos"])
    assert capped.tokens(*shape) == len(ours.patches) // 4


@pytest.mark.parametrize("frames", [2, 40, 80])
def test_capped_tokens_equal_transformers(videos: VideoPreprocessor, video_oracle: Any, frames: int) -> None:
    """With many frames the floor of 1.05 × min_pixels a frame wins over the shared budget."""
    capped = VideoPreprocessor(videos.settings, replace(videos.cap, applies=True))
    options = {"cap_pixels_per_frame": True}
    patches = video_oracle.get_num_of_video_patches(frames, 300, 300, options)
    assert capped.tokens(frames, 300, 300) == patches // 4


@pytest.mark.parametrize("frames", [2, 6, 24])
@pytest.mark.parametrize("patches", [100, 350, 1024])
def test_a_lower_limit_scales_as_transformers_does(
    videos: VideoPreprocessor, video_oracle: Any, frames: int, patches: int
) -> None:
    limit = min(videos.settings.max_pixels, patches * 16 * 16 * 2)
    size = {"shortest_edge": videos.settings.min_pixels, "longest_edge": limit}
    theirs = video_oracle.get_num_of_video_patches(frames, 300, 200, {"size": size})
    assert math.prod(videos.limited(patches).grid(frames, 200, 300)) == theirs <= patches


@given(st.integers(4, 5000), st.integers(2, 800), st.integers(1, 4000), st.integers(1, 4000), st.booleans())
def test_no_video_has_more_patches_than_were_planned(
    videos: VideoPreprocessor, most: int, frames: int, width: int, height: int, cap: bool
) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    sampling = replace(videos.cap, applies=cap)
    positioned = PositionedVideoPreprocessor(videos.settings, sampling, 2)
    for preprocessor in (
        VideoPreprocessor(videos.settings, sampling).limited(most),
        positioned.limited(most),
    ):
        fits = fitting_frames(preprocessor, frames, width, height)
        assert fits is None or math.prod(preprocessor.grid(fits, width, height)) <= most


def fitting_frames(videos: VideoPreprocessor, frames: int, width: int, height: int) -> int | None:
    """All of them, as many as a refusal allows, or None where it says that frames must be cropped."""
    try:
        videos.grid(frames, width, height)
    except RequestTooLarge as refusal:
        fewer = re.search(r"send at most (\d+) of them|: crop them", str(refusal))
        assert fewer is not None, refusal  # noqa: PT017
        return int(fewer[1]) if fewer[1] else None
    return frames


def test_more_frames_than_the_tower_holds_are_refused(videos: VideoPreprocessor) -> None:
    limited = videos.limited(400)
    with pytest.raises(RequestTooLarge) as refusal:
        limited.tokens(250, 64, 48)
    assert str(refusal.value) == (
        "250 frames of 64×48 pixels are 500 patches even at their smallest; the vision tower's memory holds "
        "400: send at most 200 of them, or load the model with larger max_pixels"
    )
    assert limited.tokens(200, 64, 48) == 100
    assert videos.tokens(250, 64, 48) == 125, "the limit is that of the copy alone"


@given(st.integers(1, 3000), st.floats(0.5, 240))
def test_sampling_equals_transformers(video_oracle: Any, total: int, fps: float) -> None:
    theirs = video_oracle.sample_frames(SimpleNamespace(total_num_frames=total, fps=fps), fps=2)
    limits = VideoLimits(min_frames=video_oracle.min_frames, max_frames=video_oracle.max_frames)
    assert frame_indices(total, total / fps, 2.0, limits) == theirs.tolist()


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=12, unique=True), st.floats(0.5, 120))
def test_timestamps_equal_transformers(videos: VideoPreprocessor, indices: list[int], fps: float) -> None:
    module = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    indices.sort()
    times = module.Qwen3VLProcessor._calculate_timestamps(None, list(indices), fps, 2)
    frame = Image.new("RGB", (32, 32))
    ours = videos.timestamps(Video((frame,) * len(indices), tuple(i / fps for i in indices)))
    assert list(ours) == [f"<{time:.1f} seconds>" for time in times]


def test_digest_differs_by_any_frame(videos: VideoPreprocessor) -> None:
    video = clip(4, 64, 64)
    other = Video((*video.frames[:3], Image.new("RGB", (64, 64))), video.timestamps)
    assert videos.prepare(video).digest == videos.prepare(clip(4, 64, 64)).digest
    assert videos.prepare(video).digest != videos.prepare(other).digest


def test_only_bicubic(broken: Path) -> None:
    path = broken / "video_preprocessor_config.json"
    path.write_text(path.read_text().replace('"merge_size"', '"resample": 1, "merge_size"'))
    with pytest.raises(CheckpointError, match="'resample' = 1"):
        read_pixel_settings(broken, video=True)
