"""Patches equal transformers' bit for bit, whatever the size and the limits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from snugvl.errors import CheckpointError, ImageError
from snugvl.inputs.pixels import ImagePreprocessor
from snugvl.inputs.settings import read_pixel_settings
from tests.draws import draws


@pytest.fixture(scope="session")
def images(checkpoint: Path) -> ImagePreprocessor:
    return ImagePreprocessor.from_folder(checkpoint)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(values.squeeze(-1) if bands == 1 else values)


def same(images: ImagePreprocessor, oracle: Any, image: Image.Image) -> None:
    ours, theirs = images.prepare(image), oracle(images=[image], return_tensors="pt")
    assert list(ours.grid_thw) == theirs["image_grid_thw"][0].tolist()
    assert ours.patches.dtype == torch.uint8
    assert ours.values().dtype == torch.float32
    assert torch.equal(ours.values(), theirs["pixel_values"])


SIZES = [
    (64, 64),
    (100, 75),
    (33, 47),
    (641, 479),
    (1, 1),
    (3, 200),
    (1, 100),
    (200, 1),
    (80, 112),
    (1500, 900),
]


@pytest.mark.parametrize("size", SIZES)
def test_equals_transformers(images: ImagePreprocessor, image_oracle: Any, size: tuple[int, int]) -> None:
    same(images, image_oracle, noise(*size))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "1"])
def test_equals_transformers_in_other_modes(images: ImagePreprocessor, image_oracle: Any, mode: str) -> None:
    image = noise(90, 60, "RGBA" if mode == "RGBA" else "RGB")
    if mode == "LA":
        image = image.convert("L")
        image.putalpha(noise(90, 60, "L", 1))
    same(images, image_oracle, image.convert(mode))


@given(width=st.integers(1, 500), height=st.integers(1, 500))
@draws(25)
def test_any_size(images: ImagePreprocessor, image_oracle: Any, width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ImageError):
            images.prepare(noise(width, height))
    else:
        same(images, image_oracle, noise(width, height))


def test_token_counts_equal_transformers(images: ImagePreprocessor, image_oracle: Any) -> None:
    sizes = np.random.default_rng(0).integers(40, 5000, (200, 2)).tolist()
    for width, height in sizes:
        patches = image_oracle.get_number_of_image_patches(height, width)
        assert images.tokens(width, height) == patches // 4


def test_lower_limit_equals_transformers_with_that_size(images: ImagePreprocessor, image_oracle: Any) -> None:
    image = noise(700, 500)
    ours = images.prepare(image, max_pixels=100_000)
    size = {"shortest_edge": 4096, "longest_edge": 100_000}
    theirs = image_oracle(images=[image], return_tensors="pt", size=size)
    assert torch.equal(ours.values(), theirs["pixel_values"])
    assert torch.equal(images.prepare(image, max_pixels=1 << 30).patches, images.prepare(image).patches)


def test_a_limit_below_the_minimum_wins(images: ImagePreprocessor) -> None:
    assert images.tokens(500, 500, max_pixels=1024) == 1
    assert images.tokens(8, 8) == 4
    assert images.tokens(8, 8, max_pixels=1024) == 1


def test_unequal_channels(broken: Path) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    clip = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    path = broken / "preprocessor_config.json"
    values = json.loads(path.read_text()) | clip
    path.write_text(json.dumps(values))
    values.pop("image_processor_type")
    same(ImagePreprocessor.from_folder(broken), module.Qwen2VLImageProcessorPil(**values), noise(100, 70))


def test_digest_is_of_content_and_settings(images: ImagePreprocessor) -> None:
    image = noise(200, 100)
    first = images.prepare(image).digest
    assert images.prepare(image.copy()).digest == first
    changed = image.copy()
    changed.putpixel((100, 50), (0, 0, 0) if image.getpixel((100, 50)) != (0, 0, 0) else (9, 9, 9))
    assert images.prepare(changed).digest != first
    assert images.prepare(image, max_pixels=10_000).digest != first
    # As many bytes in another shape are another picture.
    flat = Image.new("RGB", (64, 128))
    assert images.prepare(flat).digest != images.prepare(flat.transpose(Image.Transpose.ROTATE_90)).digest


def test_the_image_is_left_alone(images: ImagePreprocessor) -> None:
    image = noise(64, 64)
    before = image.tobytes()
    images.prepare(image)
    assert image.tobytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 0}, r"'patch_size' = 0, expected a positive number"),
        ({"patch_size": "16"}, r"'patch_size' = '16'"),
        ({"merge_size": None}, r"has no 'merge_size'"),
        ({"temporal_patch_size": True}, r"'temporal_patch_size' = True"),
        ({"image_mean": [0.5, 0.5]}, r"'image_mean' = \[0.5, 0.5\], expected three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, r"'image_std' .* positive"),
        ({"image_std": None}, r"has no 'image_std'"),
        ({"size": None}, r"has no 'shortest_edge'"),
        ({"size": 7}, r"'size' = 7"),
        ({"size": {"shortest_edge": 9999, "longest_edge": 4096}}, r"at least 9,999 and at most 4,096"),
        ({"size": {"shortest_edge": 1, "longest_edge": 500}}, r"500 pixels; one token alone has 32×32"),
        ({"rescale_factor": 0}, r"'rescale_factor' = 0"),
        ({"rescale_factor": "1/255"}, r"'rescale_factor'"),
        ({"resample": 99}, r"'resample' = 99, expected one of"),
        ({"do_resize": False}, r"'do_resize' = False; only True"),
        ({"do_center_crop": True}, r"'do_center_crop' = True; only False"),
    ],
)
def test_nonsense_is_refused(broken: Path, change: dict[str, Any], message: str) -> None:
    path = broken / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message) as raised:
        read_pixel_settings(broken)
    assert str(path) in str(raised.value)


def test_older_and_newer_files(broken: Path) -> None:
    path = broken / "preprocessor_config.json"
    values = json.loads(path.read_text())
    usual = read_pixel_settings(broken)
    values.pop("size")
    path.write_text(json.dumps(values | {"min_pixels": 4096, "max_pixels": 1 << 20, "resample": 3}))
    assert read_pixel_settings(broken) == usual
    joint = {"image_processor": values | {"size": {"shortest_edge": 4096, "longest_edge": 1 << 20}}}
    path.unlink()
    (broken / "processor_config.json").write_text(json.dumps(joint))
    assert read_pixel_settings(broken) == usual
    (broken / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        read_pixel_settings(broken)


def test_digest_of_a_file_stands_for_its_pixels(images: ImagePreprocessor) -> None:
    image = noise(200, 100)
    first = images.prepare(image, file=b"one").digest
    assert images.prepare(image, file=b"one").digest == first
    assert images.prepare(image, file=b"two").digest != first
    assert images.prepare(image, max_pixels=10_000, file=b"one").digest != first
    # What pixels hash to is no file's hash, whatever its bytes are.
    patches = images.prepare(image).patches.numpy().tobytes()
    assert images.prepare(image, file=patches).digest != images.prepare(image).digest
