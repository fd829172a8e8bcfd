"""The prefix cache: what is found, what isn't, and that nobody can tell from the tokens."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.config import EngineConfig
from snugvl.engine.admission import check_prompt
from snugvl.engine.engine import Engine
from snugvl.engine.request import CheckedPrompt, EngineRequest, VisionItem, VisionSlice
from snugvl.engine.sequence import ROOT, block_key
from snugvl.errors import RequestTooLarge
from tests.draws import draws
from tests.engine.toy import BOMB, CONFIG, Toy, engine, oracle, picture, request, run, tokens

MODEL = Toy()
LONG = tuple(range(1, 19))  # 18 tokens: four full blocks of 4, and two tokens


def ask(here: Engine, item: EngineRequest) -> tuple[int, list[int]]:
    """Run a request that counts: tokens found in the cache, and tokens generated, which must be right."""
    before = here.stats
    got = tokens(run(here, item)["r"])
    after = here.stats
    assert got == oracle(MODEL, item, len(got))
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    computed = after.prompt_tokens - before.prompt_tokens
    assert computed == len(item.prompt_ids) - hits + len(got) - 1, "what is found is not computed"
    assert after.prefix_query_tokens - before.prefix_query_tokens == len(item.prompt_ids)
    return hits, got


def generated(here: Engine, *parts: int | VisionItem, **sampling: object) -> list[int]:
    return tokens(run(here, request("first", *parts, **sampling))["first"])


# Keys


def key(ids: tuple[int, ...] = (1, 2, 3, 4), parent: bytes = ROOT, *vision: VisionSlice) -> bytes:
    return block_key(parent, ids, vision)


def test_a_key_depends_on_everything_and_on_nothing_else() -> None:
    item = picture(1)
    part = VisionSlice(item, 2, 4)
    keys = [
        key(),
        key((1, 2, 4, 3)),
        key(parent=key()),
        key((1, 2, 3, 4), ROOT, part),
        key((1, 2, 3, 4), ROOT, VisionSlice(item, 1, 4)),
        key((1, 2, 3, 4), ROOT, VisionSlice(replace(item, digest=b"other"), 2, 4)),
        key((1, 2, 3, 4), ROOT, VisionSlice(replace(item, grid_thw=(1, 6, 4)), 2, 4)),
        key((1, 2, 3, 4), ROOT, part, part),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(k) for k in keys} == {len(ROOT)}
    assert key((1, 2, 3, 4), ROOT, part) == key((1, 2, 3, 4), ROOT, VisionSlice(picture(1), 2, 4))


PARTS = st.lists(
    st.sampled_from([1, 2, picture(1, 2, 2), picture(1, 2, 4), picture(1, 4, 2), picture(2, 2, 4)]),
    min_size=4,
)


def keys_of(prompt: CheckedPrompt, size: int) -> list[bytes]:
    found: list[bytes] = []
    for end in range(size, len(prompt) + 1, size):
        vision = prompt.vision_in(end - size, end)
        found.append(block_key(found[-1] if found else ROOT, prompt.ids[end - size : end], vision))
    return found


@given(first=PARTS, second=PARTS, size=st.integers(1, 4))
def test_equal_keys_mean_equal_beginnings(
    first: list[int | VisionItem], second: list[int | VisionItem], size: int
) -> None:
    """Positions are in no key: they have to follow from what is."""
    one, two = (check_prompt(request("a", *parts), CONFIG) for parts in (first, second))
    same = [a == b for a, b in zip(keys_of(one, size), keys_of(two, size), strict=False)]
    assert same == sorted(same, reverse=True), "nothing is equal behind a difference"
    end = size * sum(same)
    assert one.ids[:end] == two.ids[:end]
    assert torch.equal(one.positions[:, :end], two.positions[:, :end])
    slices = [[(s.item.digest, s.start, s.end) for s in p.vision_in(0, end)] for p in (one, two)]
    assert slices[0] == slices[1]


# What is found


def test_the_same_prompt_again_computes_what_is_behind_its_full_blocks() -> None:
    here = engine(MODEL)
    assert ask(here, request("r", *LONG))[0] == 0
    assert ask(here, request("r", *LONG))[0] == 16
    assert ask(here, request("r", *LONG[:11], 40, 41))[0] == 8
    assert ask(here, request("r", 40, *LONG))[0] == 0, "blocks are found at their place only"


def test_the_last_token_is_always_computed() -> None:
    here = engine(MODEL)
    ask(here, request("r", *LONG[:16]))
    assert ask(here, request("r", *LONG[:16]))[0] == 12
    assert ask(here, request("r", *LONG[:17]))[0] == 16
    assert ask(here, request("r", *LONG[:3]))[0] == 0


def test_off_means_off() -> None:
    here = engine(MODEL, prefix_cache=False)
    for _ in range(2):
        assert tokens(run(here, request("r", *LONG))["r"]) == oracle(MODEL, request("r", *LONG), 8)
    assert (here.stats.prefix_query_tokens, here.stats.prefix_hit_tokens) == (0, 0)
    assert here.stats.prompt_tokens == 2 * (18 + 7)
    assert not any(here._scheduler.pool.key(block) for block in range(64)), "keys cost time"
    assert not EngineConfig(8, prefix_cache=False).prefix_cache


def test_the_answer_is_found_in_the_next_turn() -> None:
    here = engine(MODEL)
    answer = generated(here, 1, 2, 3, max_tokens=12)
    # 3 of the prompt and 11 of the answer are in the cache: the last token was never computed.
    assert ask(here, request("r", 1, 2, 3, *answer, 7, 8))[0] == 12


@pytest.mark.parametrize("finish", ["abort", "stop", "deadline"])
def test_whatever_ended_a_sequence_its_full_blocks_are_found(finish: str) -> None:
    here = engine(MODEL)
    answer = oracle(MODEL, request("first", *LONG), 12)
    stops = [answer[9]] if finish == "stop" else []
    item = request("first", *LONG, max_tokens=30, stops=stops)
    here.add(item)
    for _ in range(10):
        here.step()
    if finish == "abort":
        here.abort("first")
    elif finish == "deadline":
        (live,) = here._requests["first"]
        live.request = replace(item, deadline=0.0)
        here._requests.deadline = 0.0
        here.step()
    assert not here.has_work
    count = 9 if finish != "stop" else answer.index(stops[0])
    whole = [*LONG, *answer[:10]]
    assert ask(here, request("r", *whole, 9))[0] == (18 + count) // 4 * 4


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    here = engine(MODEL)
    here.add(request("a", *LONG, max_tokens=12))
    for _ in range(4):
        here.step()
    (sequence,) = here._scheduler.running
    here._scheduler.preempt(sequence)
    here.check_integrity()
    before = here.stats
    rest = tokens(run(here)["a"])
    assert rest == oracle(MODEL, request("a", *LONG), 12)[4:]
    # 22 tokens are known; 20 of them are found.
    assert here.stats.prompt_tokens - before.prompt_tokens == 2 + 7
    assert here.stats.prefix_query_tokens == 18, "counted when it came, not when it came back"


def test_choices_find_and_leave_blocks_too() -> None:
    here = engine(MODEL)
    item = request("r", *LONG, n=3, temperature=1.5, seed=5, max_tokens=12)
    first = run(here, item)["r"]
    again = run(here, item)["r"]
    assert [tokens(first, c) for c in range(3)] == [tokens(again, c) for c in range(3)]
    assert (here.stats.prefix_query_tokens, here.stats.prefix_hit_tokens) == (36, 16)
    for choice in range(3):
        assert ask(here, request("r", *LONG, *tokens(first, choice), 9))[0] == 28


def test_a_blocks_next_owner_takes_it_from_the_cache() -> None:
    here = engine(MODEL, num_blocks=8, max_model_len=32)
    ask(here, request("r", *LONG, max_tokens=1))
    # Five of eight blocks: the four without a key, and the last of the first's four.
    ask(here, request("r", *range(20, 38), max_tokens=1))
    assert ask(here, request("r", *LONG, max_tokens=1))[0] == 12
    ask(here, request("r", *range(10, 38), max_tokens=4))  # all eight
    assert ask(here, request("r", *LONG, max_tokens=1))[0] == 0


# Pictures


def test_a_second_question_about_a_picture_does_not_encode_it_again() -> None:
    model = Toy()
    here = engine(model)
    item = picture(1, 8, 8)  # 16 tokens
    ask(here, request("r", 5, item, 6, 7, 8))
    assert ask(here, request("r", 5, item, 9, 9))[0] == 16, "1 + 1 before it, 14 of its 16 rows"
    assert model.encoded == [(1, 8, 8)] * 2, "two rows were missing"
    ask(here, request("r", 5, 5, item, 5, 5))
    assert len(model.encoded) == 3
    assert ask(here, request("r", 5, 5, item, 5, 9))[0] == 20
    assert len(model.encoded) == 3, "no row was missing"
    assert here.memory()["encoder_outputs"] == 0


def test_pictures_are_told_apart_by_their_contents() -> None:
    here = engine(MODEL)
    one, other, turned = picture(1, 4, 8), picture(2, 4, 8), picture(1, 8, 4)
    answers = {tuple(ask(here, request("r", 1, 2, 3, one, 4))[1])}
    hits, answer = ask(here, request("r", 1, 2, 3, other, 4))
    assert hits == 4, "what stands before the picture, its start marker included"
    answers.add(tuple(answer))
    hits, answer = ask(here, request("r", 1, 2, 3, turned, 4))
    assert hits == 4
    answers.add(tuple(answer))
    assert len(answers) == 3
    assert ask(here, request("r", 1, 2, 3, one, 4))[0] == 12
    assert ask(here, request("r", 1, 2, 3, one, one, 4))[0] == 12
    assert ask(here, request("r", 1, 2, 3, one, other, 4))[0] == 12
    assert ask(here, request("r", 1, 2, 3, one, other, 4))[0] == 20


@pytest.mark.parametrize("cut", range(4, 28))
@pytest.mark.sample("4", "7", "10", "13", "16", "19", "22", "25")
def test_a_hit_may_end_anywhere_in_a_picture(cut: int) -> None:
    """The first run is aborted in the middle of its prefill; chunks are blocks."""
    parts = (9, 8, picture(3, 4, 4), picture(4, 8, 8), 7)
    here = engine(MODEL, max_batched_tokens=1, max_num_seqs=1)
    here.add(request("first", *parts))
    for _ in range(cut):
        here.step()
    here.abort("first")
    assert ask(here, request("r", *parts))[0] == cut // 4 * 4


def test_frames_of_a_video() -> None:
    here = engine(MODEL)
    parts = (1, picture(4, 4, 4, t=3), 11, 12)
    ask(here, request("r", *parts))
    assert ask(here, request("r", *parts, 13))[0] == 20


# Admission


def test_blocks_that_others_hold_need_no_room() -> None:
    here = engine(MODEL, num_blocks=9, max_model_len=36)
    here.add(request("a", *LONG, max_tokens=3))
    here.step()
    assert here.stats.free_blocks == 4
    here.add(request("b", *LONG, max_tokens=3))
    here.add(request("c", *range(20, 38), max_tokens=3))
    outputs = here.step()
    assert (here.stats.running, here.stats.waiting) == (2, 1), "b needs one block, c five"
    assert here.stats.free_blocks == 3
    for late in run(here).values():
        outputs += late
    for name, ids in (("b", LONG), ("c", tuple(range(20, 38)))):
        mine = [output for output in outputs if output.request_id == name]
        assert tokens(mine) == oracle(MODEL, request(name, *ids), 3)


def test_cached_blocks_that_nobody_holds_need_room() -> None:
    here = engine(MODEL, num_blocks=9, max_model_len=36)
    run(here, request("a", *LONG, max_tokens=1))
    here.add(request("other", *range(20, 36), max_tokens=6))
    here.step()
    here.add(request("r", *LONG, max_tokens=2))
    here.step()
    # 18 tokens need five blocks, four of which are cached; four are free, and one is others' to grow.
    assert (here.stats.running, here.stats.waiting, here.stats.free_blocks) == (1, 1, 4)
    assert tokens(run(here)["r"]) == oracle(MODEL, request("r", *LONG), 2)


@cache
def right(length: int, count: int) -> tuple[int, ...]:
    return tuple(oracle(MODEL, request("r", *[i % 40 for i in range(length)]), count))


@draws(40)
@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=6), blocks=st.integers(3, 12))
def test_beginnings_of_one_text_in_few_blocks(lengths: list[int], blocks: int) -> None:
    here = engine(MODEL, num_blocks=blocks, max_model_len=48, max_batched_tokens=8)
    for item in (request("r", *[i % 40 for i in range(length)], max_tokens=4) for length in lengths):
        try:
            here.add(item)
        except RequestTooLarge:
            continue
        assert tokens(run(here)["r"]) == list(right(len(item.prompt_ids), 4))


# Faults


def test_a_fault_forgets_everything() -> None:
    here = engine(MODEL)
    ask(here, request("r", *LONG))
    run(here, request("bomb", *LONG, BOMB))
    assert here.stats.faults == 1
    assert ask(here, request("r", *LONG))[0] == 0
    here.reset()
    assert ask(here, request("r", *LONG))[0] == 0


def test_a_step_that_failed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for those that wait, which a fault leaves in the queue."""
    model = Toy()
    here = engine(model, max_num_seqs=1)
    with monkeypatch.context() as patch:
        forward = model.forward

        def half(*args: object) -> torch.Tensor:
            forward(*args)  # type: ignore[arg-type]
            raise RuntimeError("after the cache was written")

        patch.setattr(model, "forward", half)
        here.add(request("a", *LONG))
        here.add(request("b", *LONG))
        here.step()
    assert tokens(run(here)["b"]) == oracle(MODEL, request("b", *LONG), 8)
    assert here.stats.prefix_hit_tokens == 0


def test_what_made_no_number_is_not_kept() -> None:
    """A glitch of the hardware must not fail all later requests with the same beginning."""
    model = Toy()
    here = engine(model)
    embed = model.embed.data.clone()
    model.embed.data[3] = torch.nan
    assert run(here, request("bad", *LONG))["bad"][-1].finish == "error"
    model.embed.data.copy_(embed)
    assert ask(here, request("r", *LONG))[0] == 0
