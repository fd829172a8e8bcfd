"""Tokens and patches of any size, equal to transformers' own processors."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.checkpoint.facts import ImageRule
from snugvl.checkpoint.image_rules import FilledArea, FixedSquare, ScaledTiles, SmartResize, TilesAndThumbnail
from snugvl.errors import ImageError, RequestError
from tests.draws import draws

COUNTS: dict[str, Any] = json.loads(Path(__file__).with_name("counts.json").read_text())
QWEN3 = SmartResize(16, 2, 65536, 16777216)
QWEN25 = SmartResize(14, 2, 3136, 12845056)
INTERN = TilesAndThumbnail(448, 14, 256, 1, 12)
GEMMA = FixedSquare(896, 14, 256)
SMOL = ScaledTiles(384, 14, 81, 1536)
SMALL = ScaledTiles(512, 16, 64, 2048)
RULES: dict[str, ImageRule] = {
    "qwen3_vl (min 65536, max 16777216, factor 32)": QWEN3,
    "qwen2_5_vl hub (min 3136, max 12845056, factor 28)": QWEN25,
    "internvl3 (448 tiles, 1..12 + thumbnail, 256/tile)": INTERN,
    "gemma3 (896x896 fixed, no pan&scan, 256 tokens)": GEMMA,
    "SmolVLM-Instruct/SmolVLM2-2.2B (longest 1536, tile 384, 81/tile)": SMOL,
    "SmolVLM-256M/500M (longest 2048, tile 512, 64/tile)": SMALL,
}


def sizes(count: int = 200, most: int = 5000) -> list[tuple[int, int]]:
    """Random sizes, half of them within a factor of two of a square, and a few at edges."""
    draw = random.Random(7)
    found = [(1, 1), (1, 150), (150, 1), (448, 448), (1536, 1536), (3024, 4032), (4032, 3024), (384, 768)]
    while len(found) < count:
        width = draw.randint(1, most)
        height = draw.randint(1, most) if draw.random() < 0.5 else int(width * draw.uniform(0.5, 2)) + 1
        if max(width, height) <= 190 * min(width, height):
            found.append((width, height))
    return found


@pytest.mark.parametrize("family", RULES)
def test_the_published_table(family: str) -> None:
    for size, wanted in COUNTS["image_tokens"][family].items():
        width, height = map(int, size.split("x"))
        assert RULES[family].tokens(width, height) == wanted.get("tokens", wanted.get("image_tokens"))
        if "patches" in wanted:
            assert RULES[family].patches(width, height) == wanted["patches"]


@pytest.mark.parametrize("rule", [QWEN3, QWEN25])
def test_qwen_equals_its_image_processor(rule: SmartResize) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(
        patch_size=rule.patch_size,
        merge_size=2,
        size={"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels},
    )
    for width, height in sizes():
        patches = processor.get_number_of_image_patches(height, width)
        assert rule.patches(width, height) == patches
        assert rule.tokens(width, height) == patches // 4
    for width, height in sizes(12, 400)[8:]:  # and what really comes out of it
        pixels = np.zeros((height, width, 3), np.uint8)
        assert rule.patches(width, height) == len(processor(pixels, return_tensors="np")["pixel_values"])


@pytest.mark.parametrize("rule", [SMOL, SMALL])
@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
@pytest.mark.sample("idefics3-rule0", "smolvlm-rule0")
def test_smolvlm_equals_its_image_processor(rule: ScaledTiles, kind: str) -> None:
    module = pytest.importorskip(f"transformers.models.{kind}.image_processing_pil_{kind}")
    name = {"idefics3": "Idefics3ImageProcessorPil", "smolvlm": "SmolVLMImageProcessorPil"}[kind]
    processor = getattr(module, name)(
        size={"longest_edge": rule.longest}, max_image_size={"longest_edge": rule.side}
    )
    for width, height in sizes():
        tiles, _, _ = processor.get_number_of_image_patches(height, width)
        assert rule.tiles(width, height) == tiles
    for width, height in [(448, 448), *sizes(11, 900)[8:]]:
        tiles = processor([[np.zeros((height, width, 3), np.uint8)]], return_tensors="np")["pixel_values"]
        assert tiles.shape[-1] == tiles.shape[-2] == rule.side
        assert rule.tiles(width, height) == tiles.shape[1]
        assert rule.patches(width, height) == tiles.shape[1] * (rule.side // rule.patch_size) ** 2


def test_internvl_equals_its_image_processor() -> None:
    module = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    settings = {"size": {"height": 448, "width": 448}, "crop_to_patches": True}
    processor = module.GotOcr2ImageProcessorPil(**settings, min_patches=1, max_patches=12)
    for width, height in sizes():
        tiles = processor.get_number_of_image_patches(height, width)
        columns, rows = module.get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        # The utility adds the thumbnail to a single tile too; the processor itself does not.
        assert INTERN.tiles(width, height) == (columns * rows + 1 if columns * rows > 1 else 1)
        assert tiles in (INTERN.tiles(width, height), 2)
    for width, height in sizes(12, 900)[3:]:
        tiles = processor(np.zeros((height, width, 3), np.uint8), return_tensors="np")["pixel_values"]
        assert INTERN.tiles(width, height) == len(tiles)


def test_gemma_equals_its_image_processor() -> None:
    module = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    processor = module.Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    for width, height in sizes(10, 700):
        picture = np.zeros((height, width, 3), np.uint8)
        # A picture of one pixel leaves open which axis is of colours.
        pixels = processor(picture, return_tensors="np", input_data_format="channels_last")["pixel_values"]
        assert pixels.shape == (1, 3, 896, 896)
        assert GEMMA.patches(width, height) == (896 // 14) ** 2
        assert GEMMA.tokens(width, height) == 256


def test_gemma_4_equals_its_image_processor() -> None:
    module = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    for tokens in (70, 280, 1120):
        rule = FilledArea(16, 3, tokens)
        for width, height in (*sizes(20, 3000), (4000, 20), (20, 4000), (1024, 1024)):
            high, wide = module.get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
            assert rule.patches(width, height) == high * wide // 256
            assert rule.tokens(width, height) * 9 == rule.patches(width, height)
    assert FilledArea(16, 3, 280).tokens(1024, 1024) == 256


SIDES = st.integers(32, 4000)


@draws(40)
@given(SIDES, SIDES, st.integers(512**2, 1 << 24), st.integers(512**2, 1 << 24))
def test_fewer_pixels_never_cost_more_tokens(width: int, height: int, first: int, second: int) -> None:
    low, high = min(first, second), max(first, second)
    for rule in RULES.values():
        if isinstance(rule, SmartResize | ScaledTiles | FixedSquare):
            assert rule.tokens(width, height, low) <= rule.tokens(width, height, high)
        assert rule.tokens(width, height, high) <= rule.tokens(width, height) or rule is INTERN
        assert rule.patches(width, height, low) > 0
    # InternVL's tiles follow the aspect, so only their limit is sure.
    assert INTERN.tiles(width, height, low) <= low // 448**2 + 1
    assert QWEN3.patches(width, height, low) * 256 <= low or min(width, height) * 32 < max(width, height)


@pytest.mark.parametrize("rule", [QWEN3, INTERN, SMOL])
def test_a_limit_below_one_token_is_refused(rule: ImageRule) -> None:
    with pytest.raises(RequestError, match="max_pixels is 100; at least"):
        rule.tokens(640, 480, 100)


def test_a_strip_is_refused_as_everywhere() -> None:
    with pytest.raises(ImageError, match="200 times"):
        QWEN3.tokens(10, 3000)
    assert math.isqrt(SMOL.max_pixels) == 1536
    assert (INTERN.min_pixels, INTERN.max_pixels) == (448**2, 12 * 448**2)
    assert GEMMA.min_pixels == GEMMA.max_pixels == 896**2
    assert ScaledTiles(384, 14, 81, 1536, split=False).tiles(4000, 3000) == 1
