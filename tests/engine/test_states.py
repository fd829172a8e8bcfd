"""Recurrent states: a request's tokens depend on nobody who had its slot before, or sits beside it."""

from functools import cache

import pytest
import torch
from hypothesis import given

from snugvl.engine.engine import Engine
from tests.draws import draws
from tests.engine.test_interleaving import PROMPTS, WORLDS, interleave
from tests.engine.toy import POISON, HybridToy, engine, oracle, picture, request, run, tokens

MODEL = HybridToy()


@cache
def expected(which: int, count: int) -> list[int]:
    return oracle(MODEL, request("alone", *PROMPTS[which]), count)


def slot_of(here: Engine, name: str) -> int | None:
    return here._requests[name][0].slot


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("which", range(len(PROMPTS)))
def test_alone_in_any_chunk_equals_the_oracle(which: int, chunk: int) -> None:
    here = engine(MODEL, max_batched_tokens=chunk, max_num_seqs=1)
    assert tokens(run(here, request("a", *PROMPTS[which], max_tokens=12))["a"]) == expected(which, 12)


def test_the_toy_remembers_through_its_state() -> None:
    """Tokens apart by an early one only: a lost state would make them equal, or these tests prove little."""
    model = HybridToy()
    model.qkv[1].data.zero_()  # nothing comes through keys and values
    ends = {tuple(oracle(model, request("a", first, 5, 6, 7, 8), 8)) for first in range(12)}
    assert len(ends) > 4


def test_company_of_all_lengths_and_preemption_change_no_token() -> None:
    here = engine(MODEL, num_blocks=9, max_model_len=36, max_batched_tokens=8)
    outputs = run(here, *(request(str(w), *PROMPTS[w], max_tokens=12) for w in range(4)))
    assert [tokens(outputs[str(w)]) for w in range(4)] == [expected(w, 12) for w in range(4)]
    assert here.stats.preemptions > 0


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_choices_go_on_from_copies(slots: int) -> None:
    def answer(**config: int) -> list[list[int]]:
        here = engine(MODEL, **config)
        outputs = run(here, request("a", 5, picture(1), 6, n=4, temperature=1.0, seed=3, max_tokens=7))
        return [tokens(outputs["a"], choice) for choice in range(4)]

    ways = answer(max_num_seqs=slots)
    assert len({tuple(way) for way in ways}) > 1
    for choice, way in enumerate(ways):
        # A choice alone draws the same numbers only as itself: so it is compared to all of them together.
        assert way == answer()[choice]


def test_greedy_choices_equal_the_oracle() -> None:
    outputs = run(engine(MODEL), request("a", *PROMPTS[4], n=3, max_tokens=12))
    assert [tokens(outputs["a"], choice) for choice in range(3)] == [expected(4, 12)] * 3


@pytest.mark.parametrize("bad", [7, POISON])
def test_nothing_is_left_on_a_slot(bad: int) -> None:
    """Aborted in the middle of its prompt, in the middle of its answer, or ended by NaN."""
    here = engine(MODEL, max_num_seqs=1, max_batched_tokens=4)
    for steps in (1, 4):
        here.add(request("old", 9, 9, 9, 9, 9, bad, 9, max_tokens=20))
        for _ in range(steps):
            here.step()
        here.abort("old")
        here.check_integrity()
        assert tokens(run(here, request("new", *PROMPTS[2], max_tokens=12))["new"]) == expected(2, 12)


def test_neighbours_of_an_aborted_one_keep_their_states() -> None:
    here = engine(MODEL, max_num_seqs=3)
    for which in range(3):
        here.add(request(str(which), *PROMPTS[which], max_tokens=12))
    said = [output for _ in range(3) for output in here.step()]
    gone = slot_of(here, "1")
    here.abort("1")
    here.add(request("3", *PROMPTS[3], max_tokens=12))
    said += here.step()
    assert slot_of(here, "3") == gone
    for late in run(here).values():
        said += late
    for which in (0, 2, 3):
        assert tokens([o for o in said if o.request_id == str(which)]) == expected(which, 12)


def test_a_reset_frees_all_slots() -> None:
    here = engine(MODEL, max_num_seqs=2)
    for name in "ab":
        here.add(request(name, *PROMPTS[0], max_tokens=12))
    here.step()
    here.reset()
    here.check_integrity()
    outputs = run(here, *(request(name, *PROMPTS[0], max_tokens=12) for name in "ab"))
    assert [tokens(outputs[name]) for name in "ab"] == [expected(0, 12)] * 2


def test_no_prompt_starts_from_the_blocks_of_another() -> None:
    """They hold keys and values, and no state: the prefix cache is off, and doesn't say that it was asked."""
    here = engine(MODEL)
    for _ in range(2):
        outputs = run(here, request("a", *PROMPTS[6], max_tokens=12))
        assert tokens(outputs["a"]) == expected(6, 12)
    assert not here.config.prefix_cache
    assert (here.stats.prefix_query_tokens, here.stats.prefix_hit_tokens) == (0, 0)


def test_memory_is_one_allocation_for_all_slots_and_the_scratch() -> None:
    here = engine(MODEL, max_num_seqs=5)
    # (value heads · key width · value width, and one input of 2 keys and 2 values) · float64
    each = (2 * 4 * 8 + 1 * (2 * 4 + 2 * 8)) * 8
    assert here.memory()["recurrent_state"] == 6 * each
    assert here.memory()["kv_cache"] == 1 * 2 * 256 * 1 * 8 * 8, "the linear layer has no keys and values"
    states = here._cache.states
    assert states is not None
    run(here, request("a", *PROMPTS[0]))
    assert not states.recurrent[:, states.scratch].any()


def test_single_precision_too() -> None:
    model = HybridToy(torch.float32)
    alone = [run(engine(model), request("a", *p))["a"] for p in PROMPTS]
    small = engine(model, num_blocks=10, max_model_len=40, max_batched_tokens=8)
    together = run(small, *(request(str(i), *p) for i, p in enumerate(PROMPTS)))
    assert [tokens(together[str(i)]) for i in range(len(PROMPTS))] == [tokens(a) for a in alone]
    assert small.stats.preemptions > 0


@draws(30)
@given(**WORLDS)
def test_any_interleaving_gives_the_same_tokens(
    actions: list[tuple[str, object]], blocks: int, slots: int, budget: int
) -> None:
    interleave(MODEL, actions, blocks, slots, budget)
