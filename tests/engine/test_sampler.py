"""Each sampling parameter against the plainest reference, and the batch against each row alone."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.sampling import SamplingParams
from snugvl.engine.batch import begin_likeliest
from snugvl.engine.sampling import filters
from snugvl.engine.sampling.filters import support
from snugvl.engine.sampling.penalties import Penalties
from snugvl.engine.sampling.sampler import SamplerInput, plain, random_stream, sample
from tests.draws import draws

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0, 0.0, 3.0, -torch.inf, 1.0]])


def one(
    logits: torch.Tensor, uniform: float = 0.0, counts: dict[int, int] | None = None, **params: object
) -> int:
    result = sample(logits, [SamplerInput(0, SamplingParams(**params), (), counts, uniform)])[0].token_id
    assert result is not None
    return result


def penalized(logits: torch.Tensor, choices: list[SamplerInput]) -> torch.Tensor:
    return Penalties(choices, logits.shape[1], logits.device).apply(logits)


def drawn(logits: torch.Tensor, steps: int = 400, **params: object) -> set[int]:
    """Every token that some uniform number draws."""
    choice = SamplingParams(**{"temperature": 1.0, **params})
    choices = [SamplerInput(0, choice, uniform=i / steps) for i in range(steps)]
    return {r.token_id for r in sample(logits, choices) if r.token_id is not None}


def reference(row: list[float], params: SamplingParams) -> set[int]:
    """Support in plain Python: rank, cut at k, cut at p, cut at min_p."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[: params.top_k or None]
    weights = [math.exp(row[i] - row[ranked[0]]) for i in ranked]
    total, seen, kept = sum(weights), 0.0, set()
    for token, weight in zip(ranked, weights, strict=True):
        if seen / total < params.top_p and weight >= params.min_p:
            kept.add(token)
        seen += weight
    return kept


def test_greedy_takes_the_highest_and_of_equals_the_first() -> None:
    assert one(LOGITS) == 3
    assert one(LOGITS.flip(-1)) == 2
    assert one(torch.zeros(1, 9)) == 0


def test_logit_bias_comes_before_everything() -> None:
    assert one(LOGITS, logit_bias={3: -1.0, 5: -1.0, 7: 4.0}) == 7
    assert one(LOGITS, logit_bias={3: -100.0}) == 5
    assert one(LOGITS, logit_bias={1: 100.0}, temperature=1.0, uniform=0.99) == 1


def test_penalties_against_their_definitions() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={2: 1.0}
    )
    counts = {0: 3, 1: 1}
    got = penalized(LOGITS, [SamplerInput(0, params, prompt=(2, 3, 3, 0), counts=counts)])[0].tolist()
    want = list(LOGITS[0].tolist())
    want[2] += 1.0
    for token in {0, 1, 2, 3}:  # prompt and generated, once each
        want[token] = want[token] / 2 if want[token] > 0 else want[token] * 2
    for token, count in counts.items():  # generated only
        want[token] -= 0.5 * count + 0.25
    assert got == pytest.approx(want)
    assert LOGITS[0, 0] == 2.0, "the logits themselves stay"


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_the_smallest_penalty_stays_finite(temperature: float) -> None:
    params = {"repetition_penalty": 1e-300, "temperature": temperature, "counts": {0: 1}}
    assert one(LOGITS, 0.9, **params) == 0


def test_no_penalty_copies_nothing() -> None:
    assert penalized(LOGITS, [SamplerInput(0, SamplingParams(), prompt=(1,), counts={1: 1})]) is LOGITS


ROWS = st.lists(st.integers(-40, 40).map(lambda n: n / 10), min_size=2, max_size=12)
FILTERS = st.builds(
    SamplingParams,
    top_k=st.sampled_from([0, 1, 2, 3, 5, 50]),
    top_p=st.sampled_from([0.05, 0.31, 0.57, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.21, 0.6, 0.995]),
)


@draws(60)
@given(row=ROWS, params=FILTERS)
def test_support_equals_the_reference(row: list[float], params: SamplingParams) -> None:
    keep = support(torch.tensor([row]), [params])
    kept = set(range(len(row))) if keep is None else set(keep[0].nonzero()[:, 0].tolist())
    assert kept == reference(row, params)


@draws(60)
@given(
    rows=st.lists(st.lists(st.integers(-9, 9), min_size=12, max_size=12), min_size=1, max_size=4),
    params=st.lists(FILTERS, min_size=4, max_size=4),
)
def test_the_few_best_decide_as_all_would(rows: list[list[int]], params: list[SamplingParams]) -> None:
    """With a handful for "few": ties at its edge, filters that reach beyond it, mixed in one batch."""
    scores = torch.tensor(rows) / 2.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "_FEW", 4)
        keep = support(scores, params[: len(rows)])
    for index, row in enumerate(rows):
        kept = set(range(12)) if keep is None else set(keep[index].nonzero()[:, 0].tolist())
        assert kept == reference([value / 2.0 for value in row], params[index])


@pytest.mark.parametrize(
    "params",
    [
        *({"top_k": 40}, {"top_k": 255}, {"top_k": 256}, {"top_k": 257}, {"top_k": 5000}, {"top_p": 0.9}),
        *({"top_p": 0.9999}, {"min_p": 0.02}, {"min_p": 1e-9}, {"top_k": 50, "top_p": 0.95, "min_p": 0.01}),
        *({"top_k": 300, "top_p": 0.7}, {"top_k": 2000, "min_p": 0.3}),
    ],
)
@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
@pytest.mark.sample(
    "0.1-params0",
    "0.1-params3",
    "0.1-params6",
    "0.1-params9",
    "3.0-params0",
    "3.0-params3",
    "3.0-params6",
    "3.0-params9",
    "8.0-params0",
    "8.0-params3",
    "8.0-params6",
    "8.0-params9",
)
def test_a_large_vocabulary_draws_the_same_tokens_as_sorting_it_whole(
    params: dict[str, float], spread: float
) -> None:
    logits = torch.randn(3, 6_000, generator=torch.Generator().manual_seed(2)) * spread
    choices = [
        SamplerInput(i % 3, SamplingParams(temperature=1.0, **params), uniform=(i + 0.5) / 30)
        for i in range(30)
    ]
    few = sample(logits, choices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "_FEW", 6_000)
        assert sample(logits, choices) == few


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.95, "min_p": 0.1}]
)
def test_nothing_outside_the_support_is_ever_drawn(params: dict[str, float]) -> None:
    assert drawn(LOGITS, **params) == reference(LOGITS[0].tolist(), SamplingParams(**params))


def test_top_k_and_top_p_follow_the_temperature() -> None:
    """p(3), p(5) ≈ 0.37 each at temperature 1, but all alike when hot."""
    assert drawn(LOGITS, top_p=0.7) == {3, 5}
    assert len(drawn(LOGITS, top_p=0.7, temperature=2.0)) > 2


def test_off_means_off() -> None:
    assert support(LOGITS, [SamplingParams(temperature=1.0)]) is None
    many = torch.zeros(2, 70_000)
    many[:, 1:] -= 30.0  # the first has probability 1 in float32, and the sum before the others is 1 already
    keep = support(many, [SamplingParams(), SamplingParams(top_k=3)])
    assert keep is not None
    assert keep.sum(-1).tolist() == [70_000, 3], "rounding takes no tail from a row that doesn't filter"
    assert keep[1].nonzero()[:, 0].tolist() == [0, 1, 2], "of equals the lowest ids"


def test_frequencies_follow_the_probabilities() -> None:
    stream, params = random_stream(0, 0), SamplingParams(temperature=1.5)
    choices = [SamplerInput(0, params, uniform=stream.random()) for _ in range(20_000)]
    counts = Counter(result.token_id for result in sample(LOGITS, choices))
    for token, probability in enumerate((LOGITS[0] / 1.5).softmax(-1).tolist()):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=0.015)
    assert counts[6] == 0, "a probability of zero is never drawn"


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 2.0])
def test_extremes_stay_in_the_vocabulary(uniform: float, temperature: float) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 100:200] = torch.linspace(-1e4, 1e4, 100)
    assert 100 <= one(logits, uniform, temperature=temperature) < 200
    if temperature < 1:
        assert one(logits, uniform, temperature=temperature) == 199


def test_logprobs_are_those_of_the_network_itself() -> None:
    want = LOGITS[0].log_softmax(-1)
    params = SamplingParams(logprobs=3, logit_bias={7: 100.0}, temperature=0.3, presence_penalty=2.0, top_k=1)
    result = sample(LOGITS, [SamplerInput(0, params, counts={7: 1})])[0]
    assert result.token_id == 7
    assert result.logprob == pytest.approx(float(want[7]))
    assert [token for token, _ in result.top_logprobs] == [3, 5, 0]
    assert [value for _, value in result.top_logprobs] == pytest.approx([float(want[i]) for i in (3, 5, 0)])


def test_logprobs_of_a_vocabulary_smaller_than_asked() -> None:
    result = sample(LOGITS[:, :2], [SamplerInput(0, SamplingParams(logprobs=20))])[0]
    assert [token for token, _ in result.top_logprobs] == [0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_rows_are_reported_and_others_are_not(bad: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = bad
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logprobs=2, top_p=0.9)
        results = sample(logits, [SamplerInput(row, params, uniform=0.3) for row in range(3)])
        assert results[1].token_id is None
        assert results[1].logprob is None
        assert results[0] == results[2]
        assert results[0].token_id in (3, 5)
    assert sample(torch.full((1, 4), -torch.inf), [SamplerInput(0, SamplingParams())])[0].token_id is None


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.4, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 1: -5.0}]),
    logprobs=st.sampled_from([None, 0, 4]),
)
CHOICES = st.builds(
    SamplerInput,
    row=st.integers(0, 4),
    params=PARAMS,
    prompt=st.sampled_from([(), (1, 2, 3)]),
    counts=st.sampled_from([None, {2: 1, 5: 3}]),
    uniform=st.floats(0, 1, exclude_max=True),
)


@draws(30)
@given(choices=st.lists(CHOICES, min_size=1, max_size=70))
def test_a_batch_equals_each_row_alone(choices: list[SamplerInput]) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 3
    together = sample(logits, choices)
    assert together == [sample(logits, [choice])[0] for choice in choices]


def test_streams_differ_by_choice_and_by_every_bit_of_the_seed() -> None:
    seeds = [0, 1, -1, 2**32, 2**63, 2**64 - 1, -(2**63)]
    first = {random_stream(seed, choice).random() for seed in seeds for choice in range(3)}
    assert len(first) == 21
    assert random_stream(7, 2).random() == random_stream(7, 2).random()
    assert random_stream(None, 0).random() != random_stream(None, 0).random()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"stop": ("x",), "max_tokens": 3}, True),
        ({"temperature": 0.5}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"presence_penalty": -0.5}, False),
    ],
)
def test_who_only_takes_the_likeliest(params: dict[str, object], expected: bool) -> None:
    assert plain(SamplingParams(**params)) is expected


def test_the_likeliest_are_what_a_sampler_gives() -> None:
    """On a GPU they are found in two launches, without one."""
    broken = torch.full((1, 8), torch.nan)
    logits = torch.cat(
        [torch.randn(20, 8, generator=torch.Generator().manual_seed(3)).round(), LOGITS, broken]
    )
    choices = [SamplerInput(row, SamplingParams()) for row in range(len(logits))]
    own = [result.token_id for result in begin_likeliest(logits, None).results()]
    assert own == [result.token_id for result in sample(logits, choices)]
    assert own[-1] is None
