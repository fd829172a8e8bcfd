"""The engine against transformers' generate(): 64 greedy tokens, alone and in every company.

The oracle gets our prompt (equal to its own, as tests/inputs shows) and the same weights in float32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from snugvl.core.config import EngineConfig
from snugvl.core.messages import Message, Text, Video, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine import speculation
from snugvl.engine.drafts import NgramIndex
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.models.networks import Qwen3VL

NEW_TOKENS = 64
SAMPLING = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def conversations() -> dict[str, list[Message]]:
    first, second, third = picture(100, 70, 1), picture(64, 200, 2), picture(33, 300, 3)
    frames = tuple(picture(96, 64, seed) for seed in range(5))
    return {
        "no image": [user("What is a red circle?")],
        "one image": [user(first, "What is in this image?")],
        "three images": [
            Message("system", (Text("Two blue squares."),)),
            user(first, second, "A red circle,"),
            Message("assistant", (Text("two blue squares"),)),
            user("and", third, "?"),
        ],
        "a video": [user(Video(frames, (0.0, 0.5, 1.0, 1.5, 2.0)), "What is in this image?")],
    }


@pytest.fixture(scope="module")
def prompts(processor: Processor) -> dict[str, PreparedPrompt]:
    return {name: processor.prepare(messages) for name, messages in conversations().items()}


@pytest.fixture(scope="module")
def expected(
    prompts: dict[str, PreparedPrompt], processor: Processor, transformers_model: Any
) -> dict[str, list[int]]:
    return {name: oracle(transformers_model, prompt, processor) for name, prompt in prompts.items()}


def oracle(model: Any, prompt: PreparedPrompt, processor: Processor) -> list[int]:
    config = processor.config
    ids = torch.tensor([prompt.prompt_ids])
    kinds = sum(index * (ids == token).long() for index, token in enumerate(config.placeholders, 1))
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
    if prompt.vision:
        video = bool((kinds == 2).any())
        names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        values = torch.cat([item.values() for item in prompt.vision])
        inputs |= dict(
            zip(names, (values, torch.tensor([item.grid_thw for item in prompt.vision])), strict=True)
        )
    output = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def run(
    engine: Engine, requests: dict[str, EngineRequest], *, late: tuple[str, ...] = ()
) -> dict[str, list[int]]:
    """Tokens of each request; those in `late` are added after a few steps."""
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    for name, request in requests.items():
        if name not in late:
            engine.add(request)
    steps = 0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(output.token_id)
        steps += 1
        if steps == 3:
            for name in late:
                engine.add(requests[name])
    engine.check_integrity()
    return tokens


def requests_of(prompts: dict[str, PreparedPrompt]) -> dict[str, EngineRequest]:
    return {
        name: EngineRequest(name, prompt.prompt_ids, SAMPLING, prompt.vision)
        for name, prompt in prompts.items()
    }


def engine(network: Qwen3VL, **changes: Any) -> Engine:
    values = {"num_blocks": 256, "max_model_len": 2048, "max_batched_tokens": 1024, "max_num_seqs": 8}
    return Engine(network, EngineConfig(**(values | changes)))


@pytest.mark.parametrize("name", list(conversations()))
def test_greedy_tokens_alone(
    name: str, network: Qwen3VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    assert len(set(expected[name])) > 5  # a loop of one token would prove little
    assert run(engine(network), {name: requests_of(prompts)[name]})[name] == expected[name]


def test_greedy_tokens_among_strangers_who_come_late(
    network: Qwen3VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    assert run(engine(network), requests_of(prompts), late=("one image", "a video")) == expected


def test_greedy_tokens_when_prompts_are_prefilled_in_small_chunks(
    network: Qwen3VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    assert run(engine(network, max_batched_tokens=7, max_num_seqs=3), requests_of(prompts)) == expected


@pytest.mark.parametrize("wrong", [3, 1000])
@pytest.mark.sample("1000")
def test_greedy_tokens_with_guesses(
    wrong: int,
    network: Qwen3VL,
    prompts: dict[str, PreparedPrompt],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most of them right: alone, in company, preempted, and with what recurrent states keep for the next."""
    answers = {tuple(prompt.prompt_ids): expected[name] for name, prompt in prompts.items()}

    class Told:
        def __init__(self, prompt: NgramIndex, generated: list[int]) -> None:
            self.line, self.generated = answers[tuple(prompt.tokens)], generated

        def propose(self, most: int) -> list[int]:
            places = range(start := len(self.generated), min(start + most, len(self.line)))
            return [self.line[place] if place % wrong else 5 for place in places]

    monkeypatch.setattr(speculation, "NgramProposer", Told)
    longest = max(len(prompt.prompt_ids) for prompt in prompts.values()) + NEW_TOKENS
    for changes in ({}, {"state_snapshots": 16}, {"num_blocks": -(-longest // 16) + 2}):
        shared = engine(network, speculation="ngram", max_num_seqs=24, **changes)
        requests = requests_of(prompts)
        assert run(shared, requests, late=("one image", "a video")) == expected
        assert (shared.stats.preemptions > 0) == ("num_blocks" in changes)
        # Alone beside the first; the other places for states and blocks are about the company.
        for name, request in () if changes else requests.items():
            before, steps = shared.stats, shared.steps
            assert run(shared, {name: request})[name] == expected[name]
            assert shared.stats.accepted_tokens - before.accepted_tokens > NEW_TOKENS / 2
            assert shared.steps - steps < (0.4 if wrong > NEW_TOKENS else 0.6) * NEW_TOKENS


def test_greedy_tokens_through_preemption(
    network: Qwen3VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    longest = max(len(prompt.prompt_ids) for prompt in prompts.values()) + NEW_TOKENS
    small = engine(network, num_blocks=-(-longest // 16) + 2)
    assert run(small, requests_of(prompts)) == expected
    assert small.stats.preemptions > 0


def test_greedy_tokens_after_an_abort(
    network: Qwen3VL, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    shared = engine(network)
    requests = requests_of(prompts)
    for name in ("three images", "one image"):
        shared.add(requests[name])
    for _ in range(5):
        shared.step()
    shared.abort("three images")
    assert run(shared, {"no image": requests["no image"]})["no image"] == expected["no image"]
    assert run(shared, requests) == expected


def test_the_whole_path_from_files_gives_the_oracles_text(
    folder: Path, expected: dict[str, list[int]], processor: Processor
) -> None:
    import snugvl

    with snugvl.load(folder, device="cpu", context=2048) as model:
        stream = model.backend.submit(snugvl.Request(tuple(conversations()["one image"]), SAMPLING))
        text = "".join(delta.text for delta in stream)
    assert text == processor.tokenizer.decode(expected["one image"])
