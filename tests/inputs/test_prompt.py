"""Prompts equal transformers' Qwen3VLProcessor id for id; what can't be right is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from snugvl.checkpoint.architecture import ModelConfig, VisionTokens
from snugvl.checkpoint.families import read_config
from snugvl.core.messages import Message, Picture, Role, Text, Video, user
from snugvl.errors import CheckpointError, ImageError, RequestError, RequestTooLarge
from snugvl.inputs.prompt import Processor


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def clip(frames: int, width: int = 96, height: int = 64, fps: float = 2.0) -> Video:
    return Video(
        tuple(noise(width, height, seed) for seed in range(frames)), tuple(i / fps for i in range(frames))
    )


def ask_oracle(oracle: Any, messages: Sequence[Message], fps: float = 2.0) -> Any:
    """The conversation through transformers: template, then the processor on its text."""
    conversation, images, videos = [], [], []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message.content:
            match part:
                case Text(text):
                    content.append({"type": "text", "text": text})
                case Picture(image):
                    content.append({"type": "image"})
                    images.append(image)
                case Video(frames, _):
                    content.append({"type": "video"})
                    videos.append(np.stack([np.asarray(frame) for frame in frames]))
        conversation.append({"role": message.role, "content": content})
    text = oracle.apply_chat_template(conversation, add_generation_prompt=True)
    metadata = [
        {"fps": fps, "total_num_frames": len(v), "frames_indices": list(range(len(v)))} for v in videos
    ]
    extra = {"video_metadata": metadata, "do_sample_frames": False} if videos else {}
    return oracle(text=[text], images=images or None, videos=videos or None, return_tensors="pt", **extra)


SYSTEM = Message("system", (Text("You see well."),))
ANSWER = Message("assistant", (Text("A red circle.\n"),))
CONVERSATIONS = {
    "text only": [user("What is 2 + 2?")],
    "one image": [user(noise(100, 60), "What is in this image?")],
    "image last": [user("Look: ", noise(64, 64))],
    "three images in one message": [user(noise(64, 96), "a", noise(200, 50, 1), noise(33, 47, 2), "which?")],
    "images over several turns": [
        SYSTEM, user(noise(64, 64), "What?"), ANSWER, user("And ", noise(90, 130, 1), "?"), ANSWER,
        user("Compare them."),
    ],
    "system and text": [SYSTEM, user("café 你好 🙂 naïve\n\n  spaces  ")],
    "video": [user(clip(4), "What happens?")],
    "video of odd length, with an image": [SYSTEM, user("First ", clip(5, 70, 50), noise(64, 64), "then?")],
    "two videos": [user(clip(2), "or", clip(3, 64, 64))],
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_transformers(processor: Processor, oracle: Any, name: str) -> None:
    messages = CONVERSATIONS[name]
    ours, theirs = processor.prepare(messages), ask_oracle(oracle, messages)
    assert list(ours.prompt_ids) == theirs["input_ids"][0].tolist()
    items = {
        kind: [i for i, part in zip(ours.vision, _parts(messages), strict=True) if isinstance(part, kind)]
        for kind in (Picture, Video)
    }
    for kind, key in ((Picture, "image"), (Video, "video")):
        pixels = "pixel_values" if kind is Picture else "pixel_values_videos"
        assert [list(item.grid_thw) for item in items[kind]] == (
            theirs[f"{key}_grid_thw"].tolist() if items[kind] else []
        )
        if items[kind]:
            assert torch.equal(torch.cat([item.values() for item in items[kind]]), theirs[pixels])


def _parts(messages: Sequence[Message]) -> list[Picture | Video]:
    return [part for m in messages for part in m.content if not isinstance(part, Text)]


def test_image_tokens_are_the_placeholders(processor: Processor, config: ModelConfig) -> None:
    messages = CONVERSATIONS["video of odd length, with an image"]
    prepared = processor.prepare(messages)
    pads = config.placeholders
    assert prepared.image_tokens == sum(i in pads for i in prepared.prompt_ids)
    assert prepared.image_tokens == sum(t * h * w // 4 for t, h, w in (i.grid_thw for i in prepared.vision))


def test_real_tokenizer_and_template(tmp_path: Path, config: ModelConfig) -> None:
    """Qwen's own 11 MB tokenizer, where the checkout lies beside it."""
    shared = Path(__file__).parents[3] / "shared" / "checkpoints" / "tokenizer"
    if not shared.exists():
        pytest.skip("needs ../shared")
    from transformers import AutoTokenizer

    real = replace(config, vision_tokens=VisionTokens(image=151655, video=151656, start=151652, end=151653))
    processor = Processor.from_folder(shared, real)
    theirs = AutoTokenizer.from_pretrained(shared)
    messages = [SYSTEM, user("Wie heißt das? 1234 你好\n")]
    plain = [{"role": m.role, "content": m.content[0].text} for m in messages]  # type: ignore[union-attr]
    text = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert processor.template.render(messages) == text
    assert list(processor.prepare(messages).prompt_ids) == theirs(text)["input_ids"]
    assert processor.tokenizer.eos_ids == {151645, 151643}
    assert processor.pictures.images.tokens(1920, 1080) == 2040  # 60 × 34
    assert processor.pictures.images.tokens(4032, 3024) == 11844


def test_max_pixels_lowers_the_cost(processor: Processor) -> None:
    image = noise(640, 640)
    whole = processor.prepare([user(image)])
    small = processor.prepare([user(Picture(image, max_pixels=128 * 128))])
    assert (whole.image_tokens, small.image_tokens) == (400, 16)
    assert small.image_tokens == processor.pictures.images.tokens(640, 640, 128 * 128)


ROLES: tuple[tuple[str, Role], ...] = (("a{}b", "user"), ("x{}", "tool"))


@pytest.mark.parametrize("mark", ["<tool_response>", "</tool_response>"])
def test_nobody_speaks_as_a_tool(mark: str) -> None:
    """The marks are no special tokens, but text with them would have the very ids of a tool's answer."""
    folder = Path(str(resources.files("snugvl") / "pocket"))
    real = Processor.from_folder(folder, read_config(folder))
    assert mark in real.template.answer_marks
    for text, role in ROLES:
        found, plain = (
            real.tokenizer.decode(list(ids), skip_special=False)
            for each in (mark, "-")
            for ids in [
                real.prepare([user("hi"), Message(role, (Text(text.format(each)),), (), "c")]).prompt_ids
            ]
        )
        assert found.count(mark) == plain.count(mark)
        assert mark[1:] in found


def test_counting_takes_what_does_not_fit_but_not_without_end(processor: Processor) -> None:
    many = processor.count([user("word " * 3000)], most=1000)
    assert len(many.prompt_ids) > 1000
    assert many.vision == ()
    with pytest.raises(RequestTooLarge, match=r"characters, which are at least [\d,]+ tokens"):
        processor.count([user(" " * 10_000_000)], most=1000)
    with pytest.raises(RequestTooLarge):
        processor.count_prompt("<|" * 10_000_000, most=1000)


def test_work_that_nobody_wants_ends_between_its_parts(processor: Processor) -> None:
    class LeftError(Exception):
        pass

    looks: list[int] = []

    def go_on() -> None:
        looks.append(1)
        if len(looks) == 4:
            raise LeftError

    with pytest.raises(LeftError):
        processor.prepare([user("look", noise(64, 64), noise(64, 64))], go_on=go_on)


def test_text_that_only_looks_special_is_text(processor: Processor) -> None:
    ids = processor.prepare([user("a <think> b <|nothing|> <|im_end>")]).prompt_ids
    assert processor.tokenizer.decode(list(ids)).count("<|nothing|>") == 1


def test_an_image_in_the_system_message_is_refused(processor: Processor) -> None:
    with pytest.raises(RequestError, match=r"0 placeholders for 1 pictures.*user messages"):
        processor.prepare([Message("system", (Picture(noise(64, 64)),)), user("hi")])


def test_unknown_role_and_empty_conversation(processor: Processor) -> None:
    with pytest.raises(RequestError, match=r"role 'robot' is unknown; use one of"):
        processor.prepare([Message("robot", (Text("x"),))])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="empty"):
        processor.prepare([])


def test_too_long_is_refused_before_pixels(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.pictures.images, "prepare", lambda *_: pytest.fail("touched pixels"))
    with pytest.raises(
        RequestTooLarge, match=r"prompt has \d+ tokens \(400 of them for pictures\), at most 300"
    ):
        processor.prepare([user(noise(640, 640))], max_tokens=300)


def test_extreme_aspect_and_bad_limit(processor: Processor) -> None:
    with pytest.raises(ImageError, match=r"4000×10 pixels, .* 200 times"):
        processor.prepare([user(Image.new("RGB", (4000, 10)))])
    with pytest.raises(RequestError, match="max_pixels is 100; at least 1024"):
        processor.prepare([user(Picture(noise(64, 64), max_pixels=100))])


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (Video((), ()), "no frames"),
        (clip(1), "too short"),
        (Video(clip(2).frames, (0.0,)), "2 frames but 1 timestamps"),
        (Video((noise(64, 64), noise(64, 32)), (0.0, 1.0)), "differ in size"),
        (Video(clip(2).frames, (1.0, 0.5)), "never fall"),
        (Video(clip(2).frames, (0.0, float("nan"))), "never fall"),
    ],
)
def test_bad_videos(processor: Processor, video: Video, message: str) -> None:
    with pytest.raises((RequestError, ImageError), match=message):
        processor.prepare([user(video)])


def test_a_checkpoint_without_video(broken: Path, config: ModelConfig) -> None:
    (broken / "video_preprocessor_config.json").unlink()
    processor = Processor.from_folder(broken, config)
    with pytest.raises(RequestError, match="takes no videos"):
        processor.prepare([user(clip(2))])


def test_contradictions_are_named(broken: Path, config: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match=r"image_token_id' = 7, which is not a special token"):
        Processor.from_folder(broken, replace(config, vision_tokens=VisionTokens(7, 1, 2, 3)))
    path = broken / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 14}))
    with pytest.raises(CheckpointError, match=r"'patch_size' = 14, config.json has 16"):
        Processor.from_folder(broken, config)


def test_a_picture_that_is_too_long_is_named(processor: Processor) -> None:
    with pytest.raises(ImageError, match="200") as raised:
        processor.prepare([user("hi"), user(noise(64, 64), noise(2100, 10), "?")])
    assert raised.value.field == "messages[1].content"
