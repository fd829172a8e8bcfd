"""Requests one after the other: who waits, who leaves, and what happens when a forward fails."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

from snugvl.backends.transformers.engine import TransformersEngine
from snugvl.backends.transformers.network import plain_generation
from snugvl.backends.transformers.sampling import ModelPrompt
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import (
    DeadlineExceeded,
    DoesNotFit,
    EngineError,
    QueueFull,
    RequestTooLarge,
    SnugvlError,
)
from tests.backends.transformers.conftest import CPU, NEW_TOKENS, Asked, Opened
from tests.patience import PATIENCE_S, until

hf: Any = transformers
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def words(qwen: Opened) -> dict[str, ModelPrompt]:
    texts = {"a": "Hi", "b": "What is in this image?", "c": "Two blue squares."}
    return {name: qwen.prompt(user(text)) for name, text in texts.items()}


@pytest.fixture
def jobs(qwen: Opened, words: dict[str, ModelPrompt]) -> dict[str, Asked]:
    return {name: qwen.job(prompt) for name, prompt in words.items()}


class Held:
    """A request that stops the engine after so many tokens, until it is let go."""

    def __init__(self, job: Asked, after: int = 2) -> None:
        self.job = job
        self.reached, self.go = threading.Event(), threading.Event()
        job.receiver.seen = lambda _: self._seen(after)

    def _seen(self, after: int) -> None:
        if len(self.job.tokens) == after:
            self.reached.set()
            assert self.go.wait(PATIENCE_S)

    def start(self, engine: TransformersEngine) -> None:
        """Queue it, and wait until it has its tokens."""
        engine.submit(self.job)
        assert self.reached.wait(PATIENCE_S)


@contextmanager
def failing(
    opened: Opened, job: Asked, error: Callable[[], BaseException], *, after: int = 0
) -> Iterator[list[int]]:
    """Make forwards of a request raise once it has so many tokens; counts how often they did."""
    failures: list[int] = []

    def hook(*_: Any) -> None:
        mine = any(answer is job for answer in engines_jobs())
        if mine and job.generated >= after:
            failures.append(job.generated)
            raise error()

    def engines_jobs() -> list[Any]:
        return [engine._running for engine in RUNNING]

    with opened.model.register_forward_pre_hook(hook):
        yield failures


RUNNING: list[TransformersEngine] = []


@pytest.fixture
def engine(qwen: Opened) -> Iterator[TransformersEngine]:
    with qwen.engine() as made:
        RUNNING.append(made)
        yield made
        RUNNING.remove(made)


def ended(job: Asked) -> SnugvlError:
    """The error that a request ends with."""
    with pytest.raises(SnugvlError) as caught:
        job.wait()
    return caught.value


def others_are_right(opened: Opened, jobs: dict[str, Asked]) -> None:
    for name in ("a", "c"):
        assert jobs[name].wait()[-1].finish_reason == "length"
        assert jobs[name].tokens == opened.expected(jobs[name].prompt)


class PanicError(BaseException):
    """As Rust's are: no `Exception`."""


@pytest.mark.parametrize("kind", [RuntimeError, PanicError])
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.sample("0-RuntimeError", "5-RuntimeError")
def test_a_failing_forward_ends_its_request_and_nobody_else(
    after: int,
    kind: type[BaseException],
    qwen: Opened,
    jobs: dict[str, Asked],
    engine: TransformersEngine,
) -> None:
    with failing(qwen, jobs["b"], lambda: kind("bad b"), after=after) as failures:
        for job in jobs.values():
            engine.submit(job)
        error = ended(jobs["b"])
    others_are_right(qwen, jobs)  # asks the model itself, which fails no more
    assert isinstance(error, EngineError)
    assert "bad b" in str(error)
    assert failures == [after]
    assert engine.stats().faults == 1
    assert engine.memory() == {"kv_cache": 0, "encoder_outputs": 0, "vision_inputs": 0}


@pytest.mark.parametrize("after", [0, 5])
def test_a_request_that_does_not_fit_ends_with_the_numbers(
    after: int, qwen: Opened, jobs: dict[str, Asked], engine: TransformersEngine
) -> None:
    with failing(qwen, jobs["b"], lambda: torch.OutOfMemoryError("no memory"), after=after):
        for job in jobs.values():
            engine.submit(job)
        error = ended(jobs["b"])
    others_are_right(qwen, jobs)  # asks the model itself, which fails no more
    assert isinstance(error, DoesNotFit)
    assert f"after {jobs['b'].prompt.tokens + after} tokens" in str(error)
    assert "ran alone" in str(error)
    assert "max_pixels" in str(error)
    assert engine.stats().faults == 0


def test_a_poisoned_gpu_ends_the_engine_and_everybody_hears_of_it(
    qwen: Opened, jobs: dict[str, Asked], engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_type))
    with failing(qwen, jobs["a"], lambda: torch.AcceleratorError("device-side assert"), after=2):
        held = Held(jobs["a"])
        held.start(engine)
        engine.submit(jobs["b"])
        held.go.set()
        for name in ("a", "b"):
            error = ended(jobs[name])
            assert isinstance(error, EngineError)
            assert "device-side assert" in str(error)
    until(lambda: bool(raised))
    assert raised == [torch.AcceleratorError]
    for ask in (engine.stats, engine.memory, lambda: engine.submit(jobs["c"])):
        with pytest.raises(EngineError, match=r"the engine's thread ended: .*device-side assert"):
            ask()


def test_logits_that_are_no_numbers_end_the_request_with_all_its_choices(
    qwen: Opened, words: dict[str, ModelPrompt], engine: TransformersEngine
) -> None:
    job = qwen.job(words["b"], SamplingParams(max_tokens=8, ignore_eos=True, n=2))

    def broken(_model: Any, _inputs: Any, outputs: Any) -> Any:
        if len(job.receiver.tokens) == 2:
            outputs.logits = torch.full_like(outputs.logits, torch.nan)
        return outputs

    with qwen.model.register_forward_hook(broken):
        engine.submit(job)
        assert "not finite" in str(ended(job))
    assert {choice: len(tokens) for choice, tokens in job.receiver.tokens.items()} == {0: 8, 1: 1}
    after = qwen.job(words["b"])
    engine.submit(after)
    after.wait()
    assert after.tokens == qwen.expected(words["b"])


def test_requests_wait_for_each_other_in_their_order(
    qwen: Opened, jobs: dict[str, Asked], engine: TransformersEngine
) -> None:
    order: list[str] = []
    held = Held(jobs["a"])
    held.start(engine)
    for name in ("b", "c"):
        jobs[name].receiver.seen = lambda output, name=name: order.append(name)  # type: ignore[misc]
        engine.submit(jobs[name])
    assert len(engine._unfinished()) == 3
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(engine.stats)
        held.go.set()
        load = asked.result(PATIENCE_S)
    assert load.running == 1
    for job in jobs.values():
        assert job.wait()[-1].finish_reason == "length"
        assert job.tokens == qwen.expected(job.prompt)
    assert order == ["b"] * NEW_TOKENS + ["c"] * NEW_TOKENS
    until(lambda: engine.stats().running == 0)
    load = engine.stats()
    assert load.generated_tokens == 3 * NEW_TOKENS
    assert load.prompt_tokens == sum(job.prompt.tokens + NEW_TOKENS - 1 for job in jobs.values())


def test_who_leaves_is_forgotten_running_or_waiting(
    qwen: Opened, words: dict[str, ModelPrompt], engine: TransformersEngine
) -> None:
    running, waiting = qwen.job(words["a"], LONG), qwen.job(words["b"], LONG)
    last = qwen.job(words["c"])
    held = Held(running)
    held.start(engine)
    engine.submit(waiting)
    engine.submit(last)
    waiting.drop()
    running.drop()
    held.go.set()
    last.wait()
    assert last.tokens == qwen.expected(words["c"])
    assert len(running.tokens) == 2
    assert waiting.receiver.tokens == {}
    until(lambda: engine.memory() == {"kv_cache": 0, "encoder_outputs": 0, "vision_inputs": 0})


def test_the_queue_is_bounded_and_who_left_takes_no_place(
    qwen: Opened, words: dict[str, ModelPrompt], jobs: dict[str, Asked]
) -> None:
    with qwen.engine(max_waiting=2) as engine:
        held = Held(qwen.job(words["a"]))
        held.start(engine)
        engine.submit(jobs["a"])
        engine.submit(jobs["b"])
        with pytest.raises(QueueFull, match="2 requests"):
            engine.submit(jobs["c"])
        jobs["a"].drop()
        engine.submit(jobs["c"])
        held.go.set()
        jobs["c"].wait()


def test_too_long_requests_are_refused_with_the_numbers(qwen: Opened, words: dict[str, ModelPrompt]) -> None:
    prompt = words["b"].tokens
    with qwen.engine(context=prompt + 4) as engine:
        with pytest.raises(RequestTooLarge, match=f"needs {prompt + 5:,} tokens.*max_tokens up to 4"):
            engine.submit(qwen.job(words["b"], SamplingParams(max_tokens=5)))
        assert not engine._unfinished()
    with qwen.engine(context=prompt) as engine, pytest.raises(RequestTooLarge, match="a prompt of up to"):
        engine.submit(qwen.job(words["b"], SamplingParams()))


def test_deadlines_end_who_waits_and_who_runs_and_say_how_far_they_came(
    qwen: Opened, words: dict[str, ModelPrompt], engine: TransformersEngine
) -> None:
    running = qwen.job(words["a"], LONG, deadline=time.monotonic() + 3600)
    waiting = qwen.job(words["b"], deadline=time.monotonic() - 1)
    held = Held(running, after=3)
    held.start(engine)
    engine.submit(waiting)
    running.deadline = time.monotonic()
    held.go.set()
    for job, tokens in ((running, 3), (waiting, 0)):
        error = ended(job)
        assert isinstance(error, DeadlineExceeded)
        assert f"with {tokens} tokens generated" in str(error)
    assert waiting.receiver.tokens == {}


def test_closing_ends_everybody_with_an_error(
    qwen: Opened, jobs: dict[str, Asked], engine: TransformersEngine
) -> None:
    held = Held(jobs["a"])
    held.start(engine)
    engine.submit(jobs["b"])
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(engine.close)
        until(lambda: engine._closed)
        held.go.set()
        closing.result(PATIENCE_S)
    for name in ("a", "b"):
        assert "closed while" in str(ended(jobs[name]))
    assert len(jobs["a"].tokens) == 2
    engine.close()


def test_the_cache_is_told_while_an_answer_runs(
    qwen: Opened, words: dict[str, ModelPrompt], engine: TransformersEngine
) -> None:
    text = qwen.model.config.get_text_config()
    a_token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    job = qwen.job(words["b"])
    told: list[int] = []
    held = Held(job, after=4)
    held.start(engine)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(engine.memory)
        engine._beat()
        told.append(asked.result(PATIENCE_S)["kv_cache"])
    held.go.set()
    job.wait()
    assert told == [a_token * (words["b"].tokens + 3)]  # the fourth token is not in it yet
    until(lambda: engine.memory()["kv_cache"] == 0)


def test_a_long_forward_that_gets_on_is_no_hang_and_one_that_does_not_is(qwen: Opened) -> None:
    """Who watches asks for figures; the answer is late only where no layer begins."""
    backend, going, go = qwen.backend, threading.Event(), threading.Event()
    layer = qwen.model.model.language_model.layers[0]

    def slow(*_: Any) -> None:
        going.set()
        assert go.wait(PATIENCE_S)

    with qwen.model.register_forward_hook(slow):
        stream = backend.submit(Request((user("Hi"),), SamplingParams(max_tokens=2, ignore_eos=True)))
        assert going.wait(PATIENCE_S)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(backend.stats)
            with pytest.raises(TimeoutError):
                asked.result(0.4)
            for hook in layer._forward_pre_hooks.values():  # as when it begins
                hook(layer, ())
            assert asked.result(PATIENCE_S).running == 1
        go.set()
        assert list(stream)


def test_tokens_that_the_checkpoint_suppresses_never_come(
    qwen: Opened, jobs: dict[str, Asked], engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwanted = qwen.expected(jobs["b"].prompt)[0]
    monkeypatch.setattr(qwen.model.generation_config, "suppress_tokens", [unwanted])
    for job in jobs.values():
        engine.submit(job)
        job.wait()
        assert unwanted not in job.tokens
    assert jobs["b"].tokens == qwen.expected(jobs["b"].prompt)


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
def test_models_with_states_of_their_own_run(
    make: Callable[[], tuple[Any, dict[str, torch.Tensor]]], qwen: Opened
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
    prompt = ModelPrompt(ids, (), 0, inputs=inputs)
    engine = TransformersEngine(model, CPU, torch.float32, context=256)
    jobs = [qwen.job(prompt, SamplingParams(max_tokens=10, ignore_eos=True)) for _ in range(2)]
    held = Held(jobs[0], after=5)
    held.start(engine)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(engine.memory)
        engine._beat()
        assert asked.result(PATIENCE_S)["kv_cache"] > 0
    held.go.set()
    engine.submit(jobs[1])
    for job in jobs:
        job.wait()
        assert job.tokens == output[0, -10:].tolist()
    assert engine.stats().faults == 0
    engine.close()
