"""What a step holds."""

from typing import Any

import pytest

from snugvl.engine import memory
from snugvl.engine.scheduler import Schedule
from tests.engine.toy import Toy, engine, picture, request, run, tokens

MODEL = Toy()


def plan(step: Schedule) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request.request_id, chunk.start, chunk.end) for chunk in step.chunks]


def test_decodes_first_then_chunks_then_new_prompts() -> None:
    here = engine(MODEL, max_batched_tokens=10)
    steps: list[list[tuple[str, int, int]]] = []
    schedule = here._scheduler.schedule

    def spy(*given: Any) -> Schedule:
        step = schedule(*given)
        steps.append(plan(step))
        assert step.tokens <= 10
        return step

    here._scheduler.schedule = spy  # type: ignore[method-assign]
    run(
        here,
        request("a", *range(4), max_tokens=5),
        request("b", *range(15), max_tokens=1),
        request("c", 1, 2, 3, max_tokens=1),
    )
    assert steps == [
        [("a", 0, 4), ("b", 0, 6)],
        [("a", 4, 5), ("b", 6, 15)],
        [("a", 5, 6), ("c", 0, 3)],
        [("a", 6, 7)],
        [("a", 7, 8)],
    ]


def test_slots_and_blocks_limit_admission() -> None:
    here = engine(MODEL, max_num_seqs=3)
    for name in "abcd":
        here.add(request(name, 1, 2))
    here.step()
    assert (here.stats.running, here.stats.waiting) == (3, 1)
    here = engine(MODEL, num_blocks=9, max_model_len=32)
    for name in "abcd":
        here.add(request(name, *range(9)))
    here.step()
    # Two prompts of three blocks; of the other three, two are theirs to grow.
    assert (here.stats.running, here.stats.waiting) == (2, 2)


def test_a_request_with_choices_begins_with_the_slots_that_there_are() -> None:
    here = engine(MODEL, max_num_seqs=4)
    here.add(request("a", 1, 2))
    here.add(request("b", 1, 2, n=4))
    here.add(request("c", 1, 2))
    here.step()
    names = sorted(sequence.request.request_id for sequence in here._scheduler.running)
    assert names == ["a", "b", "b", "c"], "b doesn't wait for all of its slots, nor c behind it"
    run(here)


def test_the_youngest_loses_its_blocks() -> None:
    here = engine(MODEL, num_blocks=6, max_model_len=24, max_batched_tokens=16)
    for first, name in enumerate("ab"):
        here.add(request(name, first, 2, 3, 4, max_tokens=20))
    while not here.stats.preemptions:
        here.step()
    assert [s.request.request_id for s in here._scheduler.running] == ["a"]
    assert [s.request.request_id for s in here._scheduler.waiting] == ["b"]
    victim = here._scheduler.waiting[0]
    assert (victim.table, victim.computed) == ([], 0)
    assert len(victim.generated) > 4, "its tokens stay"


def test_images_are_encoded_once_a_step_and_forgotten_when_passed() -> None:
    model = Toy()
    here = engine(model, max_batched_tokens=64)
    run(here, request("a", 1, picture(1), n=3, temperature=1.0), request("b", 2, picture(1), picture(2)))
    assert len(model.encoded) == 2, "two pictures, shared by two requests and three choices"
    model = Toy()
    here = engine(model, max_batched_tokens=5, max_num_seqs=1)
    run(here, request("a", 1, picture(1, 8, 8), 2))
    assert len(model.encoded) == 1, "an image over many chunks"


def test_a_stream_gets_a_token_in_every_step_while_prompts_come_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "PREFILL_BESIDE_DECODES", 3)
    model = Toy()
    here = engine(model)
    here.add(request("stream", 1, 2, max_tokens=20))
    here.step()
    late = [
        request("text", *range(1, 11), max_tokens=2),
        request("image", 5, picture(1, 8, 8), 6, max_tokens=2),
    ]
    for item in late:
        here.add(item)
    seen: dict[str, list[int]] = {"stream": [], "text": [], "image": []}
    while here.stats.running + here.stats.waiting > 1:
        before, computed = len(seen["stream"]), here.stats.prompt_tokens
        for output in here.step():
            seen[output.request_id].append(output.token_id or 0)
        assert len(seen["stream"]) == before + 1
        assert here.stats.prompt_tokens - computed <= 3 + 2, "decodes, and three tokens of prompts"
    for item in late:
        assert seen[item.request_id] == tokens(run(engine(MODEL), item)[item.request_id])


def test_alone_a_prompt_comes_in_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PREFILL_BESIDE_DECODES", 3)
    here = engine(MODEL)
    here.add(request("a", *range(1, 41), max_tokens=2))
    here.step()
    assert here.stats.prompt_tokens == 40
