"""Log-probabilities of a prompt's own tokens: those of the whole prompt at once, however it is computed."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.config import EngineConfig
from snugvl.core.sampling import MAX_SCORES, SamplingParams, check_scores
from snugvl.engine.engine import Engine
from snugvl.engine.memory import allocate
from snugvl.engine.request import EngineRequest, Sampled, TokenOutput
from snugvl.errors import RequestError
from snugvl.layers.attention import AttentionMetadata
from snugvl.models.batch import ForwardBatch
from tests.draws import draws
from tests.engine.toy import HybridToy, Toy, engine, request, run

MODEL, HYBRID = Toy(), HybridToy()
PROMPTS = ((3, 1, 4, 1, 5), (9,), (2, 7), tuple(range(1, 24)), (8, 8, 8, 8, 8, 8, 8, 8, 8))


@cache
@torch.inference_mode()
def table(model: Toy, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities after each token, `[tokens, vocab]`, by one forward of the network."""
    size = len(ids)
    state_slots = torch.zeros(1, dtype=torch.int64)
    blocks = torch.zeros(1, 1, dtype=torch.int64)
    attention = AttentionMetadata((size,), (size,), torch.arange(size), blocks, size, state_slots=state_slots)
    batch = ForwardBatch(torch.tensor(ids), torch.arange(size).expand(3, -1), attention, torch.arange(size))
    one = EngineConfig(num_blocks=1, block_size=size, max_num_seqs=1)
    return model.forward(batch, allocate(model, one)).log_softmax(-1)


def scored(name: str, ids: tuple[int, ...], **more: object) -> EngineRequest:
    return request(name, *ids, **{"logprobs": 2, "prompt_logprobs": True, "max_tokens": 2, **more})


def check(model: Toy, ids: tuple[int, ...], outputs: list[TokenOutput]) -> None:
    """The first output of every choice brings the scores of its prompt, no other brings any."""
    expected = table(model, ids)
    for choice in {output.choice for output in outputs}:
        first, *rest = (output for output in outputs if output.choice == choice)
        assert not any(output.prompt for output in rest)
        assert [score.token_id for score in first.prompt] == list(ids[1:])
        for place, score in enumerate(first.prompt):
            check_score(expected[place], score)


def check_score(expected: torch.Tensor, score: Sampled) -> None:
    assert score.token_id is not None
    assert score.logprob == pytest.approx(float(expected[score.token_id]), abs=1e-4)
    values, ids = expected.topk(2)
    assert [token for token, _ in score.top_logprobs] == ids.tolist()
    assert [value for _, value in score.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["attention", "linear attention"])
@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_alone(model: Toy, ids: tuple[int, ...]) -> None:
    check(model, ids, run(engine(model), scored("a", ids))["a"])


@draws(30)
@given(
    order=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=6),
    chunk=st.integers(3, 12),
    slots=st.integers(1, 3),
    blocks=st.integers(11, 24),
    n=st.integers(1, 3),
)
def test_in_any_company(order: list[tuple[int, ...]], chunk: int, slots: int, blocks: int, n: int) -> None:
    """Chunks, few slots, preemption, siblings, and a prefix cache that others have filled."""
    here = engine(MODEL, max_batched_tokens=chunk, max_num_seqs=slots, num_blocks=blocks, max_model_len=32)
    requests = [scored(str(i), ids, n=n, max_tokens=4) for i, ids in enumerate(order)]
    others = [request(f"other {i}", *ids, max_tokens=4) for i, ids in enumerate(order)]
    outputs = run(here, *(each for pair in zip(others, requests, strict=True) for each in pair))
    for number, ids in enumerate(order):
        check(MODEL, ids, outputs[str(number)])
        assert not any(output.prompt for output in outputs[f"other {number}"])


def test_no_more_rows_at_once_than_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan has room for."""
    seen = []
    whole = Toy.logits
    monkeypatch.setattr(Toy, "logits", lambda self, x: seen.append(len(x)) or whole(self, x))
    check(MODEL, PROMPTS[3], run(engine(MODEL, max_num_seqs=3), scored("a", PROMPTS[3]))["a"])
    assert max(seen) == 3


def test_cached_tokens_are_told_but_not_of_a_scored_prompt() -> None:
    here: Engine = engine(MODEL)
    ids = PROMPTS[3]
    asked = {"a": (request("a", *ids), 0), "b": (request("b", *ids), 20), "c": (scored("c", ids), 0)}
    for name, (item, hits) in asked.items():
        outputs = run(here, item)[name]
        assert {output.cached_tokens for output in outputs} == {hits}


def test_they_are_bounded() -> None:
    check_scores(SamplingParams(logprobs=20), None)  # of the answer alone
    asked = SamplingParams(logprobs=1, prompt_logprobs=True)
    check_scores(asked, MAX_SCORES // 2)
    with pytest.raises(RequestError, match=r"65,537 tokens; .* the limit is 65,536") as refused:
        check_scores(asked, MAX_SCORES // 2 + 1)
    assert refused.value.field == "logprobs"
    with pytest.raises(RequestError, match="bare prompt"):
        check_scores(asked, None)
    with pytest.raises(RequestError, match="needs logprobs"):
        SamplingParams(prompt_logprobs=True)
