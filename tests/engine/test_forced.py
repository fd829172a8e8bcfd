"""Tokens that a grammar forces come without a step of their own, and are those of steps for each."""

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from snugvl.core.messages import Grammar
from snugvl.engine import runner, snapshots
from snugvl.engine.batch import Unread
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.decode import Replay
from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.engine.sampling.grammar import GrammarState, TokenGrammar
from snugvl.engine.sampling.masks import MOST_FORCED, WAIT_S, MaskPace
from snugvl.engine.scheduler import Chunk, Schedule
from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import ForwardBatch
from tests.engine.eager import EagerGraphs, engine_with, finish, request
from tests.engine.test_grammar import END, Rule, phrases
from tests.engine.test_prefill_graphs import recorded
from tests.engine.toy import HIDDEN, HybridToy, Toy
from tests.masks import mask_of, spend, tokens_of
from tests.patience import PATIENCE_S

POCKET = Path(__file__).parents[2] / "src/snugvl/pocket"
Model = Callable[[], Toy]


@pytest.fixture(autouse=True)
def _short_runs_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST_LONG_RUN", 2)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, no mask is late."""
    monkeypatch.setattr("snugvl.engine.sampling.masks.WAIT_S", PATIENCE_S)
    monkeypatch.setattr("snugvl.engine.sampling.masks.FORCING_S", PATIENCE_S)


def typed(name: str, prompt: list[int], **sampling: object) -> EngineRequest:
    """A request whose answer has forced tokens."""
    each = request(name, prompt, **{"max_tokens": 50, "stop_ids": [END], **sampling})
    return replace(each, grammar=Rule(phrases))


REQUESTS = [
    lambda: typed("a", [1, 2, 3, 4, 5]),
    lambda: typed("b", [7, 8], n=2, temperature=1.0, seed=3),
    lambda: request("c", [9] * 11, max_tokens=31),
    lambda: typed("d", [3, 1], temperature=1.3, seed=5, top_p=0.9),
    lambda: typed("e", [5, 5, 6], logprobs=2, max_tokens=20),
    lambda: typed("f", [2, 2], repetition_penalty=1.3, frequency_penalty=0.5),
    lambda: request("g", [4, 2], max_tokens=40, temperature=0.9, seed=2),
    lambda: typed("h", [6, 1], max_tokens=9),
    lambda: typed("i", [6, 3], ignore_eos=True),
]


def answers(
    graphs: bool, skip: bool, late: int = 0, model: Toy | None = None, **config: int
) -> tuple[dict[tuple[str, int], list[object]], Engine, EagerGraphs | None]:
    """What comes of all requests, `late` steps apart."""
    sizes = {"max_num_seqs": 10, "num_blocks": 200, "max_model_len": 96, "max_batched_tokens": 64, **config}
    engine, eager = engine_with(graphs, model, skip_forced=skip, **sizes)
    outputs: list[TokenOutput] = []
    for index, each in enumerate(REQUESTS):
        engine.add(each())
        for _ in range(late if index else 0):
            outputs += engine.step()
            engine.check_integrity()
    return finish(engine, outputs), engine, eager


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("late", [0, 2, 5])
@pytest.mark.parametrize("model", [Toy, HybridToy])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.sample("False-Toy-5", "False-HybridToy-0", "True-Toy-2", "True-HybridToy-5")
def test_the_same_tokens_with_fewer_steps(graphs: bool, model: type[Toy], late: int) -> None:
    right, slow, _ = answers(graphs=False, skip=False, model=model())
    assert slow.stats.forced_tokens == 0
    found, quick, eager = answers(graphs, True, late, model())
    assert found == right
    assert quick.stats.forced_tokens > 40
    assert quick.stats.faults == 0
    assert quick.stats.generated_tokens == slow.stats.generated_tokens
    if eager is not None:
        assert eager.followed >= 5, "steps with grammars run ahead"
    if not late:
        assert quick.steps < slow.steps, "whoever is last has forced tokens, too"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("model", [Toy, HybridToy])
@pytest.mark.parametrize("leaves", [1, 4, 7])
@pytest.mark.sample("1-Toy", "4-Toy", "7-Toy")
def test_outputs_wait_until_the_device_is_busy_again(model: type[Toy], leaves: int) -> None:
    """And what is delivered meanwhile may end a request: the others' tokens stay."""
    right, _, _ = answers(graphs=False, skip=True, model=model())
    sizes = {"max_num_seqs": 10, "num_blocks": 200, "max_model_len": 96, "max_batched_tokens": 64}
    engine, _ = engine_with(True, model(), skip_forced=True, **sizes)
    for each in REQUESTS:
        engine.add(each())
    outputs: list[TokenOutput] = []
    meanwhiles = 0
    while engine.has_work:
        begun, calls, hurries = engine.steps, 0, engine.hurries

        def meanwhile(
            hurries: bool = hurries, begun: int = begun, outputs: list[TokenOutput] = outputs
        ) -> None:
            nonlocal calls, meanwhiles
            calls, meanwhiles = calls + 1, meanwhiles + hurries
            assert not hurries or engine._in_flight is None or engine.steps > begun
            if meanwhiles == leaves:
                outputs.extend(engine.abort("f"))

        outputs += engine.step(meanwhile)
        assert calls <= 1
        engine.check_integrity()
    assert meanwhiles > leaves
    found = finish(engine, outputs)
    ended = found.pop(("f", 0))
    assert ended[:-1] == right[("f", 0)][: len(ended) - 1], "tokens of before"
    assert ended[-1] in ("abort", right[("f", 0)][-1])
    assert found == {name: said for name, said in right.items() if name != ("f", 0)}


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("model", [Toy, HybridToy])
@pytest.mark.sample("Toy-False", "HybridToy-False")
def test_few_blocks_and_a_small_budget_change_no_token(
    graphs: bool, model: type[Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With snapshots of states in answers, which come back from them."""
    monkeypatch.setattr(snapshots, "SPACING", 1)
    right, _, _ = answers(graphs=False, skip=False, model=model())
    sizes = {"num_blocks": 28, "max_num_seqs": 4, "max_batched_tokens": 7, "state_snapshots": 3}
    found, engine, _ = answers(graphs, True, 1, model(), **sizes)
    assert found == right
    assert engine.stats.preemptions > 0
    assert engine.stats.free_blocks == 28


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("recording", [False, True])
def test_a_run_is_computed_while_others_run_ahead(recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of its chunk starts before the others' tokens are read, launch by launch or by a graph."""
    engine, eager = engine_with(True, max_num_seqs=4, max_batched_tokens=64)
    assert eager is not None
    pool = recorded(engine) if recording else None
    started: list[tuple[int, ...]] = []
    original = engine._runner.run_chunks

    def run_chunks(
        chunks: list[Chunk], unread: Unread | None = None, *more: Any, **alone: bool
    ) -> torch.Tensor:
        if unread is not None:
            started.append(tuple(chunk.end - chunk.start for chunk in chunks))
        return original(chunks, unread, *more, **alone)

    monkeypatch.setattr(engine._runner, "run_chunks", run_chunks)
    for name in "ab":
        engine.add(typed(name, [1, ord(name) % 7]))
    alone = {name: finish_alone(typed(name, [1, ord(name) % 7])) for name in "ab"}
    found = finish(engine)
    assert {name: found[name, 0] for name in "ab"} == alone
    assert any(max(sizes) > 2 and min(sizes) == 1 for sizes in started)
    assert eager.started > 1, "and goes on in a graph"
    assert pool is None or pool.replays > 3


def finish_alone(each: EngineRequest) -> list[object]:
    engine, _ = engine_with(False, skip_forced=False)
    engine.add(each)
    return finish(engine)[each.request_id, 0]


@pytest.mark.parametrize("graphs", [False, True])
def test_every_token_has_its_log_probability_where_they_are_asked_for(graphs: bool) -> None:
    engine, _ = engine_with(graphs)
    engine.add(typed("a", [5, 5, 6], logprobs=1, max_tokens=30))
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert len(outputs) == 30
    assert all(output.logprob is not None and len(output.top_logprobs) == 1 for output in outputs)
    assert engine.stats.forced_tokens == 0


@pytest.mark.usefixtures("patient")
def test_a_step_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many forced tokens are known."""
    engine, _ = engine_with(False, max_num_seqs=3, max_batched_tokens=6)
    sizes: list[int] = []
    original = engine._runner.run

    def run(step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        sizes.append(step.tokens)
        return original(step)

    monkeypatch.setattr(engine._runner, "run", run)
    for name in "abc":
        engine.add(typed(name, [ord(name) % 7], max_tokens=40))
    found = finish(engine)
    assert max(sizes) == 6
    assert found["a", 0] == finish_alone(typed("a", [ord("a") % 7], max_tokens=40))


@pytest.mark.usefixtures("patient")
def test_an_answer_that_is_all_forced() -> None:
    engine, _ = engine_with(False)
    words = [5, 7, 9, 11, 13, 15, END]
    engine.add(replace(request("a", [1, 2], stop_ids=[END]), grammar=Rule(lambda seen: {words[len(seen)]})))
    assert finish(engine)["a", 0] == [*words, "stop"]
    assert engine.steps == 1, "the prompt's: its first token is known before"


def test_the_limit_and_a_stop_token_end_it_in_the_middle_of_a_run() -> None:
    words = Rule(lambda seen: {10 + len(seen) % 30})
    for sampling, wanted in (
        ({"max_tokens": 4}, [10, 11, 12, 13, "length"]),
        ({"max_tokens": 30, "stop_token_ids": (12,)}, [10, 11, 12, "stop"]),
        ({"max_tokens": 1}, [10, "length"]),
    ):
        for graphs in (False, True):
            engine, _ = engine_with(graphs)
            engine.add(replace(request("a", [1, 2], **sampling), grammar=words))
            assert finish(engine)["a", 0] == wanted


@pytest.mark.usefixtures("patient")
def test_a_mask_looks_no_further_than_so_many_tokens() -> None:
    rule = Rule(lambda seen: {1 + len(seen) % 40})
    mask = mask_of(rule.start(), 48)
    mask.wait()
    assert list(mask.forced) == [1 + i % 40 for i in range(MOST_FORCED)]
    for _ in range(3):
        mask.accept(mask.forced[0])
    assert tokens_of(mask) == [4]


@pytest.mark.usefixtures("patient")
def test_a_grammar_that_breaks_after_forced_tokens_gives_them_first() -> None:
    engine, _ = engine_with(False)
    rule = Rule(lambda seen: {10 + len(seen) % 30}, breaks_after=3)
    mask = mask_of(rule.start(), 48)
    mask.wait()
    assert (len(mask.forced), mask.error) == (3, None)
    engine.add(replace(request("a", [1, 2], max_tokens=20), grammar=rule))
    assert finish(engine)["a", 0] == [10, 11, 12, "error"]


class Late(GrammarState):
    """Free; the mask after `at` tokens takes until `go`."""

    error = None

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0
        self.go, self.reached = threading.Event(), threading.Event()

    def start(self) -> "Late":
        return self

    def fill(self, bits: torch.Tensor) -> None:
        if self.seen == self.at:
            self.reached.set()
            assert self.go.wait(60)
            spend(2 * WAIT_S)
        bits.fill_(-1)

    def accept(self, token: int) -> None:
        self.seen += 1

    def takes(self, tokens: Sequence[int]) -> int:
        raise AssertionError("nobody guesses")

    def copy(self) -> "Late":
        raise AssertionError("nobody guesses")


@pytest.fixture
def by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is quick enough to be made by the engine itself."""
    monkeypatch.setattr("snugvl.engine.sampling.masks.QUICK_S", 0.0)


@pytest.mark.usefixtures("by_threads")
def test_whose_mask_is_late_waits_alone_though_its_step_has_begun() -> None:
    right = finish_alone(request("slow", [3, 1, 4], max_tokens=12))
    engine, eager = engine_with(True)
    assert eager is not None
    late = Late(5)
    engine.add(replace(request("slow", [3, 1, 4], max_tokens=12), grammar=late))
    engine.add(request("other", [9, 2], max_tokens=60))
    outputs: list[TokenOutput] = []
    while sum(output.request_id == "other" for output in outputs) < 20:
        outputs += engine.step()
        engine.check_integrity()
    assert late.reached.is_set()
    assert sum(output.request_id == "slow" for output in outputs) == 5
    late.go.set()
    mask = engine._requests["slow"][0].grammar
    assert mask is not None
    mask.wait()
    for _ in range(3):
        outputs += engine.step()
    assert sum(output.request_id == "slow" for output in outputs) > 5, "and goes on as soon as it can"
    assert finish(engine, outputs)["slow", 0] == right


@pytest.mark.usefixtures("patient")
def test_masks_that_always_take_long_keep_nobody_from_running_ahead() -> None:
    """Their own steps wait for the host, which has them before it starts one."""

    class Long(MaskPace):
        def note(self, seconds: float) -> None:
            pass

    for pace, runs in ((Long(2 * PATIENCE_S), False), (Long(0.0), True)):
        engine, eager = engine_with(True)
        assert eager is not None
        engine.add(typed("a", [3, 1, 4]))
        mask = engine._requests["a"][0].grammar
        assert mask is not None
        mask.pace = pace
        finish(engine)
        assert (eager.followed > 0) == runs


@pytest.mark.usefixtures("by_threads")
def test_a_recurrent_state_takes_no_token_twice() -> None:
    """Its step waits for the late mask instead."""
    right = {}
    for graphs in (False, True):
        engine, _ = engine_with(graphs, HybridToy())
        late = Late(5)
        threading.Timer(0.05, late.go.set).start()
        engine.add(replace(request("slow", [3, 1, 4], max_tokens=20, temperature=1.5, seed=1), grammar=late))
        engine.add(request("other", [9, 2], max_tokens=20))
        right[graphs] = finish(engine)
    assert right[True] == right[False]


WORDS, FIRST = 3598, 48  # of pocket's vocabulary, behind those that mean something to the toy


class Wide(Toy):
    """Over pocket's vocabulary."""

    plan = replace(Toy.plan, text=replace(Toy.plan.text, vocab_size=WORDS))

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed, self.head = (
            nn.Parameter(torch.randn(FIRST + WORDS, HIDDEN, dtype=torch.float64, generator=generator))
            for _ in "ab"
        )

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        return super().forward(replace(batch, input_ids=batch.input_ids + FIRST), cache)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.head[FIRST:].T).float()


def schema(draw: random.Random, depth: int = 0) -> dict[str, object]:
    """One of many kinds of answers."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "pattern", "either", "null"]
    kind = "object" if not depth else draw.choice(kinds + ["object", "array"] * (depth < 3))
    words = ["red", "dark green", "a b", "naïve", "circle", "triangle", "0", "日本", '"quoted"', "x\ny"]
    if kind == "object":
        names = draw.sample(["name", "box", "label_2d", "x", "größe", "a long name of a field", "is it?"], 3)
        properties = {name: schema(draw, depth + 1) for name in names}
        required = names[: draw.randint(1, 3)]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        fewest = draw.randint(0, 2)
        return {"type": "array", "items": schema(draw, depth + 1), "minItems": fewest, "maxItems": fewest + 1}
    return {
        "string": {"type": "string", "maxLength": draw.randint(0, 8)},
        "integer": {"type": "integer", "minimum": draw.randint(-50, 0), "maximum": draw.randint(1, 999)},
        "number": {"type": "number", "minimum": 0, "maximum": 1},
        "boolean": {"type": "boolean"},
        "enum": {"enum": draw.sample(words, draw.randint(1, 4))},
        "const": {"const": draw.choice([*words, 12, None, {"a": [1, "b"]}])},
        "pattern": {
            "type": "string",
            "pattern": draw.choice(["^[A-F]{2}-[0-9]{3}$", "^v1\\.[0-9]$", "^https"]),
        },
        "either": {"anyOf": [{"const": "none of these"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
        "null": {"type": "null"},
    }[kind]


@cache
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer.from_folder(POCKET)
    return GrammarCompiler(tokenizer, WORDS)


@pytest.mark.usefixtures("patient")
def test_50_schemas_give_the_tokens_of_one_by_one() -> None:
    """With pocket's real tokenizer: greedy and drawn, in steps that wait and in steps that run ahead."""
    draw = random.Random(0)
    sources = [json.dumps(schema(draw)) for _ in range(50)]
    rules = [compiler().compile(Grammar("json_schema", source)) for source in sources]
    found = []
    forced = 0
    for graphs, skip in ((False, False), (False, True), (True, True)):
        sizes = {"num_blocks": 2000, "max_num_seqs": 25, "max_model_len": 256, "max_batched_tokens": 64}
        engine, _ = engine_with(graphs, Wide(), skip_forced=skip, **sizes)
        for index, rule in enumerate(rules):
            engine.add(ask(str(index), rule, temperature=float(index % 2)))
        found.append(finish(engine))
        forced = engine.stats.forced_tokens
    assert found[0] == found[1] == found[2]
    assert forced > 200
    decode = compiler()._source.decode
    texts = {i: decode([t for t in found[0][str(i), 0][:-2] if isinstance(t, int)]) for i in range(50)}
    for index, text in texts.items():
        if found[0][str(index), 0][-1] == "stop":
            assert isinstance(json.loads(text), dict)


def ask(name: str, rule: TokenGrammar, temperature: float) -> EngineRequest:
    """An answer that follows a grammar."""
    sampling = {"max_tokens": 48, "temperature": temperature, "seed": int(name)}
    return replace(
        request(name, [1, 2, int(name) % 40], stop_ids=compiler()._source.eos_ids, **sampling),
        grammar=rule,
    )
