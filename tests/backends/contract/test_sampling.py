"""What every sampling parameter does, the same on every engine."""

from typing import Any

import pytest

from snugvl.inputs.tokenizer import Tokenizer
from tests.backends.contract.engines import Running
from tests.backends.contract.requests import asked, logprobs, texts

SAMPLED = {"temperature": 1.0, "seed": 5}


def test_a_seed_gives_the_same_answer_again(running: Running) -> None:
    first = running.text(asked(**SAMPLED))
    assert running.text(asked(**SAMPLED)) == first
    assert running.text(asked(temperature=1.0, seed=6)) != first
    assert running.text(asked()) != first


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.0, "top_k": 3}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_a_parameter_that_leaves_one_token_is_greedy(running: Running, sampling: dict[str, Any]) -> None:
    assert running.text(asked(**SAMPLED | sampling)) == running.text(asked())


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0, "presence_penalty": 1.0, "repetition_penalty": 0.7},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_penalties_are_equal_to_our_own(
    running: Running, reference: Running, sampling: dict[str, float]
) -> None:
    request = asked(max_tokens=40, **sampling)
    assert running.text(request) == reference.text(request) != reference.text(asked(max_tokens=40))


def test_a_bias_forces_and_forbids_a_token(running: Running, tokenizer: Tokenizer) -> None:
    (wanted,) = tokenizer.encode("x")
    assert running.text(asked(max_tokens=5, logit_bias={wanted: 100.0})) == "xxxxx"
    tokens = [token.bytes for token in logprobs(running.ask(asked(logprobs=0)))]
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    unwanted = next(token for token in tokens if token)
    banned = running.ask(asked(logprobs=0, logit_bias={ids[unwanted]: -100.0}))
    assert unwanted not in [token.bytes for token in logprobs(banned)]


def test_log_probabilities_cover_the_text_and_are_our_own(running: Running, reference: Running) -> None:
    request = asked(logprobs=3)
    deltas = running.ask(request)
    ours, theirs = logprobs(deltas), logprobs(reference.ask(request))
    assert len(ours) == 24
    assert b"".join(token.bytes for token in ours).decode("utf-8", "replace") == texts(deltas)[0]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.bytes, one.token) == (other.bytes, other.token)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert one.logprob == one.top[0].logprob
        assert [top.bytes for top in one.top] == [top.bytes for top in other.top]
        assert [top.logprob for top in one.top] == pytest.approx([t.logprob for t in other.top], abs=1e-3)


def test_log_probabilities_of_the_tokens_alone(running: Running) -> None:
    assert all(token.top == () for token in logprobs(running.ask(asked(logprobs=0))))
    assert logprobs(running.ask(asked())) == []
