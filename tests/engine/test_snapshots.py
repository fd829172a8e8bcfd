"""Snapshots of recurrent states: where they are left, who starts from them, and that no token tells.

`SPACING` is a block here, where a test doesn't say otherwise, so that short prompts have snapshots, too.
"""

from collections.abc import Iterator
from functools import cache

import pytest

from snugvl.core.config import EngineConfig
from snugvl.engine import snapshots
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, TokenOutput, VisionItem
from snugvl.layers.kv_cache import StateCache
from tests.engine.eager import EagerGraphs
from tests.engine.test_pressure import BLOCK, MIB, Card, steps
from tests.engine.toy import BOMB, HybridToy, Toy, engine, oracle, picture, request, run, tokens

MODEL = HybridToy()
STOP = 41
BLOCK_TOKENS = 4
LONG = tuple(range(1, 19))  # 18 tokens: four full blocks of 4, and two tokens


@pytest.fixture(autouse=True, scope="module", params=[4, 64], ids=["landing", "stopping"])
def spacing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Snapshots on a chunk's way, or where it stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "SPACING", 1)
        patch.setattr(snapshots, "LANDING", request.param)
        yield


def make(model: HybridToy = MODEL, *, ahead: bool = False, **config: int) -> Engine:
    here = engine(model, **{"state_snapshots": 8} | config)
    if ahead:
        here._runner.graphs, here._runner.has_graphs = EagerGraphs(here), True
    return here


@cache
def right(item: EngineRequest, count: int) -> list[int]:
    return oracle(MODEL, item, count)


def ask(here: Engine, *parts: int | VisionItem, **sampling: object) -> tuple[int, list[int]]:
    """Tokens found in the cache, and the answer, which must be right."""
    item, before = request("r", *parts, **sampling), here.stats
    got = tokens(run(here, item)["r"])
    after = here.stats
    assert got == right(item, len(got))
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    assert after.prompt_tokens - before.prompt_tokens == len(item.prompt_ids) - hits + len(got) - 1
    assert after.prefix_query_tokens - before.prefix_query_tokens == len(item.prompt_ids)
    return hits, got


def states(here: Engine) -> StateCache:
    assert here._cache.states is not None
    return here._cache.states


def found(here: Engine) -> int:
    """Snapshots that there are."""
    return len(here._scheduler.snapshots._found)


# What is found


def test_the_same_prompt_again_starts_at_its_last_boundary() -> None:
    here = make()
    assert ask(here, *LONG, max_tokens=1)[0] == 0
    assert ask(here, *LONG, max_tokens=1)[0] == 16
    assert ask(here, *LONG[:16], 40, 41, max_tokens=1)[0] == 16
    assert ask(here, *LONG[:15], 40, 41, 42, max_tokens=1)[0] == 0, "12 tokens are cached, but no state there"
    assert ask(here, *LONG[:16], max_tokens=1)[0] == 0, "nor one before the last token"
    assert ask(here, *LONG[:16], max_tokens=1)[0] == 12
    assert ask(here, *LONG[:3])[0] == 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 16, 64])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.sample(
    "landing-False-1",
    "landing-False-5",
    "landing-False-64",
    "landing-True-3",
    "landing-True-16",
    "stopping-False-2",
    "stopping-False-7",
    "stopping-True-1",
    "stopping-True-5",
)
def test_the_next_turn_starts_in_the_answer(chunk: int, ahead: bool) -> None:
    here = make(max_batched_tokens=chunk, max_num_seqs=1, ahead=ahead)
    parts: tuple[int | VisionItem, ...] = (1, 2, 3, picture(1), 4, 5)
    for turn in range(3):
        length = len(request("r", *parts).prompt_ids)
        hits, answer = ask(here, *parts, max_tokens=13 + turn)
        assert hits == (0 if turn == 0 else (length - 2) // 4 * 4), "all that the turn before has computed"
        parts = (*parts, *answer, 7)


@pytest.mark.parametrize("ahead", [False, True])
def test_where_the_answer_is_rendered_otherwise_the_prompts_checkpoint_is_found(ahead: bool) -> None:
    """As with templates that drop what was thought, and what they wrote before it."""
    here = make(ahead=ahead)
    turn = (*range(1, 14), STOP, 30)
    _, answer = ask(here, *turn, 31, 32, max_tokens=12, stops=[STOP])
    assert ask(here, *turn, *answer, 7, max_tokens=12, stops=[STOP])[0] == 12
    assert ask(here, *turn, 31, 32, *answer, 7, max_tokens=12, stops=[STOP])[0] == 28, "and where it wasn't"


def test_a_checkpoint_moves_along_with_an_answer() -> None:
    here = make()
    ask(here, 1, 2, 3, max_tokens=30)
    assert found(here) == 1
    ask(here, *LONG, max_tokens=30)
    assert found(here) == 3, "one of each answer, and one of the prompt"


def test_choices_start_from_and_leave_snapshots() -> None:
    here = make(max_num_seqs=2)
    item = request("r", *LONG, n=3, temperature=1.5, seed=5, max_tokens=14)
    first = run(here, item)["r"]
    again = run(here, item)["r"]
    assert [tokens(first, c) for c in range(3)] == [tokens(again, c) for c in range(3)]
    plain = run(engine(MODEL), item)["r"]
    assert [tokens(first, c) for c in range(3)] == [tokens(plain, c) for c in range(3)]
    assert here.stats.prefix_hit_tokens == 16, "counted when it came, not when the third choice did"
    for choice in range(3):
        assert ask(here, *LONG, *tokens(first, choice), 9)[0] == 28


def test_choices_leave_snapshots_as_far_apart_as_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SPACING", 4)
    here = make()
    run(here, request("r", *LONG, n=2, temperature=1.5, seed=5, max_tokens=8))
    assert found(here) == 1
    run(here, request("r", *LONG, n=2, temperature=1.5, seed=5, max_tokens=16))
    assert found(here) == 3


# Pictures and turns


@pytest.mark.parametrize("chunk", [8, 9, 64])
def test_a_second_question_about_a_picture_starts_in_its_last_block(chunk: int) -> None:
    here = make(max_batched_tokens=chunk)
    item = picture(1, 8, 8)  # 16 tokens
    ask(here, 5, item, 6, 7, 8, 9, 10, 11, 12, max_tokens=1)
    assert ask(here, 5, item, 9, 9, max_tokens=1)[0] == 16, "1 + 1 before it, 14 of its 16 rows"
    assert ask(here, 5, picture(2, 8, 8), 9, 9, max_tokens=1)[0] == 0
    both = (5, item, 6, picture(3, 8, 8), 6, 7)
    ask(here, *both, max_tokens=1)
    assert ask(here, *both, 8, 8, max_tokens=1)[0] == 36
    assert ask(here, 5, item, 6, picture(4, 8, 8), 6, 7)[0] == 16


def test_a_common_first_turn_is_computed_once() -> None:
    here = make()
    system = (*range(1, 11), STOP)
    ask(here, *system, *range(20, 30), STOP, 12, stops=[STOP])
    assert ask(here, *system, *range(30, 40), STOP, 12, stops=[STOP])[0] == 8
    assert ask(here, *system, 13, stops=[STOP])[0] == 8


def marks_of(here: Engine, *parts: int | VisionItem) -> list[int]:
    here.add(request("marks", *parts, stops=[STOP]))
    here.step()
    marks = here._requests["marks"][0].marks
    here.abort("marks")
    return marks


def test_few_snapshots_of_a_prompt_and_not_close_to_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [part for turn in range(10) for part in (*range(1, 12), STOP)]
    assert marks_of(make(), *turns) == [84, 96, 108, 116], "the last four"
    assert marks_of(make(state_snapshots=3), *turns) == [96, 108, 116]
    monkeypatch.setattr(snapshots, "SPACING", 4)
    assert marks_of(make(), *turns) == [48, 72, 96, 116]
    monkeypatch.setattr(snapshots, "SPACING", 16)
    assert marks_of(make(), *turns) == [72]
    assert marks_of(make(), *turns[:60]) == []
    assert marks_of(make(), 1, picture(1, 16, 16), *range(1, 9)) == [64], "in the picture: the text is short"
    assert marks_of(make(), *turns[:64], 1) == [64], "before the last token, where no turn ends"


def test_a_step_goes_on_with_others_where_a_text_pauses_but_not_before_another_picture() -> None:
    """Of pictures that are still to come, the encodings of one prompt alone are held."""
    here = make()
    for name in "abc":
        here.add(request(name, ord(name) % 40, *LONG))
    here.step()
    first = 16 if snapshots.LANDING > BLOCK_TOKENS else 19  # one lands on its way, the others stop
    assert here.stats.prompt_tokens == first + 2 * 16
    here.step()
    assert here.stats.prompt_tokens == 3 * 19 + (first == 19), "it decodes"
    run(here)
    here = make()
    for seed in range(3):
        here.add(request(str(seed), picture(seed, 4, 8), 1, 2, picture(seed, 4, 8), 3))
    here.step()
    assert (here.stats.running, here.stats.waiting) == (1, 2)
    run(here)


# What goes


def test_blocks_without_their_checkpoint_are_computed_again() -> None:
    here = make(state_snapshots=2)
    ask(here, *LONG, max_tokens=1)
    used = here._scheduler.pool.num_free - len(here._scheduler.pool._blank)
    for start in (10, 20):
        ask(here, *range(start, start + 18), max_tokens=1)
    assert found(here) == 2
    assert len(here._scheduler.pool._cached) == 3 * used, "its blocks are there"
    assert ask(here, *LONG, max_tokens=1)[0] == 0
    assert ask(here, *LONG, max_tokens=1)[0] == 16


def test_who_was_used_last_stays() -> None:
    here = make(state_snapshots=2)
    ask(here, *LONG, max_tokens=1)
    ask(here, *range(10, 28), max_tokens=1)
    assert ask(here, *LONG, max_tokens=1)[0] == 16
    ask(here, *range(20, 38), max_tokens=1)
    assert ask(here, *LONG, max_tokens=1)[0] == 16
    assert ask(here, *range(10, 28), max_tokens=1)[0] == 0


def test_a_checkpoint_goes_with_its_block() -> None:
    here = make(num_blocks=8, max_model_len=32)
    ask(here, *LONG, max_tokens=1)
    assert found(here) == 1
    ask(here, *range(10, 38), max_tokens=4)  # all eight blocks
    assert found(here) == 1 + 0, "the other's own alone"
    assert ask(here, *LONG, max_tokens=1)[0] == 0


def test_one_alone_stays_where_a_prompt_ends() -> None:
    here = make(state_snapshots=1)
    ask(here, *LONG, max_tokens=20)
    assert ask(here, *LONG, max_tokens=20)[0] == 16


def test_off_takes_no_memory() -> None:
    whole, none = make(max_num_seqs=3), make(max_num_seqs=3, prefix_cache=False)
    assert (states(whole).rows, states(none).rows) == (3 + 1 + 8, 3 + 1)
    assert whole.memory()["recurrent_state"] == 3 * none.memory()["recurrent_state"]
    for _ in range(2):
        assert tokens(run(none, request("r", *LONG))["r"]) == right(request("r", *LONG), 8)
    assert (none.stats.prefix_query_tokens, none.stats.prefix_hit_tokens) == (0, 0)
    assert none.stats.prompt_tokens == 2 * (18 + 7)
    assert Engine(Toy(), EngineConfig(8, state_snapshots=5)).config.state_snapshots == 0


def test_a_fault_and_a_reset_forget_everything() -> None:
    here = make()
    for forget in (lambda: run(here, request("bomb", 9, BOMB)), here.reset):
        ask(here, *LONG)
        assert found(here)
        forget()
        assert found(here) == 0
        assert ask(here, *LONG)[0] == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_what_made_no_number_is_not_kept(ahead: bool) -> None:
    """Only the state is broken: the second layer's keys and values would be right again."""
    model = HybridToy()
    here = make(model, ahead=ahead)
    qkv = model.qkv[0].data.clone()
    here.add(request("bad", *LONG, max_tokens=30))
    for _ in range(7):
        here.step()
    model.qkv[0].data.fill_(float("nan"))
    assert run(here)["bad"][-1].finish == "error"
    model.qkv[0].data.copy_(qkv)
    assert found(here) == 0
    assert ask(here, *LONG)[0] == 0


# Company


def test_preemption_and_company_change_no_token() -> None:
    here = make(num_blocks=11, max_model_len=44, max_batched_tokens=8, state_snapshots=3)
    for _ in range(3):
        items = [request(str(w), *range(w // 2, 8), w, picture(w, 2, 2), 5, max_tokens=12) for w in range(4)]
        outputs = run(here, *items)
        assert [tokens(outputs[i.request_id]) for i in items] == [oracle(MODEL, i, 12) for i in items]
    assert here.stats.preemptions > 0
    assert here.stats.prefix_hit_tokens > 0


def test_who_waits_for_a_picture_keeps_the_state_that_it_began_with() -> None:
    """Its snapshot may be taken for another one before its first chunk runs."""
    here = make(state_snapshots=1, max_num_seqs=3)
    ask(here, *LONG, max_tokens=1)
    here.add(request("decodes", 1, 2, max_tokens=40))
    said = here.step()
    here._encoder.slice = 1  # as little as can be at a time
    parts = (*LONG[:16], picture(1, 16, 16), 3)
    here.add(request("waits", *parts, max_tokens=4))
    said += here.step()
    (sequence,) = here._requests["waits"]
    assert (sequence.slot is not None, sequence.computed) == (True, 16)
    here._scheduler.snapshots.forget(sequence.keys)
    states(here).recurrent[:, states(here).slots + 1 :] = 1e9  # whatever others leave there
    for late in run(here).values():
        said += late
    assert tokens([o for o in said if o.request_id == "waits"]) == oracle(MODEL, request("r", *parts), 4)


def test_memory_pressure_takes_snapshots_and_brings_them_back() -> None:
    config = EngineConfig(
        num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=8, max_batched_tokens=16,
        state_snapshots=6,
    )  # fmt: skip
    card = Card()
    here = Engine(MODEL, config, card.watch())
    here._reclaimer._monitor._block_bytes = BLOCK  # type: ignore[union-attr]
    card.engine = here

    def turn(*parts: int) -> tuple[int, list[int]]:
        before = here.stats.prefix_hit_tokens
        item = request("r", *parts, max_tokens=12)
        here.add(item)
        got = tokens(steps(here, card))
        assert got == right(item, 12)
        return here.stats.prefix_hit_tokens - before, got

    _, answer = turn(*LONG)
    assert turn(*LONG, *answer, 7)[0] == 28
    card.neighbour = 3000 * MIB
    card.pass_time()
    here.poll_memory()
    assert (states(here).slots, states(here).rows, found(here)) == (1, 2, 0), "they were given back"
    for _ in range(2):
        assert turn(1, 2, 3)[0] == 0
    card.neighbour = 0
    for _ in range(12):
        card.pass_time()
        here.poll_memory()
    assert (states(here).slots, states(here).rows) == (8, 8 + 1 + 6)
    assert turn(*LONG, *answer, 7)[0] == 0
    assert turn(*LONG, *answer, 7)[0] == 28


@pytest.mark.sample("stopping")
def test_the_second_turn_of_a_long_conversation_computes_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of 16,384 tokens and four pictures of a megapixel, in blocks a quarter as large."""
    monkeypatch.setattr(snapshots, "SPACING", 16)
    sizes = {"num_blocks": 1200, "max_model_len": 2048, "max_batched_tokens": 200}
    texts = [tuple((7 * i + turn) % 40 for i in range(300)) for turn in range(4)]
    first = [p for seed, text in enumerate(texts) for p in (picture(seed, 20, 20), *text, STOP)]

    def answer(here: Engine, *parts: int | VisionItem) -> tuple[int, list[TokenOutput]]:
        before = here.stats.prompt_tokens
        outputs = run(here, request("r", *parts, max_tokens=24, stops=[STOP]))["r"]
        return here.stats.prompt_tokens - before, outputs

    here, cold = make(**sizes), make(**sizes, prefix_cache=False)
    _, said = answer(here, *first, 1, 2, 3)
    for thoughts in ((1, 2, 3), ()):  # kept in the second turn, or not
        second = (*first, *thoughts, *tokens(said), STOP, *range(20), STOP, 1, 2, 3)
        length = len(request("r", *second).prompt_ids)
        assert length > 1600
        warm_tokens, warm = answer(here, *second)
        cold_tokens, right = answer(cold, *second)
        assert cold_tokens >= length
        assert warm_tokens <= cold_tokens / 10
        assert tokens(warm) == tokens(right)
        here = make(**sizes)
        answer(here, *first, 1, 2, 3)
