"""A step that runs out of memory is tried again in parts; only what fails alone ends, with numbers."""

import random
from collections.abc import Callable, Generator
from dataclasses import replace

import pytest
import torch

from snugvl.engine import choosing, recovery
from snugvl.engine.graphs import cache as graph_cache
from snugvl.engine.graphs.cache import GraphCache, GraphKey, Pool, Work
from snugvl.engine.graphs.decode import DecodeGraphs
from snugvl.engine.request import EngineRequest
from snugvl.engine.scheduler import Ready, Schedule
from snugvl.errors import OutOfMemory
from snugvl.layers.device import out_of_memory
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import ForwardBatch, GridTHW, PatchReader
from tests.engine.eager import engine_with
from tests.engine.test_prefill_graphs import Again
from tests.engine.toy import BOMB, HybridToy, Toy, engine, oracle, picture, request, run, tokens

FULL = "CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 7.00 GiB of which …"


class Short:
    """Makes a toy run out of memory in steps for which `too_much` says so."""

    def __init__(self, model: Toy, too_much: Callable[[ForwardBatch], bool]) -> None:
        self.failed: list[int] = []  # tokens of each step that failed
        self._forward, self._too_much = model.forward, too_much
        model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        if self._too_much(batch):
            for layer in range(cache.storage.shape[0]):  # what a step that breaks off leaves behind
                cache.storage[layer, :, batch.attention.slot_mapping] = torch.nan
            self.failed.append(len(batch.input_ids))
            raise torch.OutOfMemoryError(FULL)
        return self._forward(batch, cache)


def several(count: int = 4) -> list[EngineRequest]:
    return [request(str(i), i + 1, picture(i), *range(2, 7 + i), max_tokens=6 + i) for i in range(count)]


@pytest.mark.parametrize("prefix", [True, False])
def test_requests_too_large_for_one_step_go_one_by_one(prefix: bool) -> None:
    model, items = Toy(), several()
    right = [oracle(Toy(), item, item.sampling.max_tokens or 0) for item in items]
    short = Short(model, lambda batch: len(batch.input_ids) > 20)
    here = engine(model, prefix_cache=prefix)
    outputs = run(here, *items)
    assert short.failed
    assert [tokens(outputs[item.request_id]) for item in items] == right
    assert here.stats.shortages == len(short.failed)
    assert here.stats.faults == 0


def test_a_prompt_too_large_for_one_step_comes_in_shorter_ones() -> None:
    model, item = Toy(), request("a", 1, picture(1), *range(2, 40))
    short = Short(model, lambda batch: len(batch.input_ids) > 16)
    assert tokens(run(engine(model), item)["a"]) == oracle(Toy(), item, 8)
    assert short.failed == [47]


def test_a_decode_batch_that_never_fits_still_gets_on() -> None:
    model, items = Toy(), several(3)
    right = [oracle(Toy(), item, item.sampling.max_tokens or 0) for item in items]
    Short(model, lambda batch: len(batch.attention.query_lens) > 1)
    outputs = run(engine(model), *items)
    assert [tokens(outputs[item.request_id]) for item in items] == right


def test_recurrent_states_of_a_step_that_broke_off_are_computed_again() -> None:
    model, items = HybridToy(), [request(str(i), *range(1, 9 + i)) for i in range(3)]
    right = [oracle(HybridToy(), item, 8) for item in items]
    calls = iter(range(1000))
    Short(model, lambda batch: next(calls) in (0, 6, 14))
    outputs = run(engine(model), *items)
    assert [tokens(outputs[item.request_id]) for item in items] == right


def test_only_the_request_that_fails_alone_ends_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    model, items = Toy(), several(3)
    right = [oracle(Toy(), item, item.sampling.max_tokens or 0) for item in items]
    short = Short(model, lambda batch: bool((batch.input_ids == BOMB).any()))
    here = engine(model)
    outputs = run(here, *items[:2], request("large", BOMB, picture(9, 8, 8), n=2), items[2])
    assert [tokens(outputs[item.request_id]) for item in items] == right
    assert [o.finish for o in outputs["large"]] == ["error", "error"]
    error = outputs["large"][0].error
    assert isinstance(error, OutOfMemory)
    assert error.http_status == 503
    assert error.retry_after_s > 0
    assert str(error) == (
        "out of memory: a step of 16 tokens with 1 images or videos of up to 64 patches, with nothing beside "
        "it, asked for 26.00 MiB more than there was; send smaller or fewer images, or try again when other "
        "programs have given memory back"
    )
    assert len(short.failed) == 2, "once in company, once alone"
    assert "its requests go on one by one" in caplog.text
    assert tokens(run(here, replace(items[0], request_id="next"))["next"]) == right[0]


@pytest.mark.parametrize("times", [1, 100])
def test_an_image_whose_encoding_runs_out_of_memory(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others that decode and go on; the second time, with nothing beside it, its request ends."""
    model, other = Toy(), request("other", 3, 4, 5, max_tokens=20)
    item = request("seen", 1, picture(1, 8, 8))
    right, said = oracle(Toy(), item, 8), oracle(Toy(), other, 20)
    left = iter(range(times))
    begin = model.encode_in_steps

    def encode(read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        yield 1
        if next(left, None) is not None:
            raise torch.OutOfMemoryError(FULL)
        return (yield from begin(read, grid))

    monkeypatch.setattr(model, "encode_in_steps", encode)
    here = engine(model)
    here.add(other)
    first = here.step()
    outputs = run(here, item)
    assert tokens(first + outputs["other"]) == said
    if times == 1:
        assert tokens(outputs["seen"]) == right
    else:
        assert [type(o.error) for o in outputs["seen"]] == [OutOfMemory]
    assert here.stats.faults == 0


def test_a_token_that_memory_was_short_of_is_drawn_from_the_same_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [request(str(i), *range(1, 9), temperature=1.0, seed=i, n=2) for i in range(2)]
    right = run(engine(), *items)
    sample, calls = choosing.begin, iter(range(1000))

    def failing(*arguments: object) -> object:
        if next(calls) in (0, 5, 11):
            raise torch.OutOfMemoryError(FULL)
        return sample(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(choosing, "begin", failing)
    outputs = run(engine(), *items)
    for item in items:
        for choice in range(2):
            assert tokens(outputs[item.request_id], choice) == tokens(right[item.request_id], choice)


def test_steps_in_the_air_are_computed_again() -> None:
    model, items = Toy(), several(2)
    right = [oracle(Toy(), item, item.sampling.max_tokens or 0) for item in items]
    calls = iter(range(1000))
    Short(model, lambda batch: next(calls) in (3, 7, 12))
    here, graphs = engine_with(True, model)
    outputs = run(here, *items)
    assert [tokens(outputs[item.request_id]) for item in items] == right
    assert graphs is not None
    assert graphs.followed


def test_sampled_steps_in_the_air_are_drawn_from_the_same_numbers() -> None:
    how = {"temperature": 1.0, "presence_penalty": 0.6, "max_tokens": 12}
    items = [request(str(i), *range(1, 9), seed=i, **how) for i in range(2)]
    right, model, calls = run(engine(), *items), Toy(), iter(range(1000))
    Short(model, lambda batch: next(calls) in (3, 7, 12))
    here, graphs = engine_with(True, model)
    outputs = run(here, *items)
    assert graphs is not None
    assert graphs.followed
    for item in items:
        assert tokens(outputs[item.request_id]) == tokens(right[item.request_id])


class Shorts(Again):
    """A capturer that memory is short of, or that fails, for some sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.error: Callable[[int], Exception | None] = lambda _size: None

    def capture(self, work: Work, pool: Pool) -> Work:
        size = len(work.__self__.ids)  # type: ignore[attr-defined]
        self.sizes.append(size)
        error = self.error(size)
        if error is not None:
            raise error
        return super().capture(work, pool)


def shorts(*sizes: int) -> tuple[DecodeGraphs, GraphCache, Shorts]:
    here, recorder = engine(), Shorts()
    made = GraphCache(recorder, here.model)
    return DecodeGraphs(here.model, here._cache, 64, made, sizes), made, recorder


@torch.inference_mode()
def test_a_graph_that_memory_is_short_of_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    graphs, made, recorder = shorts(1, 4)
    errors: list[Exception] = [torch.OutOfMemoryError(FULL), RuntimeError("a bug")]
    recorder.error = lambda _size: errors[-1]
    with pytest.raises(RuntimeError, match="a bug"):
        graphs.ensure(3)
    errors.pop()
    assert not made.released
    assert not graphs.ensure(3)
    assert not graphs.ensure(4), "the same graph"
    assert recorder.sizes == [4, 4, 4], "once more with what torch keeps given back"
    assert made.released
    assert "no memory for the CUDA graph of decode of 4" in caplog.text
    made.clear()
    assert not graphs.ensure(3)
    assert recorder.sizes == [4] * 5


@torch.inference_mode()
def test_a_graph_comes_before_the_workspace_that_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, made, recorder = shorts(1, 4)
    kept = [True]
    recorder.error = lambda _size: torch.OutOfMemoryError(FULL) if kept else None
    monkeypatch.setattr(graph_cache, "release", lambda _device: kept.clear())
    assert graphs.ensure(1)
    assert made.released, "the workspace is to be claimed again"


@torch.inference_mode()
def test_graphs_are_recorded_ahead_one_at_a_time_for_as_many_as_may_run() -> None:
    graphs, made, recorder = shorts(1, 2, 4, 8, 16)
    assert graphs.ensure(4)
    recorder.sizes.clear()
    recorder.error = lambda size: torch.OutOfMemoryError(FULL) if size == 2 else None
    assert [graphs.capture_next(5) for _ in range(4)] == [True, True, False, False]
    assert recorder.sizes == [1, 2, 2, 8], "that of 4 was there, and nobody needs that of 16"
    assert not graphs.capture_next(8)
    graphs.capture_next(9)
    assert recorder.sizes[4:] == [16]
    assert not made.lacks(GraphKey("decode", (2,))), "it isn't tried again"


def test_what_is_a_lack_of_memory() -> None:
    wrapped = ValueError("capture failed")
    wrapped.__context__ = torch.OutOfMemoryError(FULL)
    assert out_of_memory(wrapped)
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not out_of_memory(ValueError("out of memory"))


def test_what_can_be_spared_goes_back_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy()
    calls = iter(range(1000))
    Short(model, lambda batch: next(calls) == 1)
    here = engine(model, encoder_cache_bytes=1 << 20)
    run_of_caches: list[int] = []
    monkeypatch.setattr(
        recovery, "release", lambda _device: run_of_caches.append(here.memory()["encoder_outputs"])
    )
    here.add(request("a", 1, picture(1)))
    here.step()
    assert here.memory()["encoder_outputs"]
    here.step()
    assert run_of_caches == [0]


def test_a_step_alone_takes_no_graph() -> None:
    """The memory of a graph is what may be missing: each token comes from a step of its own then."""
    here, graphs = engine_with(True)
    assert graphs is not None

    def start(*_: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    graphs.start = start  # type: ignore[assignment, method-assign]
    items = several(2)
    outputs = run(here, *items)
    for item in items:
        assert tokens(outputs[item.request_id]) == oracle(Toy(), item, item.sampling.max_tokens or 0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sample("0", "2", "4", "6", "8", "10")
def test_whatever_fails_when(seed: int) -> None:
    """Few blocks, short chunks, steps that fail at random: the right tokens, or a clean end."""
    dice, kind = random.Random(seed), (Toy, HybridToy)[seed % 2]
    model = kind()
    Short(model, lambda batch: dice.random() < 0.15)
    items = [
        request(
            str(i),
            i + 1,
            *([picture(i)] if kind is Toy and i % 2 else []),
            *range(2, dice.randint(4, 40)),
            max_tokens=dice.randint(1, 20),
        )
        for i in range(6)
    ]
    here = engine(model, num_blocks=18, max_model_len=72, max_num_seqs=4, max_batched_tokens=8)
    schedule = here._scheduler.schedule

    def checked(ready: Ready) -> Schedule:
        step = schedule(ready)
        assert len(step.chunks) == 1 or not any(chunk.sequence.alone for chunk in step.chunks)
        return step

    here._scheduler.schedule = checked  # type: ignore[method-assign, assignment]
    outputs = run(here, *items)
    for item in items:
        found = outputs[item.request_id]
        right = oracle(kind(), item, item.sampling.max_tokens or 0)
        if found[-1].finish == "error":
            assert isinstance(found[-1].error, OutOfMemory)
            right = right[: len(found) - 1]
        assert tokens(found) == right
    assert here.stats.free_blocks == 18


def test_who_must_be_alone_is_not_admitted_beside_others() -> None:
    here = engine()
    for name in "ab":
        here.add(request(name, 1, 2, 3))
    scheduler = here._scheduler
    scheduler.waiting[1].alone = True
    step = scheduler.schedule()
    assert [chunk.sequence.request.request_id for chunk in step.chunks] == ["a"]
    assert not step.alone
