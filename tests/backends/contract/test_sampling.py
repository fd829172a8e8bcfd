"""What every sampling parameter does, the same on every engine."""

from typing import Any

import pytest

from snugvl.inputs.tokenizer import Tokenizer
from tests.backends.contract.differences import WHOLE_CHARACTERS, as_shown
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
    expected = reference.text(request)
    assert as_shown(running.name, running.text(request)) == as_shown(running.name, expected)
    assert expected != reference.text(asked(max_tokens=40))


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
    joined = b"".join(token.bytes for token in ours).decode("utf-8", "replace")
    assert as_shown(running.name, joined) == as_shown(running.name, texts(deltas)[0])
    for one, other in zip(ours, theirs, strict=True):
        for mine, its in [(one, other), *zip(one.top, other.top, strict=True)]:
            whole = running.name not in WHOLE_CHARACTERS or is_whole(its.bytes)
            assert mine.bytes == its.bytes or not whole
            assert mine.logprob == pytest.approx(its.logprob, abs=2e-3)
        assert one.logprob == one.top[0].logprob


def is_whole(bytes_of_token: bytes) -> bool:
    """Whether they are whole characters."""
    try:
        return bool(bytes_of_token.decode())
    except UnicodeDecodeError:
        return False


def test_log_probabilities_of_the_tokens_alone(running: Running) -> None:
    assert all(token.top == () for token in logprobs(running.ask(asked(logprobs=0))))
    assert logprobs(running.ask(asked())) == []
