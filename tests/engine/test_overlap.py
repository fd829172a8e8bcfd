"""Steps that run ahead of the host give the tokens of steps that wait for it."""

import pytest
import torch

from snugvl.core.config import EngineConfig
from snugvl.engine.graphs.cache import GraphCache
from snugvl.engine.graphs.decode import DecodeGraphs, DecodeRow
from snugvl.engine.memory import allocate
from snugvl.engine.request import TokenOutput
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import ForwardBatch
from tests.engine.eager import engine_with, finish, request
from tests.engine.test_prefill_graphs import Again
from tests.engine.toy import BOMB, POISON, HybridToy, Toy

REQUESTS = [
    request("a", [1, 2, 3, 4, 5], max_tokens=20),
    request("b", [7, 8], max_tokens=9),
    request("c", [9] * 11, max_tokens=14, n=2),
    request("d", [3, 1], max_tokens=12, temperature=1.0, seed=5),
    request("e", [5, 5, 6], max_tokens=10, logprobs=2),
    request("f", [2, 2], max_tokens=13, repetition_penalty=1.3),
    request("g", [4, 2], max_tokens=24, no_repeat_ngram_size=2),
]


SAMPLED = [
    request("a", [1, 2, 3, 4, 5], max_tokens=20, temperature=1.3, seed=1, top_p=0.9),
    request("b", [7, 8], max_tokens=17, temperature=0.8, seed=2, top_k=5, min_p=0.02, n=2),
    request("c", [9] * 11, max_tokens=14),
    request("d", [3, 1], max_tokens=12, temperature=1.0, seed=5, frequency_penalty=0.9, presence_penalty=0.4),
    request("e", [5, 5, 6], max_tokens=10, logprobs=2, temperature=0.5, seed=3, logit_bias={3: 4.0, 9: -2.0}),
    request("f", [2, 2], max_tokens=13, repetition_penalty=1.3),
    request("g", [4, 2], max_tokens=24, no_repeat_ngram_size=2, no_repeat_window=8),
]


def test_whatever_is_sampled_runs_ahead_and_gives_the_same_tokens() -> None:
    found = []
    for graphs in (False, True):
        engine, eager = engine_with(graphs, max_num_seqs=8, num_blocks=80)
        for each in SAMPLED:
            engine.add(each)
        outputs: list[TokenOutput] = []
        while engine.has_work:
            outputs += engine.step()
            engine.check_integrity()
        said = sorted((o.request_id, o.choice, o.token_id, o.top_logprobs, o.finish or "") for o in outputs)
        found.append(said)
        if eager is not None:
            assert eager.followed > eager.started, (
                "most steps have begun before the tokens of the last were read"
            )
    assert found[0] == found[1]
    assert any(top for *_, top, _ in found[1])


@pytest.mark.parametrize("late", [0, 3, 7])
@pytest.mark.parametrize("model", [Toy, HybridToy])
@pytest.mark.sample("Toy-0", "Toy-7", "HybridToy-3")
def test_tokens_are_those_of_steps_that_wait(late: int, model: type[Toy]) -> None:
    results = []
    for graphs in (False, True):
        engine, eager = engine_with(graphs, model())
        outputs: list[TokenOutput] = []
        for index, each in enumerate(REQUESTS):
            engine.add(each)
            for _ in range(late if index else 0):
                outputs += engine.step()
        results.append(finish(engine, outputs))
        if eager is not None:
            assert eager.started
            assert eager.followed, "no step ran ahead"
    assert results[0] == results[1]


def test_a_stop_token_ends_a_sequence_though_the_next_step_has_begun() -> None:
    waiting, _ = engine_with(False)
    waiting.add(request("a", [1, 2, 3], max_tokens=20))
    tokens = finish(waiting)["a", 0]
    stop = tokens[6]
    assert isinstance(stop, int)
    ahead, eager = engine_with(True)
    for name in ("a", "b"):
        ahead.add(request(name, [1, 2, 3], max_tokens=20, stop_ids=[stop] if name == "a" else []))
    found = finish(ahead)
    first = tokens.index(stop)
    assert found["a", 0] == [*tokens[: first + 1], "stop"]
    assert found["b", 0] == tokens
    assert eager is not None
    assert eager.started > 1, "the batch went on without the one that ended"


def test_an_abort_while_a_step_is_under_way_frees_the_blocks() -> None:
    engine, _ = engine_with(True)
    engine.add(request("a", [1, 2, 3], max_tokens=30))
    engine.add(request("b", [4, 5], max_tokens=12))
    for _ in range(4):
        engine.step()
    assert engine._in_flight is not None
    assert [output.finish for output in engine.abort("a")] == ["abort"]
    engine.check_integrity()
    alone, _ = engine_with(False)
    alone.add(request("b", [4, 5], max_tokens=12))
    rest = [token for token in finish(engine).get(("b", 0), []) if token is not None]
    assert rest == finish(alone)["b", 0][-len(rest) :]
    assert engine.stats.free_blocks == engine.stats.num_blocks


def test_all_aborted_while_a_step_is_under_way_then_a_new_one() -> None:
    engine, _ = engine_with(True)
    engine.add(request("a", [1, 2, 3], max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    assert not engine.has_work
    engine.add(request("b", [4, 5], max_tokens=6))
    alone, _ = engine_with(False)
    alone.add(request("b", [4, 5], max_tokens=6))
    assert finish(engine) == finish(alone)


@pytest.mark.parametrize("ending", [POISON, BOMB])
def test_a_fault_while_running_ahead_ends_what_it_must(ending: int) -> None:
    engine, _ = engine_with(True)
    engine.add(request("a", [1, ending], max_tokens=5))
    found = finish(engine)
    assert found["a", 0][-1] == "error"
    engine.add(request("b", [1, 2], max_tokens=5))
    assert finish(engine)["b", 0][-1] == "length"


@pytest.mark.parametrize("model", [Toy, HybridToy])
def test_few_blocks_preempt_and_nobody_is_lost(model: type[Toy]) -> None:
    tight, roomy = engine_with(True, model(), num_blocks=12)[0], engine_with(False, model())[0]
    for engine in (tight, roomy):
        for index in range(5):
            engine.add(request(str(index), [index + 1] * 6, max_tokens=22))
    assert finish(tight) == finish(roomy)
    assert tight.stats.preemptions > 0


def test_a_step_under_way_is_forgotten_by_a_reset() -> None:
    engine, _ = engine_with(True)
    engine.add(request("a", [1, 2, 3], max_tokens=30))
    for _ in range(3):
        engine.step()
    assert [output.finish for output in engine.reset()] == ["error"]
    assert engine._in_flight is None
    engine.add(request("b", [1, 2], max_tokens=5))
    assert finish(engine)["b", 0][-1] == "length"


class Seen:
    """A network that keeps the batches it is given."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []
        self.logits: torch.Tensor | None = None

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        self.batches.append(batch)
        return torch.zeros(len(batch.input_ids), 5) if self.logits is None else self.logits


def batches(network: object, cache: KVCache, *sizes: int) -> tuple[DecodeGraphs, GraphCache, Again]:
    """Decode graphs without CUDA: what is captured is done again."""
    recorder = Again()
    made = GraphCache(recorder, network)  # type: ignore[arg-type]
    return DecodeGraphs(network, cache, 32, made, sizes), made, recorder  # type: ignore[arg-type]


def test_tables_grow_by_the_blocks_that_are_new() -> None:
    """Where others end nothing is touched; a batch after it begins with its own."""
    graphs, _, _ = batches(Seen(), allocate(Toy(), EngineConfig(num_blocks=8, block_size=4)), 4)
    assert graphs.ensure(3)
    graph = graphs._batches[4]
    graphs.start([DecodeRow(3, 4, 0, [1]), DecodeRow(3, 6, 0, [2, 3]), DecodeRow(3, 8, 0, [4, 5])])
    graphs.advance(3, {0: (1, [6]), 2: (2, [7, 0])})
    assert [line.tolist()[:4] for line in graph._tables] == [
        [1, 6, 0, 0],
        [2, 3, 0, 0],
        [4, 5, 7, 0],
        [0] * 4,
    ]
    graphs.start([DecodeRow(3, 9, 0, [7, 1, 2])])
    assert graph._tables[0, :3].tolist() == [7, 1, 2]
    assert graph._lengths.tolist()[1:] == [0, 0, 0], "rows that are nobody's"


def test_masks_choose_once_more() -> None:
    """From the same logits; the next step goes on from that token, at the same length."""
    network = Seen()
    network.logits = torch.tensor([[1.0, 5.0, 2.0, 3.0, 4.0], [9.0, 1.0, 1.0, 1.0, 2.0]])
    graphs, _, _ = batches(network, allocate(Toy(), EngineConfig(num_blocks=8, block_size=4)), 2)
    assert graphs.ensure(2)
    free = graphs.start([DecodeRow(3, 4, 0, [1]), DecodeRow(3, 6, 0, [2, 3])])
    assert [each.token_id for each in free.results()] == [1, 0]
    for allowed, expected in (([0b11100, 0b11111], [4, 0]), ([0b01000, 0], [3, None])):  # captured, replayed
        typed = graphs.choose(torch.tensor(allowed, dtype=torch.int32)[:, None])
        assert typed is not None
        assert [each.token_id for each in typed.results()] == expected
        graph = graphs._batches[2]
        assert graph.ids.tolist() == [expected[0], expected[1] or 0]
        assert graph._lengths.tolist() == [5, 7]
    assert [each.token_id for each in free.results()] == [1, 0], "what was chosen first stays what it was"


def test_without_memory_for_masks_steps_choose_as_ever() -> None:
    graphs, made, recorder = batches(Seen(), allocate(Toy(), EngineConfig(num_blocks=8, block_size=4)), 2)
    assert graphs.ensure(1)
    graphs.start([DecodeRow(3, 4, 0, [1])])
    recorder.fails, tried = torch.OutOfMemoryError(), made.captures
    masks = torch.ones(1, 1, dtype=torch.int32)
    assert graphs.choose(masks) is None
    assert recorder.asked == 3, "once more with what torch keeps given back"
    assert graphs.choose(masks) is None
    assert recorder.asked == 3, "it isn't tried at every step"
    assert made.captures == tried == 1
    recorder.fails = None
    made.clear()
    assert not graphs._batches
    assert graphs._allowed is None
    assert graphs.ensure(1)
    graphs.start([DecodeRow(3, 4, 0, [1])])
    assert graphs.choose(masks) is not None
    assert graphs.choose(masks) is not None
    assert made.captures == 3, "two steps, and one that chooses"


def test_rows_that_fill_up_a_graph_sit_on_nobodys_slot() -> None:
    """Also while it is captured, when no row is anybody's."""
    cache = allocate(HybridToy(), EngineConfig(num_blocks=8, block_size=4, max_num_seqs=5))
    network = Seen()
    graphs, _, _ = batches(network, cache, 4)
    assert graphs.ensure(2)
    graphs.start(
        [DecodeRow(token=3, length=2, delta=0, table=[1], slot=4), DecodeRow(3, 6, 0, [2, 3], slot=0)]
    )
    graphs.advance(2, {})
    slots = [batch.attention.state_slots for batch in network.batches]
    assert [each.tolist() for each in slots if each is not None] == [
        [5] * 4,
        [4, 0, 5, 5],
        [4, 0, 5, 5],
    ]
