"""Grammars in the engine: obeyed by every row, owned by every choice, untouched by what happens around."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.sampling import SamplingParams
from snugvl.engine.request import EngineRequest
from snugvl.engine.sampling.grammar import GrammarState
from snugvl.engine.sampling.masks import fill_allowed
from snugvl.engine.sampling.sampler import SamplerInput, sample
from snugvl.errors import RequestError
from tests.draws import draws
from tests.engine.eager import engine_with
from tests.engine.toy import VOCAB, Toy, engine, picture, prompt_of, run, tokens
from tests.masks import mask_of

MODEL = Toy()
END = 0


class Rule:
    """Allows the ids that `rule` gives for the tokens so far; `log` has what each of its states saw."""

    def __init__(self, rule: Callable[[tuple[int, ...]], set[int]], breaks_after: int | None = None) -> None:
        self.rule = rule
        self.breaks_after = breaks_after
        self.log: list[list[int]] = []

    def start(self) -> GrammarState:
        self.log.append([])
        return State(self, self.log[-1])


class State(GrammarState):
    def __init__(self, owner: Rule, seen: list[int]) -> None:
        self.owner = owner
        self.seen = seen

    @property
    def error(self) -> str | None:
        limit = self.owner.breaks_after
        return "too complex" if limit is not None and len(self.seen) >= limit else None

    def fill(self, bits: torch.Tensor) -> None:
        bits.zero_()
        words = [0] * len(bits)
        for token in () if self.error else self.owner.rule(tuple(self.seen)):
            words[token // 32] |= 1 << token % 32
        for index, word in enumerate(words):
            bits[index] = word - (1 << 32) if word >= 1 << 31 else word

    def accept(self, token: int) -> None:
        self.seen.append(token)

    def takes(self, tokens: Sequence[int]) -> int:
        other = self.copy()
        for count, token in enumerate(tokens):
            if token not in self.owner.rule(tuple(other.seen)):
                return count
            other.accept(token)
        return len(tokens)

    def copy(self) -> "State":
        return State(self.owner, list(self.seen))


def turns(seen: tuple[int, ...]) -> set[int]:
    """Odd ids, then even ones, …, nothing twice in a row, the end after nine."""
    if len(seen) >= 9:
        return {END}
    return {i for i in range(1, 42) if i % 2 != len(seen) % 2} - {*seen[-1:]}


def phrases(seen: tuple[int, ...]) -> set[int]:
    """Two free tokens, then as many forced ones as their sum says, ten times; then the end."""
    at = 0
    for turn in range(10):
        if at + 2 > len(seen):
            return set(range(1, 42))
        rest = sum(seen[at : at + 2]) % 7
        if at + 2 + rest > len(seen):
            return {1 + (5 * len(seen) + turn) % 40}
        at += 2 + rest
    return {END}


RULES = (None, turns, phrases)
PROMPTS = ((3, 1, 4, 1, 5), (9,), (5, picture(1), 6, 7), tuple(range(1, 18)))


def request(name: str, which: int, grammar: Rule | None = None, **sampling: object) -> EngineRequest:
    ids, vision = prompt_of(*PROMPTS[which])
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return EngineRequest(name, ids, params, vision, frozenset({END}), None, grammar)


def test_bits_become_columns() -> None:
    rule = Rule(lambda seen: {0, 31, 32, 40, 47})
    allowed = fill_allowed(
        [mask_of(rule.start(), VOCAB), mask_of(rule.start(), VOCAB)], VOCAB, torch.device("cpu")
    )
    assert allowed.shape == (2, VOCAB)
    assert allowed[1].nonzero()[:, 0].tolist() == [0, 31, 32, 40, 47]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_forbidden_token_never_wins(temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, -torch.inf, 1.0, 0.5]])
    params = SamplingParams(temperature=temperature, logit_bias={0: 100.0, 3: -100.0, 4: -100.0}, logprobs=2)
    state = Rule(lambda seen: {3, 4}).start()
    choices = [SamplerInput(0, params, uniform=i / 50, grammar=mask_of(state, 5)) for i in range(50)]
    results = sample(logits, [*choices, SamplerInput(0, params)])
    assert {result.token_id for result in results[:-1]} <= {3, 4}
    assert results[-1].token_id == 0, "the row without a grammar is free"
    want = logits[0].log_softmax(-1)
    for result in results[:-1]:
        assert result.logprob == pytest.approx(float(want[result.token_id or 0])), "the network's own"
        assert [token for token, _ in result.top_logprobs] == [0, 1]


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}])
def test_filters_look_at_what_is_allowed(filters: dict[str, float]) -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 3.0, 2.5, -2.0]])
    params = SamplingParams(temperature=1.0, **filters)
    state = Rule(lambda seen: {3, 4, 5}).start()
    drawn = {
        r.token_id
        for r in sample(
            logits, [SamplerInput(0, params, uniform=i / 99, grammar=mask_of(state, 6)) for i in range(99)]
        )
    }
    assert drawn == ({3} if "top_p" in filters else {3, 4})  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits", [[[1.0, 2.0, -torch.inf]], [[torch.nan, 2.0, 1.0]], [[torch.inf, 2.0, 1.0]]]
)
def test_no_possible_token_is_an_error_and_no_token(temperature: float, logits: list[list[float]]) -> None:
    params = SamplingParams(temperature=temperature)
    only_last = Rule(lambda seen: {2}).start()
    assert (
        sample(torch.tensor(logits), [SamplerInput(0, params, grammar=mask_of(only_last, 3))])[0].token_id
        is None
    )
    nothing = Rule(lambda seen: set()).start()
    assert (
        sample(torch.zeros(1, 3), [SamplerInput(0, params, grammar=mask_of(nothing, 3))])[0].token_id is None
    )
    broken = Rule(lambda seen: {1}, breaks_after=0).start()
    results = sample(
        torch.zeros(1, 3), [SamplerInput(0, params, grammar=mask_of(broken, 3)), SamplerInput(0, params)]
    )
    assert results[0].token_id is None
    assert results[1].token_id is not None


def test_it_holds_to_the_end_and_sees_each_token_once() -> None:
    rule = Rule(turns)
    outputs = run(engine(MODEL), request("a", 0, rule))["a"]
    got = tokens(outputs)
    assert outputs[-1].finish == "stop"
    assert got[-1] == END
    assert len(got) == 10
    for index, token in enumerate(got):
        assert token in turns(tuple(got[:index]))
    assert rule.log[0][:9] == got[:9], "nobody needs a mask after the last token"
    assert len(rule.log) == 1
    assert got != tokens(run(engine(MODEL), request("a", 0))["a"])[:10], "without it other tokens come"


def test_a_token_limit_cuts_it() -> None:
    outputs = run(engine(MODEL), request("a", 0, Rule(turns), max_tokens=4))["a"]
    assert outputs[-1].finish == "length"
    assert len(tokens(outputs)) == 4


def test_each_choice_has_its_own_state() -> None:
    rule = Rule(turns)
    outputs = run(engine(MODEL), request("a", 2, rule, n=3, temperature=1.5, seed=5))["a"]
    got = [tokens(outputs, choice) for choice in range(3)]
    assert sorted(seen[:9] for seen in rule.log) == sorted(choice[:9] for choice in got)
    assert len({*map(tuple, got)}) == 3
    for choice in got:
        assert all(token in turns(tuple(choice[:i])) for i, token in enumerate(choice))


def test_a_grammar_that_gives_up_ends_its_own_request_only() -> None:
    here = engine(MODEL)
    outputs = run(here, request("bad", 0, Rule(turns, breaks_after=3)), request("good", 0, Rule(turns)))
    assert outputs["bad"][-1].finish == "error"
    assert isinstance(outputs["bad"][-1].error, RequestError), "the grammar is to blame, not the engine"
    assert "grammar can't go on after 8 tokens of this request: too complex" in str(outputs["bad"][-1].error)
    assert len(tokens(outputs["bad"])) == 3
    assert outputs["good"][-1].finish == "stop"
    assert here.stats.free_blocks == 64


SAMPLINGS = ({}, {"n": 2, "temperature": 1.0, "seed": 4}, {"temperature": 1.4, "seed": 2, "top_p": 0.9})


@cache
def alone(which: int, rule: int, sampling: int) -> list[list[int]]:
    params, chosen = SAMPLINGS[sampling], RULES[rule]
    grammar = Rule(chosen) if chosen else None
    outputs = run(engine(MODEL, skip_forced=False), request("a", which, grammar, **params))["a"]
    return [tokens(outputs, choice) for choice in range(params.get("n", 1))]


@draws(60)
@given(
    wanted=st.lists(
        st.tuples(*(st.integers(0, len(kinds) - 1) for kinds in (PROMPTS, RULES, SAMPLINGS))),
        min_size=2,
        max_size=6,
    ),
    blocks=st.integers(12, 18),
    slots=st.integers(2, 5),
    budget=st.integers(0, 9),
    aborts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=3),
    ahead=st.booleans(),
)
def test_strangers_chunks_preemption_and_aborts_change_no_token(
    wanted: list[tuple[int, int, int]],
    blocks: int,
    slots: int,
    budget: int,
    aborts: list[tuple[int, int]],
    ahead: bool,
) -> None:
    sizes = {"num_blocks": blocks, "max_num_seqs": slots, "max_batched_tokens": slots + budget}
    here, _ = engine_with(ahead, MODEL, max_model_len=128, **sizes)
    rules = [Rule(chosen) if (chosen := RULES[rule]) else None for _, rule, _ in wanted]
    for number, (which, _, sampling) in enumerate(wanted):
        here.add(request(str(number), which, rules[number], **SAMPLINGS[sampling]))
    outputs, step = [], 0
    while here.has_work:
        for when, victim in aborts:
            if when == step:
                outputs += here.abort(str(victim))
        outputs += here.step()
        here.check_integrity()
        step += 1
    assert here.stats.faults == 0
    for number, key in enumerate(wanted):
        mine = [output for output in outputs if output.request_id == str(number)]
        for choice, right in enumerate(alone(*key)):
            got = tokens(mine, choice)
            aborted = any(o.finish == "abort" for o in mine if o.choice == choice)
            assert got == right[: len(got)]
            assert aborted or got == right
    assert here.stats.free_blocks == blocks
