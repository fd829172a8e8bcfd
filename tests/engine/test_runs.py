"""No run of tokens comes twice: the rule of transformers, on the device, known ahead of the host."""

import pytest
import torch

from snugvl.core.sampling import SamplingParams
from snugvl.engine.sampling.sampler import Sampler, SamplerInput, sample

VOCAB = 12


def choice(
    said: list[int], size: int, *, row: int = 0, window: int = 0, temperature: float = 0.0
) -> SamplerInput:
    params = SamplingParams(
        no_repeat_ngram_size=size, no_repeat_window=window, temperature=temperature, seed=0
    )
    return SamplerInput(row, params, said=said, uniform=0.5)


def forbidden(said: list[int], size: int, window: int = 0) -> set[int]:
    """Tokens that are never taken, however high their score is."""
    found = set()
    for token in range(VOCAB):
        logits = torch.zeros(1, VOCAB)
        logits[0, token] = 50.0
        (result,) = sample(logits, [choice(said, size, window=window)])
        if result.token_id != token:
            found.add(token)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("seed", range(6))
def test_it_forbids_what_transformers_forbids(size: int, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 30, (), generator=generator))
    said = torch.randint(0, 4, (length,), generator=generator).tolist()
    theirs = transformers.NoRepeatNGramLogitsProcessor(size)
    scores = theirs(torch.tensor([said]), torch.zeros(1, VOCAB))
    assert forbidden(said, size) == set(scores[0].isneginf().nonzero()[:, 0].tolist())


def test_a_window_looks_back_so_far() -> None:
    """As the logits processor of DeepSeek-OCR: runs that begin within the last tokens."""
    said = [1, 2, 5, 5, 1, 3, 6, 6, 1]
    assert forbidden(said, 2) == {2, 3}
    assert forbidden(said, 2, window=5) == {3}
    assert forbidden(said, 2, window=4) == set()
    assert forbidden(said, 3, window=1) == set()


def test_each_row_has_its_own_and_others_none() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 5.0
    logits[:, 8] = 4.0
    choices = [choice([1, 7, 1], 2), choice([], 0, row=1), choice([7], 1, row=2)]
    kept = logits.clone()
    assert [each.token_id for each in sample(logits, choices)] == [8, 7, 8]
    assert torch.equal(logits, kept)


@pytest.mark.parametrize(("window", "expected"), [(0, [3, 3, 4, 3, 5, 3, 0]), (1, [3] * 7)])
def test_tokens_that_the_host_has_not_read_count(window: int, expected: list[int]) -> None:
    """A sampler that lasts for several steps: each is told of the one before on the device."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = 9.0, 8.0, 7.0
    sampler = Sampler([choice([], 2, window=window)], VOCAB, torch.device("cpu"))
    found, alone = [], list[int]()
    for _ in expected:
        pending = sampler.begin(logits, [0.0])
        found.append(pending.results()[0].token_id)
        sampler.note(pending.tokens)
        (result,) = sample(logits, [choice(alone, 2, window=window)])
        assert result.token_id is not None
        alone.append(result.token_id)
    assert found == alone == expected


def test_drawn_tokens_follow_it_too() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 30.0
    (result,) = sample(logits, [choice([3], 1, temperature=1.0)])
    assert result.token_id != 3


def test_where_nothing_else_is_left_a_run_comes_again() -> None:
    """A grammar may force a token, and no request may end for that."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3] = 1.0
    (result,) = sample(logits, [choice([3], 1)])
    assert result.token_id == 3
