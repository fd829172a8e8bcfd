"""What happens to rows when a forward fails, memory runs out, the queue is full, or somebody leaves."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers

from snugvl.backends.protocol import Request, user
from snugvl.backends.transformers.batch import Batch
from snugvl.backends.transformers.engine import Limits, TransformersEngine
from snugvl.backends.transformers.opening import plain_generation
from snugvl.backends.transformers.row import ModelPrompt, ModelRequest
from snugvl.engine.request import TokenOutput
from snugvl.errors import DeadlineExceeded, DoesNotFit, EngineError, QueueFull, RequestTooLarge
from snugvl.inputs.prompt import PreparedPrompt
from snugvl.sampling import SamplingParams
from tests.backends.transformers.conftest import GREEDY, Opened, request
from tests.patience import PATIENCE_S

hf: Any = transformers
Words = dict[str, ModelPrompt]


@pytest.fixture
def words(qwen: Opened) -> Words:
    texts = {"a": "Hi", "b": "What is in this image?", "c": "Two blue squares."}
    return {name: qwen.prompt(user(text)) for name, text in texts.items()}


def drive(engine: TransformersEngine) -> tuple[dict[str, list[int]], dict[str, TokenOutput]]:
    """Tokens and the last output of each request."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, TokenOutput] = {}
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(output.token_id)
            if output.finish is not None:
                ends[output.request_id] = output
    assert engine.memory()["kv_cache"] == 0
    return tokens, ends


def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, when: Callable[[Batch], bool], error: Callable[[], Exception]
) -> list[int]:
    """Make a method of batches raise where `when` says so; returns the rows of each failure."""
    own, failures = getattr(Batch, name), []

    def method(batch: Batch, *arguments: Any) -> Any:
        if when(batch):
            failures.append(len(batch.rows))
            raise error()
        return own(batch, *arguments)

    monkeypatch.setattr(Batch, name, method)
    return failures


def named(batch: Batch) -> set[str]:
    return {row.request.request_id for row in batch.rows}


def added(engine: TransformersEngine, words: Words, sampling: SamplingParams = GREEDY) -> list[ModelRequest]:
    made = [request(name, prompt, sampling) for name, prompt in words.items()]
    for each in made:
        engine.add(each)
    return made


def test_the_guilty_request_alone_fails_with_its_batch(
    qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = failing(monkeypatch, "decode", lambda b: "b" in named(b), lambda: RuntimeError("bad b"))
    engine = qwen.engine()
    added(engine, words)
    tokens, ends = drive(engine)
    assert failures[0] > 1
    assert failures[-1] == 1
    for name in ("a", "c"):
        assert tokens[name] == qwen.expected(words[name])
        assert ends[name].finish == "length"
    assert isinstance(ends["b"].error, EngineError)
    assert "bad b" in str(ends["b"].error)
    assert engine.stats.faults == 2


def test_a_failing_prompt_ends_its_request_and_nobody_else(
    qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "prefill", lambda b: "b" in named(b), lambda: RuntimeError("bad prompt"))
    engine = qwen.engine()
    added(engine, words)
    tokens, ends = drive(engine)
    assert "bad prompt" in str(ends["b"].error)
    assert tokens["a"] == qwen.expected(words["a"])
    assert tokens["c"] == qwen.expected(words["c"])


def test_rows_that_fail_to_join_begin_again(
    qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = iter([True])
    failing(monkeypatch, "join", lambda _: next(once, False), lambda: RuntimeError("half joined"))
    engine = qwen.engine()
    added(engine, words)
    tokens, _ = drive(engine)
    assert tokens == {name: qwen.expected(prompt) for name, prompt in words.items()}
    assert engine.stats.preemptions == 2


@pytest.mark.parametrize("place", ["decode", "prefill"])
def test_fewer_rows_run_after_memory_ran_out(
    place: str, qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    engine = qwen.engine()

    def too_many(batch: Batch) -> bool:
        beside = len(batch.rows) if place == "decode" else len(engine._running) + 1
        running.append(beside)
        return beside > 2

    failing(monkeypatch, place, too_many, lambda: torch.OutOfMemoryError("CUDA out of memory"))
    added(engine, words)
    tokens, _ = drive(engine)
    assert tokens == {name: qwen.expected(prompt) for name, prompt in words.items()}
    assert max(running) == 3
    assert running.count(3) == 1, "it was tried again before anybody had left"
    assert engine.stats.faults == 0


@pytest.mark.parametrize("place", ["decode", "prefill"])
def test_a_request_that_does_not_fit_alone_ends_with_the_numbers(
    place: str, qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, place, lambda b: "b" in named(b), lambda: torch.OutOfMemoryError("no memory"))
    engine = qwen.engine()
    added(engine, words)
    tokens, ends = drive(engine)
    assert isinstance(ends["b"].error, DoesNotFit)
    assert "ran alone" in str(ends["b"].error)
    assert "max_pixels" in str(ends["b"].error)
    assert tokens["a"] == qwen.expected(words["a"])
    assert tokens["c"] == qwen.expected(words["c"])


def test_a_poisoned_gpu_is_not_hidden(qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "decode", lambda _: True, lambda: torch.AcceleratorError("device-side assert"))
    engine = qwen.engine()
    added(engine, words)
    with pytest.raises(torch.AcceleratorError):
        drive(engine)


def test_logits_that_are_no_numbers_end_the_request_with_all_its_choices(
    qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Batch.decode

    def broken(batch: Batch) -> torch.Tensor:
        logits = own(batch)
        bad = [i for i, row in enumerate(batch.rows) if row.request.request_id == "b" and row.choice == 0]
        logits[bad] = torch.nan
        return logits

    monkeypatch.setattr(Batch, "decode", broken)
    engine = qwen.engine()
    added(engine, words, SamplingParams(max_tokens=24, ignore_eos=True, n=2))
    tokens, ends = drive(engine)
    assert "not finite" in str(ends["b"].error)
    for name in ("a", "c"):
        assert sorted(tokens[name]) == sorted(qwen.expected(words[name]) * 2)


def test_choices_of_a_prompt_compute_it_once(qwen: Opened, words: Words) -> None:
    engine = qwen.engine()
    engine.add(request("b", words["b"], SamplingParams(max_tokens=4, n=4, seed=5, temperature=1.0)))
    engine.step()
    assert engine.stats.running == 4
    assert engine.stats.prompt_tokens == len(words["b"].prompt.prompt_ids)


def test_an_abort_frees_its_rows_and_leaves_the_others_as_they_were(qwen: Opened, words: Words) -> None:
    engine = qwen.engine()
    added(engine, words)
    for _ in range(6):
        engine.step()
    before = engine.memory()["kv_cache"]
    engine.abort("b")
    engine.abort("unknown")
    engine.step()
    assert engine.stats.running == 2
    assert engine.memory()["kv_cache"] < before
    engine.abort("a", choice=0)
    engine.abort("c")
    assert not engine.has_work
    assert engine.memory() == {"kv_cache": 0, "encoder_outputs": 0, "vision_inputs": 0}
    assert engine.step() == []


def test_rows_wait_for_room_and_all_get_their_turn(qwen: Opened, words: Words) -> None:
    longest = max(len(prompt.prompt.prompt_ids) for prompt in words.values()) + 24
    engine = qwen.engine(context=longest, cache_tokens=2 * longest)
    added(engine, words)
    most, tokens = 0, {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token_id)
        most = max(most, engine.stats.running)
    assert most == 2
    assert tokens == {name: qwen.expected(prompt) for name, prompt in words.items()}


def test_the_queue_is_bounded_by_requests(qwen: Opened, words: Words) -> None:
    engine = qwen.engine(max_waiting=2)
    engine.add(request("n", words["a"], SamplingParams(max_tokens=2, n=3)))
    engine.add(request("a", words["a"]))
    with pytest.raises(QueueFull, match="2 requests"):
        engine.add(request("b", words["b"]))
    engine.step()
    engine.add(request("b", words["b"]))


def test_too_long_requests_are_refused_with_the_numbers(qwen: Opened, words: Words) -> None:
    prompt = len(words["b"].prompt.prompt_ids)
    engine = qwen.engine(context=prompt + 4)
    with pytest.raises(RequestTooLarge, match=f"needs {prompt + 5:,} tokens.*max_tokens up to 4"):
        engine.add(request("b", words["b"], SamplingParams(max_tokens=5)))
    with pytest.raises(RequestTooLarge, match=f"a prompt of up to {prompt - 1}"):
        qwen.engine(context=prompt).add(request("b", words["b"], SamplingParams()))
    assert not engine.has_work


def test_a_deadline_ends_a_request_and_says_how_far_it_came(qwen: Opened, words: Words) -> None:
    engine = qwen.engine()
    engine.add(request("b", words["b"], deadline=time.monotonic() + 3600))
    engine.add(request("a", words["a"], deadline=time.monotonic() - 1))
    _, ends = drive(engine)
    assert isinstance(ends["a"].error, DeadlineExceeded)
    assert "0 tokens generated" in str(ends["a"].error)
    assert ends["b"].finish == "length"


def test_a_long_step_that_gets_on_is_no_hang_and_one_that_does_not_is(
    qwen: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who watches asks for figures; the answer is late only where no layer begins."""
    backend, going = qwen.backend, threading.Event()
    layer = qwen.model.model.language_model.layers[0]
    own = Batch.prefill

    def slow(batch: Batch) -> torch.Tensor:
        logits = own(batch)
        going.set()
        while going.is_set():
            time.sleep(0.01)
        return logits

    monkeypatch.setattr(Batch, "prefill", slow)
    stream = backend.submit(Request((user("Hi"),), SamplingParams(max_tokens=2, ignore_eos=True)))
    assert going.wait(PATIENCE_S)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(backend.stats)
        with pytest.raises(TimeoutError):
            asked.result(0.4)
        next(iter(layer._forward_pre_hooks.values()))(layer, ())  # as when it begins
        assert asked.result(PATIENCE_S).generated_tokens >= 0
    going.clear()
    assert list(stream)


def test_tokens_that_the_checkpoint_suppresses_never_come(
    qwen: Opened, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwanted = qwen.expected(words["b"])[0]
    monkeypatch.setattr(qwen.model.generation_config, "suppress_tokens", [unwanted])
    engine = qwen.engine()
    added(engine, words)
    tokens, _ = drive(engine)
    assert tokens["b"] == qwen.expected(words["b"])
    assert not any(unwanted in each for each in tokens.values())


def encoder_and_decoder() -> tuple[Any, dict[str, torch.Tensor]]:
    config = hf.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": torch.tensor([[5, 6, 7, 8]])}


def recurrent() -> tuple[Any, dict[str, torch.Tensor]]:
    config = hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    return hf.MambaForCausalLM(config), {"input_ids": torch.tensor([[5, 6, 7, 8]])}


def cross_attention() -> tuple[Any, dict[str, torch.Tensor]]:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
        "num_attention_heads": 2, "attention_heads": 2, "image_size": 32, "patch_size": 8,
        "max_num_tiles": 4, "supported_aspect_ratios": [[1, 1], [1, 2]],
        "intermediate_layers_indices": [0], "vision_output_dim": 64,
    }  # fmt: skip
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "cross_attention_layers": [1], "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }  # fmt: skip
    config = hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=60)
    inputs = {
        "input_ids": torch.tensor([[60, 5, 6, 7]]),
        "pixel_values": torch.randn(1, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
        "cross_attention_mask": torch.ones(1, 4, 1, 4, dtype=torch.long),
    }
    return hf.MllamaForConditionalGeneration(config), inputs


@pytest.mark.parametrize("make", [encoder_and_decoder, recurrent, cross_attention])
def test_models_whose_rows_bring_more_run_one_row_after_the_other(
    make: Callable[[], tuple[Any, dict[str, torch.Tensor]]],
) -> None:
    torch.manual_seed(2)
    model, inputs = make()
    with torch.no_grad():
        for name, values in model.eval().named_parameters():
            values.add_(torch.randn(values.shape) * (0.1 if "norm" in name else 0.3))
    model.generation_config.eos_token_id = 2
    plain_generation(model)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    output = model.generate(**inputs, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = tuple(inputs["input_ids"][0].tolist())
    prompt = ModelPrompt(PreparedPrompt(ids, (), 0), inputs)
    engine = TransformersEngine(model, Limits(256), torch.device("cpu"), torch.float32)
    for name in "ab":
        engine.add(request(name, prompt, SamplingParams(max_tokens=10, ignore_eos=True)))
    tokens, _ = drive(engine)
    assert tokens == dict.fromkeys("ab", output[0, -10:].tolist())
    assert not engine._shares
    assert engine.stats.faults == 0
