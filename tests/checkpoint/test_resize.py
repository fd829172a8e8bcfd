"""Sizes equal transformers', at random and at the edges."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from snugvl.checkpoint.image_rules import MAX_ASPECT, smart_resize, smart_resize_video
from snugvl.errors import ImageError

SIDES = st.integers(1, 6000)
LIMITS = st.tuples(st.sampled_from([1, 3136, 4096, 65536]), st.sampled_from([100_352, 1 << 20, 1 << 24]))


@given(SIDES, SIDES, st.sampled_from([28, 32]), LIMITS)
def test_image_equals_transformers(height: int, width: int, factor: int, limits: tuple[int, int]) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    try:
        theirs = module.smart_resize(height, width, factor, *limits)
    except ValueError:
        theirs = None
    try:
        ours = smart_resize(height, width, factor=factor, min_pixels=limits[0], max_pixels=limits[1])
    except ImageError:
        ours = None
    assert ours == theirs


@given(st.integers(1, 99), SIDES, SIDES, LIMITS)
def test_video_equals_transformers(frames: int, height: int, width: int, limits: tuple[int, int]) -> None:
    module = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    low, high = limits
    try:
        theirs = module.smart_resize(
            frames, height, width, temporal_factor=2, factor=32, min_pixels=low, max_pixels=high
        )
    except ValueError:
        theirs = None
    try:
        ours = smart_resize_video(
            frames, height, width, factor=32, temporal_factor=2, min_pixels=low, max_pixels=high
        )
    except ImageError:
        ours = None
    assert ours == theirs


@given(SIDES, SIDES)
def test_properties(height: int, width: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    low, high, factor = 65536, 1 << 20, 32
    new_height, new_width = smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
    assert new_height % factor == new_width % factor == 0
    assert new_height * new_width >= low or new_height * new_width > 0.8 * low
    assert new_height * new_width <= high or factor in (new_height, new_width)
    # Scaling again changes nothing.
    if low <= new_height * new_width <= high and max(new_height, new_width) <= 200 * min(
        new_height, new_width
    ):
        again = smart_resize(new_height, new_width, factor=factor, min_pixels=low, max_pixels=high)
        assert again == (new_height, new_width)


def test_bankers_rounding_decides_halves() -> None:
    def size(height: int, width: int) -> tuple[int, int]:
        return smart_resize(height, width, factor=32, min_pixels=1, max_pixels=1 << 24)

    assert size(80, 112) == (64, 128)  # 2.5 → 2, 3.5 → 4
    assert size(1080, 1920) == (1088, 1920)


def test_an_odd_number_of_frames_is_rounded_to_even_pairs() -> None:
    """Five frames count as four (2.5 pairs → 2) when the volume is compared, as in transformers."""
    module = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    limits = {"factor": 32, "temporal_factor": 2, "min_pixels": 1, "max_pixels": 18_000}
    ours = smart_resize_video(5, 64, 64, **limits)
    assert ours == module.smart_resize(5, 64, 64, **limits) == (64, 64)


def test_errors_name_the_size() -> None:
    with pytest.raises(ImageError, match=r"2010×10 pixels, one side more than 200 times.*crop it"):
        smart_resize(10, 2010, factor=32, min_pixels=1, max_pixels=1 << 20)
    assert smart_resize(10, 2000, factor=32, min_pixels=1, max_pixels=1 << 20)
    with pytest.raises(ImageError, match=r"too short .1 of at least 2 frames.*send it as a picture"):
        smart_resize_video(1, 64, 64, factor=32, temporal_factor=2, min_pixels=1, max_pixels=1 << 20)
