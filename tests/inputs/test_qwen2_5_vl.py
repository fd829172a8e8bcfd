"""Pictures, prompts and videos of Qwen2.5-VL equal its own processor's in transformers."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.image_rules import smart_resize
from snugvl.core.messages import Picture, Video, user
from snugvl.errors import ImageError, RequestError
from snugvl.inputs.pixels import ImagePreprocessor, read_video_preprocessor
from snugvl.inputs.prompt import Processor
from snugvl.models.rope import mrope_positions
from tests import qwen2_5_vl
from tests.inputs.test_prompt import ANSWER, SYSTEM, ask_oracle, clip, noise

SIZES = [(28, 28), (100, 75), (33, 47), (641, 479), (1, 1), (3, 200), (200, 1), (1500, 900), (98, 112)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_5_vl.write(tmp_path_factory.mktemp("qwen2.5"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Processor:
    return Processor.from_folder(folder, read_config(folder))


@pytest.fixture(scope="module")
def images(folder: Path) -> ImagePreprocessor:
    return ImagePreprocessor.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path, video_oracle: Any) -> Any:
    """transformers' own Qwen2_5_VLProcessor; `video_oracle` put the functions of torchvision in place."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    pictures = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    # The module names torchvision in type hints alone; its base class calls what `video_oracle` put in place.
    parts = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    names = (*parts, "torchvision.transforms.v2.functional")
    with patch.dict(sys.modules, {name: ModuleType(name) for name in names if name not in sys.modules}):
        videos = import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    values = {key: value for key, value in qwen2_5_vl.IMAGES.items() if not key.endswith(("type", "class"))}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    template = json.loads((folder / "chat_template.json").read_text())["chat_template"]

    class Unchecked(Qwen2_5_VLProcessor):  # type: ignore[misc]
        """Without torchvision transformers can't look up its video classes, even to check the argument."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return Unchecked(
        pictures.Qwen2VLImageProcessorPil(**values),
        tokenizer,
        videos.Qwen2VLVideoProcessor(**values, cap_pixels_per_frame=False),
        chat_template=template,
    )


@pytest.mark.parametrize("size", SIZES)
def test_patches_equal_transformers(images: ImagePreprocessor, theirs: Any, size: tuple[int, int]) -> None:
    image = noise(*size)
    item, expected = images.prepare(image), theirs.image_processor(images=[image], return_tensors="pt")
    assert list(item.grid_thw) == expected["image_grid_thw"][0].tolist()
    assert item.patches.dtype == torch.uint8
    assert torch.equal(item.values(), expected["pixel_values"])


def test_token_counts_equal_transformers(ours: Processor, theirs: Any) -> None:
    for width, height in np.random.default_rng(0).integers(40, 5000, (100, 2)).tolist():
        patches = theirs.image_processor.get_number_of_image_patches(height, width)
        assert ours.pictures.images.tokens(width, height) == patches // 4
        high, wide = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=12845056)
        assert high * wide // 784 == patches // 4


CONVERSATIONS = {
    "text only": [user("What is 2 + 2?")],
    "one image": [SYSTEM, user(noise(100, 60), "What is in this image?")],
    "three images over turns": [
        user(noise(64, 96), "a", noise(200, 50, 1), "which?"), ANSWER, user("And ", noise(33, 47, 2)),
    ],
    "video": [user(clip(4), "What happens?")],
    "video of odd length, with an image": [SYSTEM, user("First ", clip(5, 70, 50), noise(64, 64), "then?")],
    "two videos": [user(clip(2), "or", clip(3, 64, 64))],
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_equal_transformers(ours: Processor, theirs: Any, name: str) -> None:
    messages = CONVERSATIONS[name]
    prepared, expected = ours.prepare(messages), ask_oracle(theirs, messages)
    assert list(prepared.prompt_ids) == expected["input_ids"][0].tolist()
    assert prepared.image_tokens == sum(token in ours.config.placeholders for token in prepared.prompt_ids)
    for kind, key in ((False, "image_grid_thw"), (True, "video_grid_thw")):
        items = [item for item in prepared.vision if (item.time_step is not None) == kind]
        pixels = "pixel_values_videos" if kind else "pixel_values"
        assert [list(item.grid_thw) for item in items] == (expected[key].tolist() if items else [])
        if items:
            assert torch.equal(torch.cat([item.values() for item in items]), expected[pixels])


@pytest.mark.parametrize("fps", [0.7, 2.0, 3.0, 25.0])
def test_times_of_videos_equal_transformers(ours: Processor, theirs: Any, fps: float) -> None:
    messages = [user(clip(9, fps=fps), "and", clip(4, 70, 50, fps), "?")]
    expected = ask_oracle(theirs, messages, fps)
    for item, seconds in zip(ours.prepare(messages).vision, expected["second_per_grid_ts"], strict=True):
        assert item.time_step == float(2 * seconds)


def test_a_video_at_another_speed_is_another_one_to_the_prefix_cache(ours: Processor) -> None:
    slow, fast = (ours.prepare([user(clip(4, fps=fps))]).vision[0] for fps in (1.0, 2.0))
    assert torch.equal(slow.patches, fast.patches)
    assert slow.digest != fast.digest
    assert fast.digest == ours.prepare([user(clip(4))]).vision[0].digest


@pytest.mark.parametrize("frames", [4, 40, 250])
def test_capped_frames_equal_transformers(folder: Path, theirs: Any, tmp_path: Path, frames: int) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    values = qwen2_5_vl.IMAGES | {"cap_pixels_per_frame": True, "max_video_tokens": 500}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(values))
    vision = read_config(tmp_path).vision
    assert vision is not None
    capped = read_video_preprocessor(tmp_path, vision)
    assert capped is not None
    settings = {key: value for key, value in values.items() if not key.endswith(("type", "class"))}
    oracle = type(theirs.video_processor)(**settings)
    array = torch.zeros(frames, 3, 199, 201, dtype=torch.uint8)
    grid = oracle([array], do_sample_frames=False, return_tensors="pt")["video_grid_thw"][0].tolist()
    assert list(capped.grid(frames, 201, 199)) == grid


def test_bad_videos(ours: Processor) -> None:
    with pytest.raises(ImageError, match=r"too short .1 of at least 2 frames.*send it as a picture"):
        ours.prepare([user(clip(1))])
    with pytest.raises(RequestError, match="never fall"):
        ours.prepare([user(Video(clip(2).frames, (1.0, 0.5)))])
    with pytest.raises(RequestError, match="max_pixels is 100; at least 784"):
        ours.prepare([user(Picture(noise(64, 64), max_pixels=100))])


def test_frames_of_one_time_are_at_one_time(ours: Processor) -> None:
    item = ours.prepare([user(Video(clip(4).frames, (1.0,) * 4))]).vision[0]
    ids = [1, *[ours.config.placeholders[1]] * (2 * item.grid_thw[1] * item.grid_thw[2] // 4)]
    positions, _ = mrope_positions(
        ids, [item.grid_thw], placeholders=ours.config.placeholders, merge_size=2, time_steps=[item.time_step]
    )
    assert set(positions[0, 1:].tolist()) == {1}
