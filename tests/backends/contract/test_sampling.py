"""What every sampling parameter does, the same on every engine."""

from math import isnan
from typing import Any

import pytest

from snugvl.core.messages import Request
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.inputs.tokenizer import Tokenizer
from tests.backends.contract.differences import (
    JUDGES_PROMPTS,
    PENALISES_PROMPTS,
    WHOLE_CHARACTERS,
    as_shown,
)
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
@pytest.mark.sample(
    "transformers-repetition_penalty",
    "transformers-frequency_penalty0",
    "transformers-presence_penalty",
    "llamacpp-repetition_penalty",
    "llamacpp-frequency_penalty0",
    "llamacpp-presence_penalty",
)
def test_penalties_are_equal_to_our_own(
    running: Running, reference: Running, sampling: dict[str, float]
) -> None:
    request = asked(max_tokens=40, **sampling)
    expected = reference.text(request)
    if running.name in PENALISES_PROMPTS and sampling.keys() != {"repetition_penalty"}:
        assert running.text(request) not in ("", running.text(asked(max_tokens=40)))
        return
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


PROMPT = "A red circle and a blue square are on a white ground."


def scored(prompt: str | tuple[int, ...], **sampling: Any) -> Request:
    """A bare prompt whose own tokens are to be judged."""
    values = {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": True, "ignore_eos": True} | sampling
    return Request(prompt=prompt, sampling=SamplingParams(**values))


def test_log_probabilities_of_the_prompt_are_those_of_its_tokens_generated(
    reference: Running, tokenizer: Tokenizer
) -> None:
    """A token that a bias forces has the log-probability that it has where it is part of the prompt."""
    ids = tuple(tokenizer.encode(PROMPT))
    first, *rest = reference.ask(scored(ids))
    assert not any(delta.prompt_logprobs for delta in rest)
    assert isnan(first.prompt_logprobs[0].logprob)
    assert [token.bytes for token in first.prompt_logprobs] == [tokenizer.token_bytes(i) for i in ids]
    for place in range(1, len(ids)):
        forced = asked_prompt(ids[:place], logit_bias={ids[place]: 100.0})
        (generated,) = logprobs(reference.ask(forced))
        assert first.prompt_logprobs[place].logprob == pytest.approx(generated.logprob, abs=2e-3)
        assert [token.bytes for token in first.prompt_logprobs[place].top] == [
            token.bytes for token in generated.top
        ]


def asked_prompt(ids: tuple[int, ...], **sampling: Any) -> Request:
    """One token after a bare prompt."""
    return scored(ids, max_tokens=1, prompt_logprobs=False, **sampling)


@pytest.mark.parametrize("n", [1, 2])
def test_log_probabilities_of_the_prompt_are_our_own(
    running: Running, reference: Running, tokenizer: Tokenizer, n: int
) -> None:
    if running.name not in JUDGES_PROMPTS:
        with pytest.raises(RequestError, match="log-probabilities of a prompt") as refused:
            running.ask(scored(PROMPT, n=n))
        assert refused.value.field == "logprobs"
        return
    for prompt in (PROMPT, tuple(tokenizer.encode(PROMPT))):
        deltas, expected = running.ask(scored(prompt, n=n)), reference.ask(scored(prompt, n=n))
        ours = [token for delta in deltas for token in delta.prompt_logprobs]
        theirs = [token for delta in expected for token in delta.prompt_logprobs]
        assert as_shown(running.name, texts(deltas)[0]) == as_shown(running.name, texts(expected)[0])
        assert len(theirs) == len(tokenizer.encode(PROMPT))
        assert [token.logprob for token in ours] == pytest.approx(
            [token.logprob for token in theirs], abs=2e-3, nan_ok=True
        )
        # vLLM tells alternatives by their text, which bytes of characters share.
        told = () if running.name in WHOLE_CHARACTERS else zip(ours[1:], theirs[1:], strict=True)
        for one, other in told:
            assert [token.logprob for token in one.top] == pytest.approx(
                [token.logprob for token in other.top], abs=2e-3
            )


def test_the_token_that_ends_an_answer_is_judged_with_the_prompt(
    running: Running, tokenizer: Tokenizer
) -> None:
    """lm-eval takes the last log-probability for that of the generated token, whichever it is."""
    end = next(iter(tokenizer.eos_ids))
    ends = {"ignore_eos": False, "logit_bias": {end: 100.0}}
    assert logprobs(running.ask(scored(PROMPT, prompt_logprobs=False, **ends))) == []
    if running.name not in JUDGES_PROMPTS:
        return
    judged = running.ask(scored(PROMPT, **ends))
    assert texts(judged) == [""]
    assert [token.bytes for token in logprobs(judged)] == [tokenizer.token_bytes(end)]


def test_tokens_are_counted_as_they_come(running: Running) -> None:
    deltas = running.ask(asked(temperature=1.0, seed=5, n=2))
    counts = [delta.completion_tokens for delta in deltas]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 48 == next(d.usage for d in deltas if d.usage).completion_tokens


def is_whole(bytes_of_token: bytes) -> bool:
    """Whether they are whole characters."""
    try:
        return bool(bytes_of_token.decode())
    except UnicodeDecodeError:
        return False


def test_log_probabilities_of_the_tokens_alone(running: Running) -> None:
    assert all(token.top == () for token in logprobs(running.ask(asked(logprobs=0))))
    assert logprobs(running.ask(asked())) == []
