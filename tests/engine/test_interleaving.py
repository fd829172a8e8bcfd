"""Invariant 3: a request's tokens don't depend on strangers, chunks, blocks, preemption, or aborts."""

from contextlib import suppress
from functools import cache

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.errors import RequestTooLarge
from tests.draws import draws
from tests.engine.test_prefill_graphs import recorded
from tests.engine.toy import Toy, engine, oracle, picture, request, run, tokens

MODEL = Toy()
PROMPTS = (
    (3, 1, 4, 1, 5),
    (9,),
    (2, 7, 1, 8, 2, 8, 1, 8),
    (5, picture(1), 6, 7),
    (picture(2, 2, 4), 8, picture(1), picture(3, 4, 4)),
    (1, picture(4, 2, 2, t=3), 11),
    tuple(range(1, 18)),
)


@cache
def expected(which: int, count: int) -> tuple[int, ...]:
    return tuple(oracle(MODEL, request("alone", *PROMPTS[which]), count))


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("which", range(len(PROMPTS)))
def test_alone_in_any_chunk_equals_the_oracle(which: int, chunk: int) -> None:
    here = engine(MODEL, max_batched_tokens=chunk, max_num_seqs=1)
    outputs = run(here, request("a", *PROMPTS[which], max_tokens=12))
    assert tokens(outputs["a"]) == list(expected(which, 12))
    assert outputs["a"][-1].finish == "length"
    assert all(output.finish is None for output in outputs["a"][:-1])


def test_the_toy_gives_each_prompt_other_tokens() -> None:
    """Otherwise these tests would prove little."""
    assert len({expected(which, 12) for which in range(len(PROMPTS))}) == len(PROMPTS)
    assert all(len(set(expected(which, 12))) > 2 for which in range(len(PROMPTS)))


def test_preemption_by_a_tiny_pool_changes_no_token() -> None:
    here = engine(MODEL, num_blocks=9, max_model_len=36, max_batched_tokens=8)
    outputs = run(here, *(request(str(w), *PROMPTS[w], max_tokens=12) for w in range(len(PROMPTS) - 3)))
    for which in range(len(PROMPTS) - 3):
        assert tokens(outputs[str(which)]) == list(expected(which, 12))
    assert here.stats.preemptions > 0
    assert here.stats.free_blocks == 9


def test_choices_share_the_prompt_and_go_their_own_way() -> None:
    here = engine(MODEL)
    here.add(request("a", *PROMPTS[2][:6], n=3, temperature=1.5, seed=5, max_tokens=10))
    here.step()
    # 6 tokens in blocks of 4: one block, its owners three; the next step copies the half-full one twice.
    assert here.stats.free_blocks == 64 - 2
    here.step()
    here.check_integrity()
    assert here.stats.free_blocks == 64 - 1 - 3
    outputs = run(here)
    ways = {tuple(tokens(outputs["a"], choice)) for choice in range(3)}
    assert len(ways) == 3
    assert here.stats.free_blocks == 64


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("blocks", [17, 64])
def test_more_choices_than_slots_take_turns(slots: int, blocks: int) -> None:
    def answer(**config: int) -> list[list[int]]:
        here = engine(MODEL, **config)
        outputs = run(here, request("a", 5, picture(1), 6, n=5, temperature=1.0, seed=3, max_tokens=7))
        return [tokens(outputs["a"], choice) for choice in range(5)]

    assert answer(max_num_seqs=slots, num_blocks=blocks) == answer()


def test_greedy_choices_are_equal_and_equal_to_the_oracle() -> None:
    outputs = run(engine(MODEL, num_blocks=14), request("a", *PROMPTS[4], n=2, max_tokens=12))
    assert tokens(outputs["a"], 0) == tokens(outputs["a"], 1) == list(expected(4, 12))


def test_single_precision_too() -> None:
    model = Toy(torch.float32)
    alone = [run(engine(model), request("a", *p))["a"] for p in PROMPTS]
    small = engine(model, num_blocks=10, max_model_len=40, max_batched_tokens=8)
    together = run(small, *(request(str(i), *p) for i, p in enumerate(PROMPTS)))
    assert [tokens(together[str(i)]) for i in range(len(PROMPTS))] == [tokens(a) for a in alone]
    assert small.stats.preemptions > 0


SAMPLING = st.sampled_from(
    [{}, {"n": 2}, {"n": 3, "temperature": 1.2, "seed": 1}, {"temperature": 0.9, "seed": 2}]
)
REQUESTS = st.tuples(st.integers(0, len(PROMPTS) - 1), st.sampled_from([1, 4, 10, 16]), SAMPLING)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 7), st.sampled_from([None, 0, 1, 2]))),
)


@cache
def alone(
    model: Toy, which: int, count: int, sampling: tuple[tuple[str, object], ...]
) -> dict[int, list[int]]:
    outputs = run(engine(model), request("a", *PROMPTS[which], max_tokens=count, **dict(sampling)))["a"]
    return {choice: tokens(outputs, choice) for choice in range(dict(sampling).get("n", 1))}


WORLDS = {
    "actions": st.lists(ACTIONS, min_size=2, max_size=25),
    "blocks": st.integers(7, 14),
    "slots": st.integers(2, 5),
    "budget": st.integers(0, 12),
}


@draws(80)
@given(**WORLDS)
def test_any_interleaving_gives_the_same_tokens(
    actions: list[tuple[str, object]], blocks: int, slots: int, budget: int
) -> None:
    interleave(MODEL, actions, blocks, slots, budget)


@draws(40)
@given(**WORLDS)
def test_any_interleaving_by_graphs_gives_the_same_tokens(
    actions: list[tuple[str, object]], blocks: int, slots: int, budget: int
) -> None:
    """Decode steps that run ahead, steps with prompts, and pictures, all from one cache of graphs."""
    here = interleave(MODEL, actions, blocks, slots, budget, graphs=True)
    for key in here._runner.graph_cache._replays:
        event(f"captured: {key.kind}")


def interleave(
    model: Toy,
    actions: list[tuple[str, object]],
    blocks: int,
    slots: int,
    budget: int,
    *,
    graphs: bool = False,
) -> Engine:
    """Do all that, and check that every request got the tokens it gets alone, as far as it came."""
    here = engine(
        model, num_blocks=blocks, block_size=3, max_num_seqs=slots, max_batched_tokens=slots + budget
    )
    if graphs:
        here._runner.has_graphs = True
        recorded(here)
    wanted: dict[str, tuple[int, int, dict[str, object]]] = {}
    outputs: list[TokenOutput] = []
    for kind, value in actions:
        if kind == "add":
            which, count, sampling = value
            name = str(len(wanted))
            with suppress(RequestTooLarge):
                here.add(request(name, *PROMPTS[which], max_tokens=count, **sampling))
                wanted[name] = value
        elif kind == "abort":
            outputs += here.abort(str(value[0]), value[1])
        else:
            for _ in range(value):
                outputs += here.step()
                here.check_integrity()
        here.check_integrity()
    for late in run(here).values():
        outputs += late
    event(f"preempted: {here.stats.preemptions > 0}")
    assert here.stats.faults == 0
    for name, (which, count, sampling) in wanted.items():
        mine = [output for output in outputs if output.request_id == name]
        for choice, right in alone(model, which, count, tuple(sampling.items())).items():
            ends = [output.finish for output in mine if output.choice == choice and output.finish]
            got = tokens(mine, choice)
            assert len(ends) == 1, "each choice ends exactly once"
            assert got == right[: len(got)]
            assert ends == ["abort"] or got == right
    return here


def test_the_oldest_is_never_preempted_and_the_queue_never_overtaken() -> None:
    here = engine(MODEL, num_blocks=12, max_model_len=48, max_batched_tokens=8, max_num_seqs=4)
    for number in range(8):
        here.add(request(str(number), *range(1, 10 + number), max_tokens=10))
    first, ends = [], []
    while here.has_work:
        for output in here.step():
            if len([n for n in first if n == output.request_id]) == 0:
                first.append(output.request_id)
            if output.finish:
                ends.append(output.request_id)
        assert here._scheduler.running[:1] == sorted(here._scheduler.running, key=lambda s: s.order)[:1]
    assert first == [str(n) for n in range(8)]
    assert ends[0] == "0"
    assert sorted(ends) == first


def test_random_stream_survives_preemption() -> None:
    sampling = {"temperature": 1.3, "top_p": 0.95, "seed": 11, "max_tokens": 12, "frequency_penalty": 0.3}
    right = tokens(run(engine(MODEL), request("a", 1, 2, 3, **sampling))["a"])
    here = engine(MODEL, num_blocks=9, max_model_len=36, max_batched_tokens=8)
    older: list[EngineRequest] = [request(f"old{i}", *PROMPTS[0], max_tokens=20) for i in range(3)]
    assert tokens(run(here, *older, request("a", 1, 2, 3, **sampling))["a"]) == right
    assert here.stats.preemptions > 0
