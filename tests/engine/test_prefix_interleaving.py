"""Invariant 3 with the prefix cache: who shares what with whom, and when, changes no token.

Prompts are beginnings of a few texts, so that they meet all the time; the pool is small, so that blocks are
taken from the cache all the time. With `ahead`, steps run ahead of the host as they do on a GPU.
Beside it the same with recurrent states and a few snapshots, of which each prompt and answer wants some.
"""

from contextlib import suppress
from functools import cache

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from snugvl.engine import snapshots
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, TokenOutput, VisionItem
from snugvl.errors import RequestTooLarge
from tests.draws import draws
from tests.engine.eager import EagerGraphs, engine_with, finish
from tests.engine.toy import POISON, HybridToy, Toy, engine, oracle, picture, request, run, tokens

MODEL, HYBRID = Toy(), HybridToy()
TEXTS: tuple[tuple[int | VisionItem, ...], ...] = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9),
    (3, 1, 4, 1, 5, 9, 2, 6, 2, 7, 1, 8),
    (3, picture(1), 6, 7, picture(2), 8, 9),
    (3, picture(1), 6, 7, picture(3), 8, 9),
    (3, picture(4, 4, 4), picture(1), 5),
)
SAMPLING = st.sampled_from([{}, {}, {"n": 2}, {"n": 3, "temperature": 1.2, "seed": 1}])
REQUESTS = st.tuples(
    st.integers(0, len(TEXTS) - 1),
    st.sampled_from([15, 14, 13, 9, 8, 6, 5, 4, 2, 1]),
    st.sampled_from([1, 4, 10, 16]),
    SAMPLING,
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("again"), st.integers(0, 7)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 7), st.sampled_from([None, 0, 1, 2]))),
    st.tuples(st.just("reset"), st.none()),
)


@cache
def alone(
    model: Toy, parts: tuple[int | VisionItem, ...], count: int, sampling: tuple[tuple[str, object], ...]
) -> dict[int, list[int]]:
    here = engine(model, prefix_cache=False, max_model_len=512, num_blocks=512)
    outputs = run(here, request("a", *parts, max_tokens=count, **dict(sampling)))["a"]
    return {choice: tokens(outputs, choice) for choice in range(dict(sampling).get("n", 1))}


def make(blocks: int, slots: int, chunk: int, ahead: bool, states: int = 0) -> Engine:
    here = engine(
        HYBRID if states else MODEL,
        num_blocks=blocks,
        max_model_len=4 * blocks,
        max_num_seqs=slots,
        max_batched_tokens=chunk,
        state_snapshots=states,
    )
    if ahead:
        here._runner.graphs = EagerGraphs(here)
        here._runner.has_graphs = True
    return here


WORLDS = {
    "actions": st.lists(ACTIONS, min_size=8, max_size=25),
    "blocks": st.integers(7, 16),
    "slots": st.integers(1, 5),
    "more": st.integers(0, 12),
    "ahead": st.booleans(),
}


@draws(50)
@given(**WORLDS)
def test_any_interleaving_gives_the_same_tokens(
    actions: list[tuple[str, object]], blocks: int, slots: int, more: int, ahead: bool
) -> None:
    interleave(make(blocks, slots, slots + more, ahead), actions, blocks)


@draws(60)
@given(**WORLDS, states=st.integers(1, 6), spacing=st.integers(1, 2), stops=st.booleans())
def test_any_interleaving_gives_the_same_tokens_with_states(
    actions: list[tuple[str, object]],
    blocks: int,
    slots: int,
    more: int,
    ahead: bool,
    states: int,
    spacing: int,
    stops: bool,
) -> None:
    """`stops`: 9 ends turns, of prompts as well as of answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "SPACING", spacing)
        here = make(blocks, slots, slots + more, ahead, states)
        interleave(here, actions, blocks, {"stops": (9,)} if stops else {})


def interleave(
    here: Engine, actions: list[tuple[str, object]], blocks: int, always: dict[str, object] | None = None
) -> None:
    """Do all that, and check that every request got the tokens it gets alone, as far as it came."""
    model = here.model
    assert isinstance(model, Toy)
    outputs: list[TokenOutput] = []
    wanted: dict[str, tuple[tuple[int | VisionItem, ...], int, dict[str, object]]] = {}

    def add(parts: tuple[int | VisionItem, ...], count: int, sampling: dict[str, object]) -> None:
        name = str(len(wanted))
        with suppress(RequestTooLarge):
            here.add(request(name, *parts, max_tokens=count, **sampling, **(always or {})))
            wanted[name] = (parts, count, {**sampling, **(always or {})})

    for kind, value in actions:
        if kind == "add":
            which, length, count, sampling = value
            add(TEXTS[which][:length], count, sampling)
        elif kind == "again" and str(value) in wanted:  # the next turn: what it said, and a word
            parts, _, _ = wanted[str(value)]
            said = tokens([o for o in outputs if o.request_id == str(value)])
            add((*parts, *said, 7), 4, {})
        elif kind == "abort":
            outputs += here.abort(str(value[0]), value[1])
        elif kind == "reset":
            outputs += here.reset()
        elif kind == "step":
            for _ in range(value):
                outputs += here.step()
                here.check_integrity()
        here.check_integrity()
    while here.has_work:
        outputs += here.step()
        here.check_integrity()
    event(f"hits: {here.stats.prefix_hit_tokens > 0}, preempted: {here.stats.preemptions > 0}")
    assert here.stats.faults == 0
    assert here.stats.free_blocks == blocks
    for name, (parts, count, sampling) in wanted.items():
        mine = [output for output in outputs if output.request_id == name]
        for choice, right in alone(model, parts, count, tuple(sampling.items())).items():
            ends = [output.finish for output in mine if output.choice == choice and output.finish]
            got = tokens(mine, choice)
            assert len(ends) == 1, "each choice ends exactly once"
            assert got == right[: len(got)]
            assert ends[0] in ("abort", "error") or got == right


def finish_with(here: Engine, item: EngineRequest) -> list[object]:
    here.add(item)
    return [value for value in finish(here)[item.request_id, 0] if isinstance(value, int)]


def request_of(parts: tuple[int | VisionItem, ...], **sampling: object) -> EngineRequest:
    """A request whose prompt may end with a placeholder, which a chat never does."""
    ids = tuple(44 if isinstance(part, VisionItem) else part for part in parts)
    items = tuple(part for part in parts if isinstance(part, VisionItem))
    base = request("a", 1, max_tokens=6, **sampling)
    return EngineRequest("a", ids, base.sampling, items)


@pytest.mark.parametrize("length", range(1, 10))
def test_a_token_that_is_only_started_is_not_found(length: int) -> None:
    """A sequence that stops while the step after its last token runs: that step's token is nobody's."""
    answer = oracle(MODEL, request("a", 1, 2, 3), 20)
    stop = answer[length]
    here = make(40, 4, 16, ahead=True)
    said = finish_with(here, request("a", 1, 2, 3, max_tokens=20, stops=[stop]))
    assert said == answer[: answer.index(stop) + 1]
    hits = here.stats.prefix_hit_tokens
    whole = (1, 2, 3, *answer[:length], 40, 40, 40, 40)
    assert finish_with(here, request("b", *whole)) == oracle(MODEL, request("b", *whole), 8)
    common = 3 + min(len(said) - 1, length)
    assert here.stats.prefix_hit_tokens - hits == common // 4 * 4


def test_what_is_in_the_air_cannot_be_found() -> None:
    here = make(40, 4, 16, ahead=True)
    here.add(request("a", 1, 2, 3, max_tokens=30))
    here.step()
    for _ in range(25):
        here.step()
        (sequence,) = here._scheduler.running
        assert here._in_flight is not None
        pool = here._scheduler.pool
        findable = [pool.key(block) is not None for block in sequence.table]
        # All known tokens but the newest are written; a step that is under way may write that one.
        full = (sequence.length - 1) // 4
        assert findable == [True] * full + [False] * (len(findable) - full)


def test_a_prompt_with_one_token_left_is_no_decode_step() -> None:
    """Its siblings wait for its logits, and the token may be a placeholder: graphs know neither."""
    for parts in ((1, 2, 3, 4, 5), (1, 2, 3, 42, picture(6, 2, 2))):
        here = make(40, 4, 16, ahead=True)
        item = request_of(parts, n=2)
        want = oracle(MODEL, item, 6)
        for hits in (0, 4):
            before = here.stats
            here.add(item)
            here.step()
            assert here.stats.running == 2, "the sibling runs from the first step on"
            here.abort("a")
            assert here.stats.prefix_hit_tokens - before.prefix_hit_tokens == hits
        here.add(item)
        found = finish(here)
        assert found["a", 0][:-1] == found["a", 1][:-1] == want


def test_poison_while_running_ahead_is_not_kept() -> None:
    here, _ = engine_with(True)
    for _ in range(2):
        here.add(request("a", 1, 2, 3, 4, 5, POISON))
        assert finish(here)["a", 0] == ["error"]
    assert here.stats.prefix_hit_tokens == 0


def test_a_choice_that_found_its_prompt_leaves_no_picture_behind() -> None:
    """It waits for the only slot with the picture held for it, and then needs only to decode."""
    here = make(7, 1, 9, ahead=True)
    outputs = run(here, request("a", *TEXTS[4], max_tokens=4, n=2))["a"]
    assert tokens(outputs, 0) == tokens(outputs, 1)
    assert here.memory()["encoder_outputs"] == 0
