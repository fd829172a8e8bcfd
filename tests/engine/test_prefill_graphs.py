"""Steps and pictures by CUDA graphs give the tokens of steps that are launched one by one.

A recording stands in for a CUDA graph by doing its work again on the same tensors, as a graph would.
"""

import gc
import random
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from snugvl.core.config import EngineConfig
from snugvl.engine.batch import Shape
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.cache import CudaCapturer, GraphCache, GraphKey, Pool, Work, captured
from snugvl.engine.graphs.prefill import size_of
from snugvl.engine.request import EngineRequest
from snugvl.errors import EngineError
from snugvl.layers import attention
from snugvl.layers.device import capturing
from snugvl.models.loader import load_model
from tests.engine.eager import EagerGraphs
from tests.engine.test_network import requests as network_requests
from tests.engine.toy import (
    BOMB,
    POISON,
    HybridToy,
    Toy,
    engine,
    oracle,
    picture,
    request,
    run,
    tokens,
)

CPU = torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 26.00 MiB."


class Again:
    """A capturer whose graphs do the work again."""

    def __init__(self) -> None:
        self.asked = self.forgotten = 0
        self.fails: Exception | None = None

    def capture(self, work: Work, pool: Pool) -> Work:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return work

    def synchronize(self) -> None:
        pass

    def drop_pool(self, pool: Pool) -> None:
        self.forgotten += 1


@pytest.fixture(autouse=True)
def _rows_of_nobody_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention leaves unwritten is whatever memory held: no token may depend on it."""
    monkeypatch.setattr(attention.torch, "empty_like", lambda like: torch.full_like(like, torch.nan))


def recorded(
    here: Engine, *, most: int = 48, nbytes: int = 1 << 20, recorder: Again | None = None
) -> GraphCache:
    """Let an engine record; its pictures are one slice each."""
    made = here._runner.graph_cache
    made.capturer, made.most, made.lately, made.nbytes = recorder or Again(), most, most, nbytes
    made.start()
    here._runner.use_spare_graphs()
    return made


def company(count: int, seed: int = 0) -> list[EngineRequest]:
    """Prompts of many lengths, with no picture, one or two, some of the same size."""
    source = random.Random(seed)
    made = []
    for index in range(count):
        parts: list[object] = [
            index % 40 + 1,
            *(source.randrange(1, 40) for _ in range(source.randrange(30))),
        ]
        for number in range(source.randrange(3)):
            parts.insert(source.randrange(len(parts) + 1), picture(9 * index + number, 4, (4, 6)[number]))
        made.append(request(str(index), *parts, max_tokens=source.randrange(1, 16)))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("decode_graphs", [False, True])
def test_any_company_gets_the_same_tokens(decode_graphs: bool) -> None:
    """Chunks of one prompt and of several, decodes beside them, preemptions, pictures that a chunk cuts."""
    items = company(14)
    here = engine(num_blocks=20, max_model_len=72, max_num_seqs=5, max_batched_tokens=24)
    if decode_graphs:
        here._runner.graphs, here._runner.has_graphs = EagerGraphs(here), True
    made = recorded(here)
    outputs = run(here, *items)
    for item in items:
        assert tokens(outputs[item.request_id]) == oracle(Toy(), item, item.sampling.max_tokens or 0)
    assert made.replays > 10
    assert here.stats.preemptions > 0


def test_small_steps_alone_are_recorded_where_there_is_no_room_for_others() -> None:
    """Of up to 16 tokens, as those with drafts are; neither others nor pictures."""
    items = company(14)
    sizes = {"num_blocks": 20, "max_model_len": 72, "max_num_seqs": 5, "max_batched_tokens": 24}
    here = engine(**sizes, step_graph_tokens=16)
    made = recorded(here)
    outputs = run(here, *items)
    for item in items:
        assert tokens(outputs[item.request_id]) == oracle(Toy(), item, item.sampling.max_tokens or 0)
    assert {key.kind for key in made._replays} == {"step"}
    assert max(key.size[0] for key in made._replays) == 16
    assert made.replays > 3


def test_the_real_network_gives_the_same_tokens(tiny_untied: Path) -> None:
    """With deepstack levels, in float32."""
    model = load_model(tiny_untied, dtype=torch.float32, device=CPU)
    sizes = EngineConfig(
        num_blocks=40,
        block_size=8,
        max_model_len=96,
        max_num_seqs=4,
        max_batched_tokens=20,
        prefix_cache=False,
    )
    right = run(Engine(model, sizes), *network_requests())
    here = Engine(model, sizes)
    made = recorded(here)
    for _ in range(3):
        outputs = run(here, *network_requests())
        for name, answer in right.items():
            assert tokens(outputs[name]) == tokens(answer)
            assert [o.logprob for o in outputs[name]] == pytest.approx([o.logprob for o in answer], abs=1e-4)
    assert made.replays > 10
    assert {key[0] for key in made._replays} == {"step", "picture"}


def test_steps_of_one_size_share_a_recording_that_the_second_one_makes() -> None:
    here = engine(prefix_cache=False)
    made = recorded(here)
    for index, length in enumerate((40, 33, 60, 64)):
        run(
            here,
            request(str(index), *range(1, 2 + length % 40), *[5] * (length - 1 - length % 40), max_tokens=1),
        )
        assert made.captures == min(max(index - 1, 0), 1), "not before the second one's token is told"
        made.capture_due()
        assert (made.captures, made.replays) == (min(index, 1), max(index - 1, 0))
    assert [size_of(length) for length in (1, 8, 9, 17, 33, 64, 65, 2048)] == [
        8,
        8,
        16,
        32,
        64,
        64,
        128,
        2048,
    ]
    assert [size_of(length, pictured=True) for length in (1, 32, 65)] == [64, 64, 128]
    assert [size_of(length) for length in (512, 513, 1049, 1153)] == [512, 640, 1152, 1280]


def test_a_cached_beginning_is_no_other_step() -> None:
    here = engine()
    made = recorded(here)
    for index in range(4):
        item = request(str(index), *range(1, 30), picture(1), 30 + index)
        assert tokens(run(here, item)[str(index)]) == oracle(Toy(), item, 8)
    assert here.stats.prefix_hit_tokens > 60
    assert made.replays


def test_a_prompt_without_pictures_sees_none_of_the_step_before() -> None:
    here = engine(prefix_cache=False)
    recorded(here)
    for index in range(3):
        seen = request(f"seen {index}", 1, picture(index, 8, 8), 2)
        text = request(f"text {index}", *range(1, 25))
        assert tokens(run(here, seen)[seen.request_id]) == oracle(Toy(), seen, 8)
        assert tokens(run(here, text)[text.request_id]) == oracle(Toy(), text, 8)


def test_an_abort_and_a_fault_leave_nothing_behind() -> None:
    here = engine(prefix_cache=False)
    made = recorded(here)
    items = [request(str(i), i + 1, picture(i), *range(2, 9)) for i in range(4)]
    run(here, *items[:3])
    assert made.captures
    here.add(items[3])
    here.add(request("gone", 7, picture(7), *range(2, 9)))
    here.step()
    here.abort("gone")
    run(here, request("bomb", BOMB, picture(5), *range(2, 9)))
    nan = run(here, request("nan", POISON, picture(6), *range(2, 9)))["nan"]
    assert isinstance(nan[-1].error, EngineError)
    for item in items:
        again = EngineRequest(f"again {item.request_id}", item.prompt_ids, item.sampling, item.vision)
        assert tokens(run(here, again)[again.request_id]) == oracle(Toy(), item, 8)


def test_the_least_recently_used_goes() -> None:
    here = engine(prefix_cache=False, max_batched_tokens=512, max_model_len=512, num_blocks=128)
    made = recorded(here, most=2)

    def ask(name: str, length: int) -> None:
        run(here, request(f"{name}{length}", *[3] * length, max_tokens=1))
        made.capture_due()

    for length in (40, 70, 40, 70):
        ask("a", length)
    assert list(made._replays) == [GraphKey("step", (64, 1)), GraphKey("step", (128, 1))]
    ask("b", 40)
    for name in "cd":
        ask(name, 200)
    assert list(made._replays) == [GraphKey("step", (64, 1)), GraphKey("step", (256, 1))]
    assert made.captures == 3
    for length in (130, 40, 70, 300, 130):  # two others of no recording came since the first of 130
        ask("e", length)
    assert made.captures == 3


def test_pictures_of_a_size_that_comes_again_are_recorded_if_they_are_small() -> None:
    here = engine(prefix_cache=False)
    made = recorded(here)
    for index in range(4):
        item = request(str(index), 1, picture(index), 2)
        assert tokens(run(here, item)[str(index)]) == oracle(Toy(), item, 8)
    assert ("picture", (1, 4, 6)) in made._replays
    here._encoder.slice = 1000  # a row of patches each; six are more than three slices
    for index in range(4):
        item = request(f"high {index}", 1, picture(index, 12, 2), 2)
        assert tokens(run(here, item)[item.request_id]) == oracle(Toy(), item, 8)
    assert ("picture", (1, 12, 2)) not in made._replays
    assert here.stats.items_encoded == 8


def test_an_encoding_is_its_own_when_the_next_one_is_made() -> None:
    here = engine(prefix_cache=False)
    recorded(here)
    for index in range(3):
        pair = request(str(index), 1, picture(index), 2, picture(index + 50), 3)
        assert tokens(run(here, pair)[str(index)]) == oracle(Toy(), pair, 8)


def test_models_with_recurrent_states_record_steps_too() -> None:
    here = engine(HybridToy())
    made = recorded(here)
    for index in range(4):
        item = request(str(index), 1, picture(index), *range(2, 20))
        assert tokens(run(here, item)[str(index)]) == oracle(HybridToy(), item, 8)
    assert {key[0] for key in made._replays} == {"picture", "step"}


def test_a_step_that_is_alone_takes_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory: the graphs of prompts go first, and stay away; tokens are the same."""
    here, model = engine(prefix_cache=False), Toy()
    made = recorded(here)
    items = [request(str(i), i + 1, picture(i), *range(2, 12)) for i in range(5)]
    run(here, *items[:3])
    held = made.captures
    assert held
    forward, calls = here.model.forward, iter(range(100))

    def short(*arguments: object) -> torch.Tensor:
        if next(calls) == 0:
            raise torch.OutOfMemoryError(FULL)
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(here.model, "forward", short)
    outputs = run(here, *items[3:])
    for item in items[3:]:
        assert tokens(outputs[item.request_id]) == oracle(model, item, 8)
    assert not made.on
    assert not made._replays
    assert not made._buffers
    assert here.stats.shortages == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(FULL), RuntimeError("capture is not permitted")])
def test_what_cannot_be_recorded_runs_as_ever(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    here, recorder = engine(prefix_cache=False), Again()
    made = recorded(here, recorder=recorder)
    run(here, request("a", *range(1, 20), max_tokens=1))
    recorder.fails = error
    for name in "bcd":
        item = request(name, *range(1, 20))
        assert tokens(run(here, item)[name]) == oracle(Toy(), item, 8)
    assert not made.on
    assert here.stats.faults == 0
    assert "CUDA graphs of steps" in caplog.text or "can't be captured" in caplog.text
    recorder.fails = None
    made.start()
    assert made.on == isinstance(error, torch.OutOfMemoryError), "what is broken stays so"


def test_cuda_graphs_share_a_stream_and_a_pool_until_all_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            said.append((pool, capture_error_mode))

        def capture_end(self) -> None:
            said.append("end")

        def pool(self) -> tuple[int, int]:
            return (0, 7)

        def replay(self) -> None:
            said.append("replay")

    stream = SimpleNamespace(wait_stream=lambda other: said.append(("after", other)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "main")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    recorder = CudaCapturer(CPU, lambda: stream)
    again = recorder.capture(lambda: said.append("work"), "spare")
    assert said == [("after", "main"), (None, "thread_local"), "work", "end"]
    again()
    assert said[4:] == ["replay"]
    with pytest.raises(ZeroDivisionError):
        recorder.capture(lambda: said.append(1 // 0), "spare")
    assert said[5:] == [("after", "main"), ((0, 7), "thread_local"), "end"], "the stream records no longer"
    recorder.capture(lambda: None, "lasting")
    assert said[9] == (None, "thread_local"), "lasting graphs have a pool of their own"
    recorder.drop_pool("spare")
    recorder.capture(lambda: None, "spare")
    assert said[12] == (None, "thread_local")
    recorder.capture(lambda: None, "lasting")
    assert said[15] == ((0, 7), "thread_local")


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_something_is_recorded(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """A graph of an engine that is gone may be among it, and freeing one ends the recording."""
    nothing = SimpleNamespace(
        capture_begin=lambda *_, **__: None, capture_end=lambda: None, pool=lambda: None, replay=None
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        free: list[bool] = []
        look = Thread(target=lambda: free.append(capturing.acquire(blocking=False)))
        seen = list[bool]()
        captured(lambda: (seen.append(gc.isenabled()), look.start(), look.join())[1], None, stream)
        assert free == [False], "nor does another thread give anything back"
        after = gc.isenabled()
        with pytest.raises(ZeroDivisionError):
            captured(lambda: 1 // 0, None, stream)  # type: ignore[arg-type, return-value]
        assert gc.isenabled() == after == collects
        assert seen == [False]
    finally:
        (gc.enable if before else gc.disable)()


class Few(Toy):
    """Whose steps of more than three tokens the host has to see, as where it brings experts."""

    @property
    def capturable_tokens(self) -> int | None:
        return 3


def test_no_graph_holds_a_step_of_more_tokens_than_the_network_says() -> None:
    config = EngineConfig(num_blocks=8, block_size=4)
    free, few = (Engine(model, config)._runner for model in (Toy(), Few()))
    assert (free.graphs.largest, few.graphs.largest) == (32, 2)
    for runner, steps in ((free, True), (few, False)):
        runner.use_spare_graphs()
        assert (runner._steps is not None) == steps


def test_graphs_of_drafts_have_no_more_tokens_than_a_step_where_the_gpu_fetches_experts() -> None:
    """Each token more would have experts of its own brought."""
    config = EngineConfig(num_blocks=8, block_size=4, step_graph_tokens=16)
    free, few = (Engine(model, config)._runner for model in (Toy(), Few()))
    sizes = []
    for runner in (free, few):
        runner.use_spare_graphs()
        assert runner._steps is not None
        sizes.append([runner._steps._shape(Shape(n, 1, 4, 2, 0)).tokens for n in (2, 3, 8)])
    assert sizes == [[8, 8, 8], [2, 3, 8]]
    assert few._steps is not None
    assert few._steps._most == Few().capturable_tokens


def test_graphs_follow_what_the_network_can_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs may get the memory of experts, and give it back."""
    config = EngineConfig(num_blocks=8, block_size=4, step_graph_tokens=16)
    runner = Engine(Few(), config)._runner
    runner.use_spare_graphs()
    runner._recordable = True  # as on a GPU
    found = []
    for most in (0, 1, 8):
        monkeypatch.setattr(Few, "capturable_tokens", most)
        runner.limit_graphs()
        assert runner._steps is not None
        found.append((runner.has_graphs, runner.graphs.sizes, runner._steps._most))
    assert found == [(False, (1,), 0), (True, (1,), 1), (True, (1, 2, 4, 8), 8)]
