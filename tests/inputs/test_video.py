"""Videos: sampling, sizes, timestamps and patches equal transformers'. The prompt is in test_prompt.py."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from snugvl.backends.protocol import Video
from snugvl.errors import CheckpointError, RequestError
from snugvl.inputs.settings import read_pixel_settings
from snugvl.inputs.video import VideoPreprocessor, frame_indices


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
    capped = VideoPreprocessor(videos.settings, replace(videos.sampling, cap_pixels=cap))
    ours = capped.prepare(video)
    assert list(ours.grid_thw) == theirs["video_grid_thw"][0].tolist()
    assert torch.equal(ours.values(), theirs["pixel_values_videos"])
    assert capped.tokens(*shape) == len(ours.patches) // 4


@pytest.mark.parametrize("frames", [2, 40, 80])
def test_capped_tokens_equal_transformers(videos: VideoPreprocessor, video_oracle: Any, frames: int) -> None:
    """With many frames the floor of 1.05 × min_pixels a frame wins over the shared budget."""
    capped = VideoPreprocessor(videos.settings, replace(videos.sampling, cap_pixels=True))
    options = {"cap_pixels_per_frame": True}
    patches = video_oracle.get_num_of_video_patches(frames, 300, 300, options)
    assert capped.tokens(frames, 300, 300) == patches // 4


@given(st.integers(1, 3000), st.floats(0.5, 240))
@settings(deadline=None)
def test_sampling_equals_transformers(
    videos: VideoPreprocessor, video_oracle: Any, total: int, fps: float
) -> None:
    theirs = video_oracle.sample_frames(SimpleNamespace(total_num_frames=total, fps=fps), fps=2)
    assert frame_indices(total, fps, videos.sampling) == theirs.tolist()


def test_sampled_frames_carry_their_times(videos: VideoPreprocessor) -> None:
    video = clip(30, 32, 32)
    sampled = videos.sample_frames(video.frames, fps=10)
    assert len(sampled.frames) == 6
    assert sampled.timestamps[0] == 0
    assert sampled.timestamps[-1] == 2.9
    assert all(frame in video.frames for frame in sampled.frames)
    assert len(videos.sample_frames(video.frames, fps=10, target_fps=5).frames) == 15
    for fps in (0, -1, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="make no video"):
            videos.sample_frames(video.frames, fps=fps)
    with pytest.raises(RequestError, match="make no video"):
        videos.sample_frames((), fps=1)


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
