"""Qwen3.5 against transformers' generate(), in every company that Qwen3-VL is (`test_oracle.py`), and beyond.

Its states pass from chunk to chunk, from slot to slot, and to the choices of a request.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.auto import image_processing_auto, processing_auto, video_processing_auto

import snugvl
from snugvl.backends.measure import Meter
from snugvl.backends.native.loading import load_engine
from snugvl.checkpoint.families import read_config
from snugvl.core.messages import Grammar, Message, Picture, Request, Text, user
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.engine import snapshots
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.errors import RequestError
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.models.loader import load_model
from snugvl.models.networks import Qwen35
from snugvl.tasks.parse import answer_text
from tests import hybrid
from tests.backends.conftest import CPU
from tests.backends.test_oracle import (
    SAMPLING,
    conversations,
    engine,
    expected,
    picture,
    prompts,
    test_greedy_tokens_after_an_abort,
    test_greedy_tokens_alone,
    test_greedy_tokens_among_strangers_who_come_late,
    test_greedy_tokens_through_preemption,
    test_greedy_tokens_when_prompts_are_prefilled_in_small_chunks,
    test_greedy_tokens_with_guesses,
    test_the_whole_path_from_files_gives_the_oracles_text,
)
from tests.inputs.conftest import SPECIAL, small_tokenizer, write_checkpoint

__all__ = [
    "expected",
    "prompts",
    "test_greedy_tokens_after_an_abort",
    "test_greedy_tokens_alone",
    "test_greedy_tokens_among_strangers_who_come_late",
    "test_greedy_tokens_through_preemption",
    "test_greedy_tokens_when_prompts_are_prefilled_in_small_chunks",
    "test_greedy_tokens_with_guesses",
    "test_the_whole_path_from_files_gives_the_oracles_text",
]


def write(folder: Path, **options: Any) -> Path:
    """A whole checkpoint: tokenizer, template, settings and weights."""
    write_checkpoint(folder)
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    assert set(names) < set(SPECIAL)
    image, video, start, end = (small_tokenizer().token_to_id(name) for name in names)
    placeholders = (image, video, start, end)
    return hybrid.write(
        folder, hybrid.Options(vocab=512, placeholders=placeholders, predictor=True, **options)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def network(folder: Path) -> Qwen35:
    made = load_model(folder, dtype=torch.float32, device=CPU)
    assert isinstance(made, Qwen35)
    return made


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return Processor.from_folder(folder, read_config(folder))


@pytest.fixture(scope="module")
def transformers_model(folder: Path) -> Any:
    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def sampled(name: str, prompt: PreparedPrompt, **changes: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, **changes)
    return EngineRequest(name, prompt.prompt_ids, sampling, prompt.vision)


def choices(engine: Engine, *requests: EngineRequest) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.add(request)
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                found.setdefault((output.request_id, output.choice), []).append(output.token_id)
        engine.check_integrity()
    return found


def test_three_choices_draw_what_they_draw_in_any_company(
    network: Qwen35, prompts: dict[str, PreparedPrompt]
) -> None:
    asked = sampled("asked", prompts["one image"], n=3, temperature=1.0, seed=7)
    alone = choices(engine(network), asked)
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    strangers = [sampled("text", prompts["no image"], n=2), sampled("more", prompts["three images"])]
    for changes in ({}, {"max_num_seqs": 2}, {"num_blocks": 16}):
        company = choices(engine(network, **changes), strangers[0], asked, strangers[1])
        assert {key: tokens for key, tokens in company.items() if key[0] == "asked"} == alone


def test_a_slot_is_empty_for_whoever_comes_next(
    network: Qwen35, prompts: dict[str, PreparedPrompt], expected: dict[str, list[int]]
) -> None:
    """One slot: the next request sits where one was aborted in its prompt, and then in its answer."""
    shared = engine(network, max_num_seqs=1, max_batched_tokens=32)
    for steps in (1, 9):
        shared.add(sampled("gone", prompts["one image"]))
        for _ in range(steps):
            shared.step()
        shared.abort("gone")
        request = sampled("next", prompts["no image"])
        assert choices(shared, request)["next", 0] == expected["no image"][:20]


@pytest.mark.parametrize("chunk", [48, 256])
@pytest.mark.sample("48")
def test_greedy_tokens_from_checkpoints_alone_and_in_company(
    chunk: int,
    network: Qwen35,
    prompts: dict[str, PreparedPrompt],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each prompt again, and each with the beginning of its answer, as the next turn has it."""
    monkeypatch.setattr(snapshots, "SPACING", 1)
    shared = engine(network, max_batched_tokens=chunk, state_snapshots=16)
    asked = [sampled(name, prompt) for name, prompt in prompts.items()]
    # As far as random weights have said nothing that stands for a picture.
    pads = network.config.placeholders
    cuts = {name: next((i for i in range(18) if said[i] in pads), 18) for name, said in expected.items()}
    later = [
        replace(
            each, request_id=f"{name}, later", prompt_ids=(*each.prompt_ids, *expected[name][: cuts[name]])
        )
        for each in asked
        if cuts[name := each.request_id]
    ]
    for company in (asked, *([each] for each in asked), asked[::-1], *([each] for each in later), later):
        before = shared.stats.prefix_hit_tokens
        found = choices(shared, *company)
        for each in company:
            name, _, turn = each.request_id.partition(", ")
            start = cuts[name] if turn else 0
            assert found[each.request_id, 0] == expected[name][start : start + 20]
        assert company is asked or shared.stats.prefix_hit_tokens - before >= 16 * len(company)


def test_what_is_planned_for_the_states_is_what_they_take(folder: Path) -> None:
    loaded = load_engine(LoadOptions(str(folder), device="cpu", dtype="auto", context=512))
    try:
        backend = loaded.backend
        memory = backend.memory()
        config = backend._engine.config
        assert config.state_snapshots > 0
        slots = config.max_num_seqs + 1 + config.state_snapshots
        # 3 layers of 4 heads of 16 · 8, and 3 inputs of 2 · 2 · 16 + 4 · 8 channels, in float32
        assert memory["recurrent_state"] == slots * 3 * (4 * 16 * 8 + 3 * 96) * 4
        held = memory["kv_cache"] + memory["recurrent_state"]
        meter = Meter(loaded.place.device, loaded.planned, loaded.weights, held)
        ledger = meter.read(memory, backend.stats())
        row = ledger.row("recurrent state")
        assert row is not None
        assert row.planned_bytes == row.measured_bytes == memory["recurrent_state"]
        cache = ledger.row("KV cache")
        assert cache is not None
        assert cache.planned_bytes is not None
        assert (
            cache.planned_bytes
            >= memory["kv_cache"]
            == 1 * 2 * backend._engine.config.cache_tokens * 2 * 32 * 4
        )
        for name in ("text weights", "vision weights"):
            assert loaded.planned[name] == loaded.weights[name]
    finally:
        backend.close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_few_bits_are_planned_to_the_byte(weights: Any, tmp_path: Path) -> None:
    made = str(write(tmp_path, hidden=128))
    loaded = load_engine(LoadOptions(made, device="cpu", weights=weights, context=512))
    try:
        assert loaded.backend.capabilities.weights == weights
        for name in ("text weights", "vision weights"):
            assert loaded.planned[name] == loaded.weights[name]
    finally:
        loaded.backend.close()


def test_tasks_and_chat_work_on_a_folder(folder: Path) -> None:
    with snugvl.load(folder, device="cpu", context=1024) as model:
        few = SamplingParams(max_tokens=8, ignore_eos=True)
        assert model.caption(picture(64, 64, 1), sampling=few).text
        assert model.ask(picture(64, 64, 1), "What is red?", sampling=few).usage.completion_tokens == 8
        request = snugvl.Request((user("What is a red circle?"),), SamplingParams(max_tokens=5))
        assert model.backend.submit(request).prompt_tokens > 5
        stats = model.backend.stats()
        assert stats.prefix_query_tokens > stats.prefix_hit_tokens == 0


def test_without_its_tower_it_answers_text_the_same(
    folder: Path, expected: dict[str, list[int]], processor: Processor
) -> None:
    with snugvl.load(folder, device="cpu", context=1024, language_only=True) as model:
        request = snugvl.Request(tuple(conversations()["no image"]), SAMPLING)
        text = "".join(delta.text for delta in model.backend.submit(request))
        with pytest.raises(RequestError, match="reads text"):
            model.caption(picture(64, 64, 1))
    assert text == processor.tokenizer.decode(expected["no image"])


def test_what_a_thinking_template_opens_the_answer_closes(folder: Path, tmp_path: Path) -> None:
    """Qwen3.5's template may end with <think>: the reasoning and its end are then the answer's beginning."""
    thinking = tmp_path / "thinking"
    thinking.mkdir()
    for path in folder.iterdir():
        (thinking / path.name).symlink_to(path)
    template = thinking / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    opens = text.replace("<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>\\n'")
    template.write_text(opens + "{# ends with </think> #}")
    made = Processor.from_folder(thinking, read_config(thinking))
    plain = Processor.from_folder(folder, read_config(folder))
    extra = made.prepare([user("What?")]).prompt_ids[len(plain.prepare([user("What?")]).prompt_ids) :]
    assert made.tokenizer.decode(list(extra), skip_special=False) == "<think>\n"
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    messages = (user("What?"),)
    with snugvl.load(thinking, device="cpu", dtype="float32", context=256) as model:
        whole = list(model.backend.submit(snugvl.Request(messages, sampling)))
        asked = snugvl.Request(messages, sampling, grammar=Grammar("regex", "[ab]{9}"))
        held = list(model.backend.submit(asked))
    assert "".join(delta.reasoning for delta in whole)  # random weights never end it
    assert not "".join(delta.text for delta in whole)
    assert whole[-1].finish_reason == "length"
    assert set("".join(delta.text for delta in held)) <= {"a", "b"}  # a grammar leaves no room to think
    assert not any(delta.reasoning for delta in held)
    assert answer_text("It is round and red.\n</think>\n\nA red circle.") == "A red circle."


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.sample("native")
def test_it_thinks_about_text_and_not_about_pictures_unless_it_is_asked_to(
    folder: Path, tmp_path: Path, backend: Literal["native", "transformers"]
) -> None:
    """With a template that is told as Qwen3.5's is: the prompt's last tokens say which."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    template = tmp_path / "chat_template.jinja"
    text, begins = template.read_text(), "{{- '<|im_start|>assistant\\n' -}}"
    assert begins in text
    template.unlink()
    told = "{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' -}}"
    template.write_text(text.replace(begins, begins + told))
    seen = (Message("user", (Picture(picture(64, 64, 1)), Text("What is it?"))),)
    requests = {"text": snugvl.Request((user("What?"),)), "picture": snugvl.Request(seen)}
    asked = {name: replace(each, template={"enable_thinking": True}) for name, each in requests.items()}
    expected = {"auto": {"text": True, "picture": False}, "on": {}, "off": {}}
    expected["on"], expected["off"] = dict.fromkeys(requests, True), dict.fromkeys(requests, False)
    for said in ("auto", "on", "off"):
        with snugvl.load(
            tmp_path, device="cpu", dtype="float32", context=256, backend=backend, thinking=said
        ) as model:
            for name, request in requests.items():
                assert thinks(model, request) is expected[said][name], (said, name)
                assert thinks(model, asked[name])
            counted = model.backend.tokenize(Request(seen)).ids
            assert (model.backend.detokenize(counted).endswith("<think>\n")) is expected[said]["picture"]
            counted = model.backend.tokenize(asked["picture"]).ids
            assert model.backend.detokenize(counted).endswith("<think>\n"), "as the request says"


def thinks(model: Any, request: snugvl.Request) -> bool:
    """Whether what random weights write is reasoning, which they never end."""
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    deltas = list(model.backend.submit(replace(request, sampling=sampling)))
    return any(delta.reasoning for delta in deltas) and not any(delta.text for delta in deltas)


def test_transformers_prepares_prompts_for_it_as_for_qwen3_vl() -> None:
    """So what `tests/inputs` compares with Qwen3-VL's processor holds for Qwen3.5."""
    for names in (
        processing_auto.PROCESSOR_MAPPING_NAMES,
        image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
    ):
        assert names["qwen3_5"] == names["qwen3_vl"]
