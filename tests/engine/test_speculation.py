"""Drafted tokens change no answer: whatever drafts them, and whatever else happens meanwhile."""

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from snugvl.core.config import EngineConfig
from snugvl.engine import snapshots, speculation
from snugvl.engine.drafts import Drafts, NgramIndex
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.decode import Replay
from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.engine.scheduler import Chunk, Schedule
from snugvl.engine.speculation import AGAIN, FEW, FIRST, LOOK, MOST, Payoff, Speculation
from snugvl.errors import RequestError
from tests.engine import test_interleaving
from tests.engine.eager import EagerGraphs, engine_with, finish, request
from tests.engine.test_grammar import END, Rule, phrases
from tests.engine.test_prefill_graphs import recorded
from tests.engine.toy import POISON, HybridToy, Toy, picture, prompt_of

Answers = dict[tuple[str, int], list[object]]


def quoting(name: str, prompt: list[int], **sampling: object) -> EngineRequest:
    return request(name, prompt, **{"max_tokens": 40, **sampling})


def seeing(name: str) -> EngineRequest:
    ids, vision = prompt_of(3, picture(2), 5, 6)
    return replace(quoting(name, list(ids)), vision=vision)


REQUESTS: list[Callable[[], EngineRequest]] = [
    lambda: quoting("greedy", [1, 2, 3, 4, 5]),
    lambda: quoting("drawn", [7, 8], n=2, temperature=1.0, seed=3),
    lambda: seeing("sees"),
    lambda: quoting("filtered", [3, 1], temperature=1.3, seed=5, top_p=0.9, top_k=9, min_p=0.01),
    lambda: quoting("told", [5, 5, 6], logprobs=2, max_tokens=20, temperature=0.6, seed=4),
    lambda: quoting("punished", [2, 2], repetition_penalty=1.3, frequency_penalty=0.5),
    lambda: quoting("varied", [2, 9], presence_penalty=0.7, temperature=0.8, seed=9, logit_bias={5: 3.0}),
    lambda: quoting("new", [4, 2, 4], no_repeat_ngram_size=3),
    lambda: quoting("scored", [4, 2, 4, 4], logprobs=1, prompt_logprobs=True, max_tokens=9),
    lambda: quoting("short", [6, 1], max_tokens=2),
    lambda: quoting("one", [6, 2], max_tokens=1),
    lambda: quoting("stops", [6, 3], stop_token_ids=(11, 17, 23, 29)),
    lambda: replace(quoting("typed", [1, 3], stop_ids=[END]), grammar=Rule(phrases)),
]
SIZES = {
    "max_num_seqs": 16,
    "num_blocks": 300,
    "max_model_len": 96,
    "max_batched_tokens": 64,
    "state_snapshots": 9,
}


@pytest.fixture(params=[Toy, HybridToy])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Toy]:
    """With keys and values alone, and with a recurrent state, whose snapshots are a block apart."""
    monkeypatch.setattr(snapshots, "SPACING", 1)
    monkeypatch.setattr(Prophet, "kind", request.param)
    made: type[Toy] = request.param
    return made


def outputs_of(
    asked: list[EngineRequest],
    kind: type[Toy] = Toy,
    *,
    graphs: bool = False,
    late: int = 0,
    **config: object,
) -> tuple[list[TokenOutput], "test_interleaving.engine"]:
    """What comes of requests, `late` steps apart."""
    engine, _ = engine_with(graphs, kind(), **{**SIZES, **config})
    outputs: list[TokenOutput] = []
    for each in asked:
        engine.add(each)
        for _ in range(late):
            outputs += engine.step()
            engine.check_integrity()
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    return outputs, engine


def sorted_out(outputs: list[TokenOutput]) -> dict[tuple[str, int], list[object]]:
    """By choice all that is told, but for what was guessed."""
    found: dict[tuple[str, int], list[object]] = {}
    for each in outputs:
        numbers = [
            each.logprob,
            *(value for _, value in each.top_logprobs),
            *(p.logprob for p in each.prompt),
        ]
        ids = [*(token for token, _ in each.top_logprobs), *(p.token_id for p in each.prompt)]
        rounded = [None if number is None else round(number, 4) for number in numbers]
        told_all = (each.token_id, each.finish, str(each.error), ids, rounded)
        found.setdefault((each.request_id, each.choice), []).append(told_all)
    return found


@cache
def right(kind: type[Toy] = Toy) -> dict[tuple[str, int], list[object]]:
    return sorted_out(outputs_of([make() for make in REQUESTS], kind)[0])


class Prophet:
    """Knows what comes, and is wrong at every `wrong`th place of the answer."""

    wrong = 1 << 30
    kind: type[Toy] = Toy
    answers: dict[tuple[int, ...], list[list[int]]] | None = None

    def __init__(self, prompt: NgramIndex, generated: list[int]) -> None:
        self.prompt, self.generated = tuple(prompt.tokens), generated

    def propose(self, most: int) -> list[int]:
        start = len(self.generated)
        for line in (self.answers or known(self.kind))[self.prompt]:
            if line[:start] == self.generated:
                guessed = line[start : start + most]
                places = range(start, start + len(guessed))
                return [
                    (t + 1) % 40 if p % self.wrong == 2 else t for p, t in zip(places, guessed, strict=True)
                ]
        raise AssertionError("it said what it never says")


@cache
def known(kind: type[Toy] = Toy) -> dict[tuple[int, ...], list[list[int]]]:
    """Answers by prompt."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    ids = {each.request_id: each.prompt_ids for each in (make() for make in REQUESTS)}
    for (name, _), line in right(kind).items():
        found.setdefault(ids[name], []).append([said[0] for said in line])  # type: ignore[index]
    return found


@pytest.fixture(params=["ngrams", "prophet", "half right", "all wrong"])
def guesses(kind: type[Toy], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    known(kind)
    wrong = {"prophet": 1 << 30, "half right": 3, "all wrong": 1}
    if request.param in wrong:
        monkeypatch.setattr(Prophet, "wrong", wrong[request.param])
        if request.param == "all wrong":
            monkeypatch.setattr(
                Prophet,
                "propose",
                lambda self, most, ask=Prophet.propose: [(t + 1) % 40 for t in ask(self, most)],
            )
        monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    return str(request.param)


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.sample(
    "Toy-prophet-False-0", "HybridToy-half right-True-3", "Toy-all wrong-True-0", "Toy-ngrams-False-3"
)
def test_all_answers_are_those_without(kind: type[Toy], guesses: str, graphs: bool, late: int) -> None:
    asked = [make() for make in REQUESTS]
    outputs, engine = outputs_of(asked, kind, graphs=graphs, late=late, speculation="ngram")
    assert sorted_out(outputs) == right(kind)
    stats = engine.stats
    assert stats.faults == 0
    assert stats.drafted_tokens == sum(each.accepted + each.rejected for each in outputs)
    assert stats.accepted_tokens == sum(each.accepted for each in outputs)
    assert stats.drafted_tokens > 0
    if guesses != "ngrams":  # random weights seldom quote
        assert (stats.accepted_tokens > 40) == (guesses != "all wrong")
        assert (stats.accepted_tokens > 0.9 * stats.drafted_tokens) == (guesses == "prophet")
    assert stats.generated_tokens == sum(each.token_id is not None for each in outputs)


@pytest.mark.usefixtures("guesses")
@pytest.mark.sample("ngrams-Toy", "prophet-Toy", "half right-HybridToy")
def test_few_blocks_preempt_and_change_no_token(kind: type[Toy]) -> None:
    sizes = {"num_blocks": 30, "max_num_seqs": 5, "max_batched_tokens": 9, "max_model_len": 64}
    outputs, engine = outputs_of([make() for make in REQUESTS], kind, late=1, speculation="ngram", **sizes)
    assert sorted_out(outputs) == right(kind)
    assert engine.stats.preemptions > 0
    assert engine.stats.free_blocks == 30


@pytest.mark.parametrize("which", range(len(REQUESTS) - 2))
@pytest.mark.sample(
    "Toy-9", "HybridToy-10", "Toy-8", "Toy-0", "Toy-5", "Toy-6", "Toy-7", "Toy-2", "Toy-4", "Toy-1", "Toy-3"
)
def test_alone_one_that_knows_takes_an_eighth_of_the_steps(
    which: int, kind: type[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    known(kind)
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    asked = REQUESTS[which]()
    outputs, engine = outputs_of([asked], kind, speculation="ngram")
    assert sorted_out(outputs) == {
        key: line for key, line in right(kind).items() if key[0] == asked.request_id
    }
    longest = max(map(len, sorted_out(outputs).values()))
    streams = asked.sampling.n
    # The prompt's step, two that get wider, then eight tokens each; a prompt pauses for a snapshot.
    assert engine.steps <= streams * (3 + -(-longest // (MOST + 1))) + (kind is HybridToy)


def test_a_step_ahead_of_the_host_waits_for_tokens_that_were_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is guessed, steps run ahead as ever."""
    known()
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    ask = Prophet.propose
    monkeypatch.setattr(
        Prophet, "propose", lambda self, most: ask(self, most) if len(self.generated) > 9 else []
    )
    outputs, engine = outputs_of([REQUESTS[0]()], graphs=True, speculation="ngram")
    assert sorted_out(outputs) == {("greedy", 0): right()["greedy", 0]}
    assert engine.steps < 20, "it has run ahead for nine tokens, and then no more"
    monkeypatch.setattr(Prophet, "propose", lambda self, most: [])
    engine, eager = engine_with(True, Toy(), speculation="ngram", **SIZES)
    engine.add(REQUESTS[0]())
    finish(engine)
    assert eager is not None
    assert eager.followed > 30


def test_drafts_are_run_by_graphs_of_chunks_too(kind: type[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here the same shapes, on the buffers that a graph would read."""
    known(kind)
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    engine, _ = engine_with(True, kind(), speculation="ngram", **SIZES)
    pool = recorded(engine)
    for make in REQUESTS:
        engine.add(make())
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    assert sorted_out(outputs) == right(kind)
    assert pool.replays > 3
    assert engine.stats.accepted_tokens > 30


class Sure:
    """Always guesses the same token: that it is chosen has nothing to do with that."""

    def __init__(self, *_: object) -> None:
        pass

    def propose(self, most: int) -> list[int]:
        return [7] * most


@pytest.mark.sample("HybridToy")
def test_a_seed_draws_the_same(kind: type[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the distribution is that without guesses: each place has its own random number."""
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    drawn = {"temperature": 1.1, "max_tokens": 12, "logit_bias": {7: 3.0}}
    answers: dict[str, list[list[object]]] = {}
    for mode in ("off", "ngram"):
        asked = [quoting(str(seed), [1, 2, 1], seed=seed, **drawn) for seed in range(60)]
        outputs, engine = outputs_of(asked, kind, speculation=mode, late=2)
        answers[mode] = [line for _, line in sorted(finish_lines(outputs).items())]
    assert 30 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    assert answers["off"] == answers["ngram"]
    assert len({tuple(line) for line in answers["off"]}) > 50


def finish_lines(outputs: list[TokenOutput]) -> Answers:
    found: Answers = {}
    for each in outputs:
        found.setdefault((each.request_id, each.choice), []).append(each.token_id)
    return found


def test_what_is_drawn_without_a_seed_has_the_networks_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess of 7 makes 7 no likelier, after a 7 that was guessed neither."""
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    shares = {}
    for mode in ("off", "ngram"):
        drawn = {"n": 6, "temperature": 1.4, "max_tokens": 3, "logit_bias": {7: 5.0}}
        asked = [quoting(str(i), [3, 1], **drawn) for i in range(50)]
        outputs, engine = outputs_of(asked, speculation=mode, late=3)
        lines = list(finish_lines(outputs).values())
        shares[mode] = [sum(line[place] == 7 for line in lines) / len(lines) for place in range(3)]
    assert engine.stats.accepted_tokens > 15
    for place in range(3):  # 300 draws: a share's deviation is below 0.03
        assert abs(shares["off"][place] - shares["ngram"][place]) < 0.2


@pytest.mark.usefixtures("guesses")
@pytest.mark.sample("ngrams-Toy", "prophet-Toy", "half right-HybridToy")
def test_aborts_free_everything(kind: type[Toy]) -> None:
    engine, _ = engine_with(False, kind(), speculation="ngram", **SIZES)
    outputs: list[TokenOutput] = []
    for make in REQUESTS:
        engine.add(make())
    for step in range(8):
        outputs += engine.step()
        outputs += engine.abort(("greedy", "drawn", "sees", "told")[step % 4], 0 if step < 4 else None)
        engine.check_integrity()
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    for key, line in sorted_out(outputs).items():
        said = [told for told in line if told[1] != "abort"]  # type: ignore[index]
        assert said == right(kind)[key][: len(said)]
    assert engine.stats.free_blocks == SIZES["num_blocks"]


def test_any_interleaving(kind: type[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests, steps and aborts, with few blocks and slots, when everybody guesses."""
    original = test_interleaving.engine
    stats = []

    def speculating(model: Toy | None = None, **config: int) -> object:
        made = original(model, speculation="ngram", **config)  # type: ignore[arg-type]
        stats.append(made)
        return made

    model, answers = kind(), dict[tuple[int, ...], list[list[int]]]()
    worlds = [
        (
            [("add", (w, 16, s)) for w, s in ((0, {}), (2, {"n": 2}), (3, {"temperature": 0.9, "seed": 2}))],
            14,
            5,
            12,
        ),
        (
            [("add", (6, 16, {})), ("step", 4), ("add", (4, 10, {})), ("step", 3), ("abort", (0, None))],
            12,
            4,
            5,
        ),
        (
            [("add", (w, 16, {"n": 3, "temperature": 1.2, "seed": 1})) for w in (1, 5)] + [("step", 2)],
            13,
            5,
            3,
        ),
    ]
    for world in worlds:  # what comes alone is asked of an engine that guesses nothing
        for _, (which, count, sampling) in (each for each in world[0] if each[0] == "add"):
            said = test_interleaving.alone(model, which, count, tuple(sampling.items()))
            ids, _ = prompt_of(*test_interleaving.PROMPTS[which])
            answers.setdefault(ids, []).extend(said.values())
    monkeypatch.setattr(Prophet, "answers", answers)
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    monkeypatch.setattr(test_interleaving, "engine", speculating)
    monkeypatch.setattr(test_interleaving, "event", lambda _: None)
    for world in worlds:
        test_interleaving.interleave(model, *world)
    assert sum(each.stats.accepted_tokens for each in stats) > 10
    assert sum(each.stats.preemptions for each in stats) > 0


def test_the_next_turn_starts_from_blocks_of_drafts_that_were_right(
    kind: type[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    known(kind)
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    engine, _ = engine_with(False, kind(), speculation="ngram", **SIZES)
    engine.add(REQUESTS[0]())
    line = [token for token in finish(engine)["greedy", 0] if isinstance(token, int)]
    before = engine.stats.prefix_hit_tokens
    prompt = [*REQUESTS[0]().prompt_ids, *line, 9]
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    engine.add(quoting("next", prompt, max_tokens=6))
    said = finish(engine)["next", 0]
    # All of it but the last token, whose keys nobody computed: in whole blocks of 4. A state has not taken
    # in the drafts of the last step either.
    hits = engine.stats.prefix_hit_tokens - before
    assert hits == (len(prompt) - 2) // 4 * 4 or (kind is HybridToy and hits >= len(prompt) - 2 - MOST - 4)
    fresh, _ = engine_with(False, kind(), **SIZES)
    fresh.add(quoting("next", prompt, max_tokens=6))
    assert finish(fresh)["next", 0] == said


def test_a_guess_that_breaks_the_network_ends_nothing(
    kind: type[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN comes to the rows before it, too: the sequence is computed again, and guesses no more."""
    known(kind)
    monkeypatch.setattr(Sure, "propose", lambda self, most: [POISON] * most)
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    outputs, engine = outputs_of([REQUESTS[0](), REQUESTS[3]()], kind, speculation="ngram")
    assert sorted_out(outputs) == {key: right(kind)[key] for key in (("greedy", 0), ("filtered", 0))}
    assert engine.stats.accepted_tokens == 0 < engine.stats.drafted_tokens
    assert engine.stats.preemptions == 2


def test_no_step_has_more_rows_of_logits_than_sequences_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    most: dict[int, int] = {}
    for slots, budget in ((1, 64), (3, 64), (6, 64), (10, 64), (10, 10)):
        engine, _ = engine_with(
            False, Toy(), speculation="ngram", **SIZES | {"max_num_seqs": slots, "max_batched_tokens": budget}
        )
        original, sizes = engine._runner.run, []

        def run(step: Schedule, original=original, sizes=sizes):  # type: ignore[no-untyped-def]
            logits, replay = original(step)
            sizes.append((len(logits), step.tokens, sum(bool(chunk.drafts) for chunk in step.chunks)))
            return logits, replay

        monkeypatch.setattr(engine._runner, "run", run)
        for number in range(5):
            engine.add(quoting(str(number), [number, 3]))
        finish(engine)
        assert max(rows for rows, _, _ in sizes) <= slots
        assert max(tokens for _, tokens, _ in sizes) <= max(budget, 10)
        most[slots] = max(drafting for _, _, drafting in sizes)
    assert most[1] == 0
    assert most[10] == 5, "what room there is, is everybody's"


def extended(tokens: int, *, alone: bool = False, **sampling: object) -> list[Chunk]:
    """A step of one sequence that has 3 tokens of its answer, with the drafts that it gets."""
    engine, _ = engine_with(False, Toy(), speculation="ngram", **SIZES)
    engine.add(quoting("a", [1, 2, 3], **sampling))
    for _ in range(3):
        engine.step()
    (sequence,) = engine._requests["a"]
    sequence.drafts = Drafts(Sure())  # those until now were wrong
    step = replace(engine._scheduler.schedule(), alone=alone)
    engine._speculation._config = replace(engine.config, max_batched_tokens=tokens, max_num_seqs=tokens)
    engine._speculation.extend(step, engine._scheduler.pool)
    return step.chunks


def test_drafts_keep_to_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the step's tokens, and of the answer's: its last token is never computed."""
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    assert [len(chunk.drafts) for chunk in extended(64)] == [4]
    assert [len(chunk.drafts) for chunk in extended(3)] == [2]
    assert [len(chunk.drafts) for chunk in extended(64, alone=True)] == [0]
    assert [len(chunk.drafts) for chunk in extended(64, max_tokens=6)] == [2]
    assert [len(chunk.drafts) for chunk in extended(64, max_tokens=4)] == [0]
    engine, _ = engine_with(False, Toy(), speculation="ngram", **SIZES)
    engine.add(quoting("a", [1, 2, 3]))
    engine.step()
    (sequence,) = engine._requests["a"]
    chunk = Chunk(sequence, 3, 4)
    assert engine._speculation._drafts([chunk], 2) == {0: [7, 7]}, "beside many forced tokens"


def test_a_step_with_a_prompt_has_no_drafts() -> None:
    engine, _ = engine_with(False, Toy(), speculation="ngram", **SIZES)
    seen = []
    original = engine._runner.run

    def run(step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        prompts = [chunk for chunk in step.chunks if chunk.start < len(chunk.sequence.prompt)]
        seen.append((bool(prompts), any(chunk.drafts for chunk in step.chunks)))
        return original(step)

    engine._runner.run = run  # type: ignore[method-assign]
    engine.add(quoting("first", [1, 2] * 6, max_tokens=60))
    for number in range(12):
        engine.step()
        engine.add(quoting(str(number), [number, 3] * 4))
    finish(engine)
    assert (True, False) in seen
    assert (False, True) in seen
    assert (True, True) not in seen


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="speculation 'eagle' is unknown; use auto, off, ngram, mtp"):
        EngineConfig(num_blocks=8, speculation="eagle")  # type: ignore[arg-type]


def decide(payoff: Payoff, steps: int, plain_s: float, drafted_s: float, tokens: int) -> list[bool]:
    made = []
    for _ in range(steps):
        made.append(payoff.try_drafts())
        payoff.note(made[-1], drafted_s if made[-1] else plain_s, tokens if made[-1] else 4, 4)
    return made


def test_auto_takes_what_pays_and_looks_again_now_and_then() -> None:
    for drafted_s, tokens, pays in ((2.0, 12, True), (2.0, 8, False), (1.0, 4, False), (1.0, 5, True)):
        made = decide(Payoff(), 10 * AGAIN, 1.0, drafted_s, tokens)
        measured = FIRST + FEW
        assert made[: 2 * measured].count(True) == measured, "both are measured first"
        later = made[2 * measured :]
        looks = len(later) / (AGAIN + LOOK - 1)
        assert LOOK <= later.count(not pays) <= LOOK * (looks + 1)
        assert not pays or later.count(not pays) >= LOOK * (looks - 1), "those cost less than drafts bring"


def test_auto_looks_again_when_there_is_a_guess() -> None:
    """Also where a step had none when it was time; asking alone changes nothing."""
    payoff = Payoff()
    decide(payoff, 2 * (FIRST + FEW), 1.0, 1.1, 4)
    asked = []
    for _ in range(3 * AGAIN):
        (may,) = {payoff.try_drafts() for _ in range(3)}
        asked.append(may)
        payoff.note(False, 1.0, 4, 4)
    assert asked.index(True) >= AGAIN - 1
    assert all(asked[asked.index(True) :])
    for _ in range(LOOK):
        assert payoff.try_drafts()
        payoff.note(True, 1.1, 4, 4)
    assert not payoff.try_drafts()


def test_a_step_behind_drafts_is_no_measurement() -> None:
    payoff = Payoff()
    assert decide(payoff, 100, 1.0, 2.0, 12)[-1]
    for _ in range(30):
        payoff.note(True, 2.0, 12, 4)
        payoff.note(False, 10.0, 4, 4)
    assert statistics.median(payoff._seconds[False]) == 1.0 / 4


def test_what_is_measured_wrongly_costs_no_more_than_the_budget() -> None:
    """Of the steps with drafts every third takes so long that it is no use that most of them pay."""
    payoff, spent, tokens, drafts = Payoff(), 0.0, 0, 0
    for _ in range(4000):
        drafted = payoff.try_drafts()
        drafts += drafted
        seconds = (7.0 if drafts % 3 == 0 else 1.2) if drafted else 1.0
        payoff.note(drafted, seconds, 1 + drafted, 1)
        spent, tokens = spent + seconds, tokens + 1 + drafted
    assert tokens / spent > 0.97
    assert drafts > 20


def off_and_auto(
    accepted: Callable[[float], float], cost: float, behind: float, seed: int
) -> tuple[float, float]:
    """Seconds for 4,000 tokens of a stream, without drafts and by `auto`, in a world of these costs.

    `accepted`: the chance of each of up to 7 drafts to be right, by the tokens until then. A step takes a
    second without drafts, `cost` with some, and `behind` without them after one that had some. Measured is
    that, give or take, and now and then much more.
    """
    draw, payoff, spent, last, tokens = random.Random(seed), Payoff(), 0.0, False, 0
    while tokens < 4000:
        drafted, brought = payoff.try_drafts(), 1
        while drafted and brought < 8 and draw.random() < accepted(tokens):
            brought += 1
        seconds = cost if drafted else behind if last else 1.0
        noise = draw.lognormvariate(0.0, 0.05) * (4 if draw.random() < 0.003 else 1)
        payoff.note(drafted, seconds * noise, brought, 1)
        spent, last, tokens = spent + seconds, drafted, tokens + brought
    return float(tokens), spent


@pytest.mark.parametrize(("cost", "behind"), [(1.05, 1.0), (1.3, 1.2), (1.8, 2.5), (3.0, 2.0)])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.4, 0.6, 0.9, None])
@pytest.mark.sample(
    "0.9-1.3-1.2", "None-3.0-2.0", "0.0-1.05-1.0", "0.2-1.8-2.5", "0.6-1.8-2.5", "0.4-1.05-1.0"
)
def test_auto_loses_little_whatever_drafts_cost_and_how_often_they_are_right(
    cost: float, behind: float, chance: float | None
) -> None:
    """At most 3 %; None: they are right in a quarter of the text. Where they pay much it takes most of it."""
    for seed in range(5):

        def accepted(tokens: float) -> float:
            return (0.9 if tokens // 400 % 4 == 3 else 0.05) if chance is None else chance

        off, auto = off_and_auto(accepted, cost, behind, seed)
        assert off / auto >= 0.97
        best = sum(0.9**i for i in range(8)) / cost
        assert chance != 0.9 or best < 2 or off / auto > 0.85 * best


def measuring(graphs: bool, model: Toy) -> tuple[Engine, EagerGraphs | None]:
    """An engine that measures, as with a predictor, whether drafts pay, which n-grams make here."""
    engine, eager = engine_with(graphs, model, speculation="ngram", **SIZES)
    engine._speculation._config = replace(engine.config, speculation="auto")
    return engine, eager


def test_where_guesses_lose_nobody_looks_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs the host time, of which a step that runs ahead has little."""
    known()
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    asked: list[int] = []
    ask = Prophet.propose
    monkeypatch.setattr(
        Prophet, "propose", lambda self, most: (asked.append(len(self.generated)), ask(self, most))[1]
    )
    for graphs in (False, True):
        engine, _ = measuring(graphs, Toy())
        monkeypatch.setattr(Speculation, "_pays", lambda self, streams: False)
        engine.add(REQUESTS[0]())
        finish(engine)
        assert asked == []


def test_steps_with_drafts_fit_their_graph_where_small_steps_alone_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launch by launch they would take many times as long."""
    known()
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    most = {}
    for tokens in (0, 6):
        engine, _ = engine_with(False, Toy(), speculation="ngram", **SIZES, step_graph_tokens=tokens)
        seen, original = [], engine._runner.run

        def run(step: Schedule, seen: Any = seen, original: Any = original) -> Any:
            seen.append(step.tokens if any(chunk.drafts for chunk in step.chunks) else 0)
            return original(step)

        monkeypatch.setattr(engine._runner, "run", run)
        engine.add(REQUESTS[0]())
        finish(engine)
        most[tokens] = max(seen)
    assert most[0] > 6 >= most[6] > 1


def test_auto_changes_its_mind_when_answers_change() -> None:
    payoff = Payoff()
    assert decide(payoff, 200, 1.0, 2.0, 12)[-1]
    assert not all(decide(payoff, 60, 1.0, 2.0, 4)), "nothing is right any more"
    assert not any(decide(payoff, AGAIN - 1, 1.0, 2.0, 4)[:10])
    decide(payoff, 30 * AGAIN, 1.0, 2.0, 16)
    assert sum(decide(payoff, AGAIN, 1.0, 2.0, 16)) >= AGAIN - LOOK, "and back"


def test_the_first_steps_of_a_kind_decide_nothing() -> None:
    """Kernels are compiled in them, and graphs captured."""
    payoff, made = Payoff(), []
    for _ in range(200):
        made.append(payoff.try_drafts())
        slow = made[-1] and made.count(True) <= FIRST
        payoff.note(made[-1], 1000.0 if slow else 2.0 if made[-1] else 1.0, 12 if made[-1] else 4, 4)
    later = made[2 * (FIRST + FEW) :]
    assert later.count(True) > 0.95 * len(later)


@pytest.mark.parametrize("kind", [Toy, HybridToy])
@pytest.mark.parametrize("drafted_s", [1.5, 9.0])
@pytest.mark.sample("1.5-Toy", "9.0-HybridToy")
def test_auto_measures_steps_that_run_ahead_too(
    kind: type[Toy], drafted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU plain steps run ahead: what they take is what they add to the tokens before them."""
    known(kind)
    monkeypatch.setattr(Prophet, "kind", kind)
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    engine, eager = measuring(True, kind())
    assert eager is not None
    now, noted = [0.0], []
    engine._speculation._clock = lambda: now[0]
    one, chunks, note = eager._run, engine._runner.run, Payoff.note

    def ahead() -> object:
        now[0] += 1.0
        return one()

    def run(step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        now[0] += drafted_s
        return chunks(step)

    monkeypatch.setattr(eager, "_run", ahead)
    monkeypatch.setattr(engine._runner, "run", run)
    monkeypatch.setattr(
        Payoff, "note", lambda self, *told: (noted.append((*told, eager.followed)), note(self, *told))[1]
    )
    shares = []
    for _ in range(10):
        engine.add(REQUESTS[0]())
        before = engine.stats
        assert {key: line[:-1] for key, line in finish(engine).items()} == {
            ("greedy", 0): [told[0] for told in right(kind)["greedy", 0]]  # type: ignore[index]
        }
        shares.append((engine.stats.drafted_tokens - before.drafted_tokens) / 40)
        now[0] += 1000.0  # nobody asks for anything
    assert max(seconds for _, seconds, _, _, _ in noted) < 12, "neither prompts nor idle times"
    assert {drafted for drafted, *_ in noted} == {True, False}
    assert all(tokens == 1 for drafted, _, tokens, _, _ in noted if not drafted)
    if drafted_s < 2:
        assert min(shares[2:]) > 0.5
    else:
        assert sum(shares[2:]) < 8 * (2 * MOST / AGAIN + 0.1)
        assert eager.followed > 200


def test_a_step_that_waited_in_vain_is_part_of_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had a guess while a token was under way, and none when it was told; those after it run ahead."""
    monkeypatch.setattr(
        Sure, "propose", lambda self, most: [7] if most == 1 and len(self.generated) in (10, 20) else []
    )
    monkeypatch.setattr(Sure, "__init__", lambda self, _, generated: setattr(self, "generated", generated))
    monkeypatch.setattr(speculation, "NgramProposer", Sure)
    monkeypatch.setattr(Speculation, "_pays", lambda self, streams: True)
    noted: list[bool] = []
    monkeypatch.setattr(Payoff, "note", lambda self, drafted, *_: noted.append(drafted))
    engine, eager = measuring(True, Toy())
    assert eager is not None
    engine.add(quoting("a", [1, 2, 3]))
    finish(engine)
    assert noted.count(True) == 2
    assert len(noted) > 35
    assert eager.started == 3, "twice it began anew"


def test_what_is_decided_while_a_token_is_under_way_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    known()
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    decided: list[bool] = []

    def pays(self: Speculation, streams: int) -> bool:
        decided.append(len(decided) % 2 == 0)
        return decided[-1]

    monkeypatch.setattr(Speculation, "_pays", pays)
    engine, _ = measuring(True, Toy())
    seen = []
    original = engine._runner.run

    def run(step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        seen.append(sum(len(chunk.drafts) for chunk in step.chunks))
        return original(step)

    monkeypatch.setattr(engine._runner, "run", run)
    engine.add(REQUESTS[0]())
    finish(engine)
    assert sum(drafts > 0 for drafts in seen) == decided.count(True) > 2


def test_one_long_step_decides_nothing() -> None:
    payoff = Payoff()
    decide(payoff, 100, 1.0, 2.0, 12)
    payoff.note(True, 1000.0, 12, 4)
    assert payoff.try_drafts()


@pytest.mark.parametrize("pays", [True, False])
def test_auto_measures_its_steps(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test: a row of a step takes a second, or a step does."""
    known()
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    engine, _ = measuring(False, Toy())
    now = [0.0]
    engine._speculation._clock = lambda: now[0]
    original = engine._runner.run

    def run(step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        now[0] += 1.0 if pays else step.tokens
        return original(step)

    engine._runner.run = run  # type: ignore[method-assign]
    accepted = []
    for _ in range(12):
        engine.add(REQUESTS[0]())
        before = engine.stats.accepted_tokens
        finish(engine)
        accepted.append(engine.stats.accepted_tokens - before)
    assert accepted[0] > 0, "it tries"
    assert all(accepted[1:]) if pays else sum(accepted[1:]) <= 2 * MOST * (12 * 40 // AGAIN)


def test_a_chunk_knows_what_it_samples() -> None:
    engine, _ = engine_with(False)
    engine.add(quoting("a", [1, 2, 3]))
    (sequence,) = engine._requests["a"]
    assert Chunk(sequence, 0, 2).logits == 0
    assert Chunk(sequence, 0, 3).logits == 1
    assert Chunk(sequence, 2, 5, drafts=(4, 5)).logits == 3
