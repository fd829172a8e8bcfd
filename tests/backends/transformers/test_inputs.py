"""Prompts equal to transformers' own, the sizes of pictures, and tokenizers of every kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from snugvl.backends.transformers.opening import DecodedTokenizer, tokenizer_of
from snugvl.backends.transformers.resolution import resolution_of
from snugvl.core.messages import Message, Picture, Request, Text, Tool, ToolForm, ToolUse, Video, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import ImageError, RequestError, RequestTooLarge, UnsupportedModel
from snugvl.inputs.detokenizer import Detokenizer
from snugvl.inputs.tools.forms import call_parser
from tests.backends.transformers import families
from tests.backends.transformers.conftest import Opened
from tests.backends.transformers.test_families import picture
from tests.inputs.tools.reading import read

Family = Callable[[str], Opened]


@pytest.mark.parametrize("name", families.SEEING)
def test_prompts_are_those_of_transformers(name: str, family: Family) -> None:
    opened = family(name)
    image, answer = picture(90, 60, 1), Message("assistant", (Text("Fine"),))
    ours = opened.prompt(user(image, "What is this?"), answer, user("And", "?"))
    processor = opened.preparer._inputs.processor
    placeholder = f"{processor.image_token}\n" if name == "llava" else {"type": "image", "image": image}
    parts = name != "llava"
    conversation = [
        {
            "role": "user",
            "content": [placeholder, {"type": "text", "text": "What is this?"}]
            if parts
            else f"{placeholder}What is this?",
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Fine"}] if parts else "Fine"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}] if parts else "And?"},
    ]
    text = opened.preparer._inputs.tokenizer.apply_chat_template(
        conversation, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True
    )
    theirs = processor(
        text=[text], images=[image], return_tensors="pt", add_special_tokens=not text.startswith("<bos>")
    )
    assert ours.inputs.keys() == {key for key, value in theirs.items() if isinstance(value, torch.Tensor)}
    for key, value in ours.inputs.items():
        assert torch.equal(value, theirs[key]), key


def test_a_conversation_is_bounded_and_its_parts_are_checked(family: Family) -> None:
    opened = family("gemma3")
    with pytest.raises(RequestTooLarge, match=r"\(4 of them for pictures\), at most 10 fit"):
        opened.preparer.prepare([user(picture(8, 8, 1), "?")], max_tokens=10)
    frames = (picture(16, 16, 1),)
    with pytest.raises(RequestError, match=r"takes no videos here.*send frames as pictures"):
        opened.prompt(user(Video(frames, (0.0,)), "?"))
    with pytest.raises(RequestError, match="role 'robot'"):
        opened.prompt(Message("robot", (Text("Hi"),)))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="conversation is empty"):
        opened.prompt()


def test_tools_that_the_template_does_not_show_are_described(family: Family) -> None:
    opened = family("gemma3")
    assert not opened.backend.capabilities.tools
    tools = ToolUse((Tool("f", "Does.", {"properties": {"n": {"enum": [3]}}, "required": ["n"]}),), "f")
    shown = opened.preparer.prepare([user("Hi")], tools=tools.tools).inputs["input_ids"][0]
    assert "<tools>" in opened.preparer.tokenizer.decode(shown.tolist())
    request = Request((user("Hi"),), SamplingParams(max_tokens=200), tools=tools)
    text = "".join(delta.text for delta in opened.backend.submit(request))
    assert read(call_parser(ToolForm(), tools), text) == ("", [("f", '{"n":3}')])


def test_a_picture_that_a_processor_refuses_is_an_error_of_the_picture(qwen: Opened) -> None:
    with pytest.raises(ImageError, match=r"^the image can't be taken by .*: .*aspect ratio"):
        qwen.prompt(user(Image.new("RGB", (3000, 5)), "?"))
    good, long = picture(64, 48, 1), Picture(Image.new("RGB", (3000, 5)), name="long.png")
    with pytest.raises(ImageError, match=r"^long\.png can't be taken by .*: .*aspect ratio"):
        qwen.prompt(user(good, long, good, "?"))


@pytest.mark.parametrize(
    ("prompt", "match"),
    [((), "empty"), ("", "empty"), ("a<eos>", "control token"), ((1, -1), "0 to 511"), ((True,), "0 to 511")],
)
def test_bare_prompts_are_checked(prompt: Any, match: str, family: Family) -> None:
    with pytest.raises(RequestError, match=match):
        family("gemma3").preparer.prepare_prompt(prompt)


def test_a_bare_prompt_holds_no_placeholder(family: Family) -> None:
    opened = family("gemma3")
    soft = opened.preparer.tokenizer.token_id("<soft>")
    assert soft is not None
    with pytest.raises(RequestError, match="stands for a picture"):
        opened.preparer.prepare_prompt((5, soft))


def test_a_bias_on_a_token_that_is_none_is_refused(family: Family) -> None:
    sampling = SamplingParams(logit_bias={families.VOCAB: 1.0})
    with pytest.raises(RequestError, match="vocabulary is 0 to 511"):
        family("llama").backend.submit(Request((user("Hi"),), sampling))


@pytest.mark.parametrize("seconds", [(0.0, 1.0, 2.0, 3.0), (0.0, 0.5, 1.0, 1.5)])
def test_a_videos_frames_keep_their_times(
    seconds: tuple[float, ...], qwen: Opened, video_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`video_oracle` is transformers' own video processor, with stand-ins for what torchvision does."""
    processor = qwen.preparer._inputs.processor
    monkeypatch.setattr(processor, "video_processor", video_oracle)
    frames = tuple(picture(64, 64, seed) for seed in range(4))
    assert qwen.preparer.videos
    prompt = qwen.prompt(user(Video(frames, seconds), "?"))
    text = qwen.backend.detokenize(prompt.prompt_ids)
    for first, second in (seconds[:2], seconds[2:]):
        assert f"<{(first + second) / 2:.1f} seconds>" in text
    assert prompt.inputs["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert prompt.image_tokens == 8
    assert len(qwen.expected(prompt, 4)) == 4
    small = Picture(picture(256, 256, 1), 4096)
    both = qwen.prompt(user(small, Video(frames, seconds), "?"))
    assert both.inputs["video_grid_thw"].tolist() == [[2, 4, 4]]  # a picture's limit is the picture's
    assert both.inputs["image_grid_thw"].tolist() == [[1, 4, 4]]


PROCESSORS = {  # class, what it makes of 600² pixels at most, its own limit
    "qwen2_vl.Qwen2VLImageProcessorPil": (
        {"size": {"shortest_edge": 3136, "longest_edge": 360_000}},
        1_003_520,
    ),
    "gemma4.Gemma4ImageProcessorPil": ({"max_soft_tokens": 140}, 280 * 48**2),
    "idefics3.Idefics3ImageProcessorPil": ({"size": {"longest_edge": 364}}, 1456**2),
    "got_ocr2.GotOcr2ImageProcessorPil": ({"min_patches": 1, "max_patches": 2}, 12 * 384**2),
    "siglip.SiglipImageProcessorPil": ({}, 224**2),
    "clip.CLIPImageProcessorPil": ({}, 224**2),
    "pixtral.PixtralImageProcessorPil": ({}, 1024**2),
    "llava_next.LlavaNextImageProcessorPil": ({}, 672**2),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_kind_of_processor_is_told_its_limit_in_its_own_words(name: str) -> None:
    from importlib import import_module

    module, _, kind = name.partition(".")
    processor = getattr(import_module(f"transformers.models.{module}.image_processing_pil_{module}"), kind)()
    told, most = PROCESSORS[name]
    resolution = resolution_of(processor, None)
    assert resolution.max_pixels == most
    assert resolution.arguments(600 * 600) == told
    small = resolution.limited(Image.new("RGB", (2000, 1000)), 600 * 600)
    scales = module in ("pixtral", "llava_next")
    assert (small.width * small.height <= 600 * 600) == scales
    if module not in ("siglip", "clip"):
        assert resolution_of(processor, 600 * 600).max_pixels == 600 * 600
        with pytest.raises(RequestError, match="at least"):
            resolution_of(processor, 0)


def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT's: neither byte-level nor SentencePiece's."""
    words = ["[UNK]", "a", "cat", "##s", "and", "é", "."]
    made = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="[UNK]")


def test_a_tokenizer_of_another_kind_is_decoded_token_by_token(tmp_path: Path) -> None:
    made = word_pieces()
    made.save_pretrained(tmp_path)
    ours = tokenizer_of(tmp_path, made, frozenset())
    assert isinstance(ours, DecodedTokenizer)
    ids = made("a cat and cats é")["input_ids"]
    detokenizer = Detokenizer(ours)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "a cat and cats é"
    assert ours.eos_ids == {made.eos_token_id}
    assert ours.token_bytes(10_000) == b""


def test_tokens_that_stand_outside_of_tokenizer_json_are_known(tmp_path: Path) -> None:
    words = families.tokenizer()
    words.save_pretrained(tmp_path)
    words.add_tokens(["<late>"])
    ours = tokenizer_of(tmp_path, words, frozenset())
    assert not isinstance(ours, DecodedTokenizer)
    ids = words("é<late>", add_special_tokens=False)["input_ids"]
    assert b"".join(map(ours.token_bytes, ids)) == "é<late>".encode()
    assert ours.eos_ids == {words.eos_token_id}


def test_a_tokenizer_in_python_only_is_refused(tmp_path: Path) -> None:
    class Slow:
        eos_token_id = 0

        def __len__(self) -> int:
            return 3

    with pytest.raises(UnsupportedModel, match="in Python only"):
        tokenizer_of(tmp_path, Slow(), frozenset())
