"""Loading in each format on a CPU: what is planned is what is held."""

from typing import Any

import pytest
from PIL import Image

from snugvl.backends.protocol import Picture, Video, user
from snugvl.loading import load_engine


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", "bfloat16"), ("int8", "auto"), ("int4", "bfloat16")])
def test_formats_by_wish(weights: Any, dtype: Any) -> None:
    loaded = load_engine("pocket", device="cpu", dtype=dtype, weights=weights, context=512)
    try:
        assert loaded.backend.capabilities.weights == weights
        for name in ("text weights", "vision weights"):
            assert loaded.planned[name] == loaded.weights[name]
        assert loaded.cap_bytes is None
        assert "int" not in weights or weights in loaded.subject
    finally:
        loaded.backend.close()


def test_auto_on_a_cpu_takes_the_dtype() -> None:
    loaded = load_engine("pocket", device="cpu", dtype="bfloat16", context=512, memory="2GiB")
    try:
        assert loaded.backend.capabilities.weights == "bf16"
        assert sum(loaded.planned.values()) <= 2 << 30
    finally:
        loaded.backend.close()


def test_a_video_has_no_more_patches_than_the_largest_picture() -> None:
    loaded = load_engine("pocket", device="cpu", dtype="auto", context=512, max_pixels=32_768)
    try:
        frame = Image.new("RGB", (400, 400))
        video = Video((frame,) * 8, tuple(float(second) for second in range(8)))
        for part in (Picture(frame), video):
            assert 0 < loaded.backend.tokenize((user(part, "?"),)).image_tokens <= 32
    finally:
        loaded.backend.close()
