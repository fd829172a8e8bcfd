"""Qwen2.5-VL through the engine against transformers' generate(): 64 greedy tokens, alone and in company."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

import snugvl
from snugvl.checkpoint.families import read_config
from snugvl.core.messages import Message, Text, Video, user
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.models.loader import load_model
from snugvl.models.networks import Qwen25VL
from tests import qwen2_5_vl
from tests.backends.test_oracle import NEW_TOKENS, SAMPLING, engine, picture, requests_of, run

FPS = 1.0 if qwen2_5_vl.WHOLE_SECONDS else 3.0


def conversations() -> dict[str, list[Message]]:
    """Pictures of one window, of several with edges, and smaller than one; a video with uneven positions."""
    first, second, third = picture(240, 150, 1), picture(112, 112, 2), picture(60, 300, 3)
    frames = tuple(picture(130, 84, seed) for seed in range(9))
    return {
        "no image": [user("What is a red circle?")],
        "one image": [user(first, "What is in this image?")],
        "three images": [
            Message("system", (Text("Two blue squares."),)),
            user(second, third, "A red circle,"),
            Message("assistant", (Text("two blue squares"),)),
            user("and", first, "?"),
        ],
        "a video": [user(Video(frames, tuple(i / FPS for i in range(9))), "What is in this image?")],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_5_vl.write(tmp_path_factory.mktemp("qwen2.5"))


@pytest.fixture(scope="module")
def network(folder: Path) -> Qwen25VL:
    loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(loaded, Qwen25VL)
    return loaded


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor.from_folder(folder, read_config(folder))


@pytest.fixture(scope="module")
def prompts(processor: Processor) -> dict[str, PreparedPrompt]:
    return {name: processor.prepare(messages) for name, messages in conversations().items()}


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: dict[str, PreparedPrompt], processor: Processor) -> dict[str, list[int]]:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return {name: oracle(model, prompt, processor) for name, prompt in prompts.items()}


def oracle(model: Any, prompt: PreparedPrompt, processor: Processor) -> list[int]:
    ids = torch.tensor([prompt.prompt_ids])
    image, video = processor.config.placeholders
    inputs: dict[str, Any] = {"mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int()}
    if prompt.vision:
        values = torch.cat([item.values() for item in prompt.vision])
        grids = torch.tensor([item.grid_thw for item in prompt.vision])
        if video in prompt.prompt_ids:
            inputs |= {"pixel_values_videos": values, "video_grid_thw": grids}
            inputs["second_per_grid_ts"] = torch.tensor([2 / FPS])
        else:
            inputs |= {"pixel_values": values, "image_grid_thw": grids}
    output = model.generate(
        input_ids=ids,
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("name", list(conversations()))
@pytest.mark.sample("one image", "three images", "a video")
def test_greedy_tokens_alone(
    name: str, network: Qwen25VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    assert len(set(expected[name])) > 5  # a loop of one token would prove little
    assert run(engine(network), {name: requests_of(prompts)[name]})[name] == expected[name]


def test_greedy_tokens_among_strangers_who_come_late(
    network: Qwen25VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    assert run(engine(network), requests_of(prompts), late=("one image", "a video")) == expected


def test_greedy_tokens_when_prompts_are_prefilled_in_small_chunks(
    network: Qwen25VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    assert run(engine(network, max_batched_tokens=7, max_num_seqs=3), requests_of(prompts)) == expected


def test_greedy_tokens_through_preemption(
    network: Qwen25VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    longest = max(len(prompt.prompt_ids) for prompt in prompts.values()) + NEW_TOKENS
    small = engine(network, num_blocks=-(-longest // 16) + 6)
    assert run(small, requests_of(prompts)) == expected
    assert small.stats.preemptions > 0


def test_the_whole_path_from_files_gives_the_oracles_text(
    folder: Path, expected: dict[str, list[int]], processor: Processor
) -> None:
    with snugvl.load(folder, device="cpu", context=2048) as model:
        stream = model.backend.submit(snugvl.Request(tuple(conversations()["one image"]), SAMPLING))
        text = "".join(delta.text for delta in stream)
        assert model.backend.capabilities.video
        sampling = snugvl.SamplingParams(max_tokens=8, ignore_eos=True)
        usage = model.caption(picture(240, 150, 1), sampling=sampling).usage
        assert usage is not None
        assert usage.completion_tokens == 8
    assert text == processor.tokenizer.decode(expected["one image"])
