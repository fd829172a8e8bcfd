"""Guesses in answers that a grammar makes: cut where it refuses, and no answer differs."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from snugvl.core.messages import Grammar
from snugvl.engine import speculation
from snugvl.engine.drafts import Drafts, NgramIndex
from snugvl.engine.request import EngineRequest
from snugvl.engine.sampling.masks import Mask, MaskPace, MaskThreads
from snugvl.engine.speculation import MASKS_S, MOST
from tests.engine.eager import engine_with, finish, request
from tests.engine.test_forced import Wide, ask, compiler, schema
from tests.engine.test_grammar import END, Rule, phrases, turns
from tests.engine.test_speculation import SIZES, Sure
from tests.engine.toy import VOCAB, HybridToy, Toy
from tests.masks import tokens_of
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, no mask is late, and there is time for those of guesses."""
    monkeypatch.setattr("snugvl.engine.sampling.masks.WAIT_S", PATIENCE_S)
    monkeypatch.setattr("snugvl.engine.sampling.masks.FORCING_S", PATIENCE_S)
    monkeypatch.setattr(speculation, "MASKS_S", PATIENCE_S)


class Knowing:
    """Guesses what a sequence of the same prompt said before; wrong at every `wrong`th place."""

    wrong = 1 << 30
    lines: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, prompt: NgramIndex, generated: list[int]) -> None:
        self.line, self.generated = self.lines[tuple(prompt.tokens)], generated

    def propose(self, most: int) -> list[int]:
        start = len(self.generated)
        places = range(start, min(start + most, len(self.line)))
        return [self.line[p] + (p % self.wrong == self.wrong - 1) for p in places]


SIZE = {"num_blocks": 2000, "max_num_seqs": 25, "max_model_len": 256, "max_batched_tokens": 64}


def schemas(part: int) -> list[EngineRequest]:
    """Greedy and drawn ones, each with a prompt of its own."""
    draw = random.Random(100 + part)
    sources = [json.dumps(schema(draw)) for _ in range(15)]
    rules = [compiler().compile(Grammar("json_schema", source)) for source in sources]
    asked = [ask(str(index), rule, temperature=float(index % 2)) for index, rule in enumerate(rules)]
    return [replace(each, prompt_ids=(*each.prompt_ids, index)) for index, each in enumerate(asked)]


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("wrong", [1 << 30, 4])
@pytest.mark.sample("1073741824-0", "4-0")
def test_schemas_give_the_tokens_of_steps_without_guesses(
    part: int, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pocket's real tokenizer: alone and in company, with forced tokens skipped and not."""
    asked = schemas(part)
    plain, _ = engine_with(False, Wide(), skip_forced=False, **SIZE)
    for each in asked:
        plain.add(each)
    right = finish(plain)
    lines = {each.prompt_ids: right[each.request_id, 0][:-1] for each in asked}
    monkeypatch.setattr(Knowing, "lines", lines)
    monkeypatch.setattr(Knowing, "wrong", wrong)
    monkeypatch.setattr(speculation, "NgramProposer", Knowing)
    for graphs, skip in ((False, False), (False, True), (True, True)):
        engine, _ = engine_with(
            graphs, Wide(), skip_forced=skip, speculation="ngram", **SIZE | {"max_num_seqs": 64}
        )
        for each in asked:
            engine.add(each)
        assert finish(engine) == right
        assert engine.stats.faults == 0
        assert engine.stats.accepted_tokens > 40
        assert (engine.stats.accepted_tokens == engine.stats.drafted_tokens) == (wrong > 40)
        assert engine.steps < 0.7 * plain.steps
    for each in asked[:3]:
        alone, _ = engine_with(False, Wide(), speculation="ngram", **SIZE)
        alone.add(each)
        assert finish(alone) == {(each.request_id, 0): right[each.request_id, 0]}


def test_n_grams_guess_in_typed_answers() -> None:
    """Of an array whose items are alike, by nothing but looking up."""
    item = {"type": "object", "properties": {"kind": {"enum": ["red circle"]}, "sure": {"type": "boolean"}},
            "required": ["kind", "sure"], "additionalProperties": False}  # fmt: skip
    source = json.dumps({"type": "array", "items": item, "minItems": 9, "maxItems": 9})
    rule = compiler().compile(Grammar("json_schema", source))
    found = []
    for mode in ("off", "ngram"):
        engine, _ = engine_with(False, Wide(), skip_forced=False, speculation=mode, **SIZE)
        engine.add(ask("7", rule, 0.0))
        found.append((finish(engine), engine.steps))
    assert found[0][0] == found[1][0]
    assert found[1][1] < 0.9 * found[0][1]


@pytest.mark.parametrize("kind", [Toy, HybridToy])
@pytest.mark.parametrize("rule", [turns, phrases])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.sample("None-turns-Toy", "None-phrases-Toy", "2-turns-HybridToy")
def test_all_kinds_of_masks(
    kind: type[Toy], rule: object, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where forced tokens are computed one by one, they are known before the guesses behind them."""
    item = replace(
        request("a", [1, 3], max_tokens=40, stop_ids=[END], logprobs=logprobs, temperature=0.8, seed=1),
        grammar=Rule(rule),  # type: ignore[arg-type]
    )
    plain, _ = engine_with(False, kind(), **SIZES)
    plain.add(item)
    right = finish(plain)
    monkeypatch.setattr(Knowing, "lines", {(1, 3): right["a", 0][:-1]})
    monkeypatch.setattr(speculation, "NgramProposer", Knowing)
    for wrong in (1 << 30, 3, 1):
        monkeypatch.setattr(Knowing, "wrong", wrong)
        for graphs in (False, True):
            engine, _ = engine_with(graphs, kind(), speculation="ngram", **SIZES)
            engine.add(item)
            assert finish(engine) == right
            assert wrong == 1 or engine.stats.accepted_tokens > 0


def mask(rule: object = turns, pace: MaskPace | None = None) -> Mask:
    return Mask(Rule(rule).start(), MaskThreads(1, VOCAB), pace or MaskPace(), {END})  # type: ignore[arg-type]


def after(tokens: Sequence[int], rule: object = turns) -> list[int]:
    """What a mask says that was told one token after the other."""
    fresh = mask(rule)
    for token in tokens:
        fresh.wait()
        fresh.accept(token)
    fresh.wait()
    return tokens_of(fresh)


def test_masks_behind_guesses_are_those_of_one_by_one() -> None:
    made = mask()
    assert made.takes([1, 2, 3, 4]) == 4
    assert made.takes([1, 2, 4, 3]) == 2
    assert made.takes([2]) == 0
    rows = made.foresee([1, 2, 3])
    assert [tokens_of(row) for row in rows] == [after([1]), after([1, 2]), after([1, 2, 3])]
    assert tokens_of(made) == after([]), "nothing was taken"


@pytest.mark.parametrize("chosen", [[1, 2, 3, 4], [1, 2, 5, 4], [3, 4, 5], [1], []])
def test_whatever_is_chosen_the_next_mask_is_right(chosen: list[int]) -> None:
    """Also after guesses that nobody looked at, because their step failed."""
    made = mask()
    made.foresee([1, 2, 3])
    for token in chosen:
        made.wait()
        made.accept(token)
    made.wait()
    assert tokens_of(made) == after(chosen)
    assert [tokens_of(row) for row in made.foresee([])] == []
    following = [(chosen[-1] if chosen else 0) % 2 + 7, (chosen[-1] if chosen else 0) % 2 + 8]
    if made.takes(following) == 2:
        assert [tokens_of(row) for row in made.foresee(following)] == [
            after([*chosen, following[0]]),
            after([*chosen, *following]),
        ]


def test_right_guesses_make_no_mask_twice() -> None:
    made = mask()
    made.foresee([1, 2, 3])
    seen = made.state.owner.log  # type: ignore[attr-defined]
    fills = []
    original = made.state.fill
    made.state.fill = lambda bits: fills.append(original(bits))  # type: ignore[method-assign]
    for token in (1, 2, 3):
        made.accept(token)
        assert made.ready
    assert fills == []
    assert seen == [[1, 2, 3]]
    made.accept(4)
    made.wait()
    assert len(fills) == 1


def test_forced_tokens_come_before_guesses() -> None:
    """Two free tokens, and as many forced ones as their sum says."""
    made = mask(phrases)
    for token in (1, 3):
        made.accept(token)
        made.wait()
    forced = list(made.forced)
    assert len(forced) == 4
    assert made.takes([*forced, 2, 2]) == 6
    assert made.takes([*forced[:2], 41]) == 2
    drafts = [*forced, 2, 2]
    rows = made.foresee(drafts)
    assert [tokens_of(row) for row in rows] == [after([1, 3, *drafts[: n + 1]], phrases) for n in range(6)]
    assert [tokens_of(row) for row in made.foresee(drafts[:2])] == [[forced[1]], [forced[2]]]
    for token in drafts:
        made.wait()
        made.accept(token)
    made.wait()
    assert tokens_of(made) == after([1, 3, *drafts], phrases)


def test_who_guesses_what_the_grammar_refuses_rests_and_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sure, "propose", lambda self, most: [END + 41] * most)
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    engine, _ = engine_with(False, Toy(), speculation="ngram", **SIZES)
    item = replace(request("a", [1, 3], max_tokens=30), grammar=Rule(lambda seen: {1, 2, 3}))
    engine.add(item)
    rests = []
    while engine.has_work:
        engine.step()
        rests += [each.drafts.rest for each in engine._scheduler.running if each.drafts]
    assert max(rests) > 10
    assert engine.stats.drafted_tokens == 0


@pytest.mark.parametrize(("seconds", "most"), [(0.0, MOST), (MASKS_S / 4, 4), (2 * MASKS_S, 0)])
def test_slow_masks_leave_no_time_for_guesses(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all choices of a step together."""
    monkeypatch.setattr(speculation, "MASKS_S", MASKS_S)
    monkeypatch.setattr(speculation, "NgramProposer", Sure)

    class Fixed(MaskPace):
        def note(self, seconds: float) -> None:
            pass

    engine, _ = engine_with(False, Toy(), speculation="ngram", **SIZES | {"max_num_seqs": 64})
    for name in "ab":
        engine.add(replace(request(name, [1, 3], max_tokens=40), grammar=Rule(lambda seen: {7, 8})))
    engine.step()
    for each in engine._scheduler.running:
        assert each.grammar is not None
        each.grammar.wait()
        each.grammar.pace = Fixed(seconds)
        each.drafts = Drafts(Sure(), width=MOST)
    step = engine._scheduler.schedule()
    found = engine._speculation._drafts(step.chunks, 60)
    assert sum(map(len, found.values())) == (2 * MOST if seconds == 0.0 else most)
    assert engine._speculation.waits(engine._scheduler.running) == (most > 0)


def test_a_grammar_that_breaks_behind_a_guess_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it is chosen: as without guesses."""
    rule = Rule(lambda seen: {7, 8}, breaks_after=5)
    item = replace(request("a", [1, 3], max_tokens=20), grammar=rule)
    lines = []
    for mode in ("off", "ngram"):
        monkeypatch.setattr(speculation, "NgramProposer", Sure)
        engine, _ = engine_with(False, Toy(), speculation=mode, **SIZES)
        engine.add(item)
        lines.append(finish(engine)["a", 0])
    assert lines[0] == lines[1]
    assert lines[0][-1] == "error"
    assert len(lines[0]) == 6
