"""The gated delta rule: token by token, in chunks, and cut anywhere, it is the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from snugvl.layers.delta_rule import CHUNK, Rule, recur, scan
from tests.draws import draws


def rule(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64, forget: float = 1.0) -> Rule:
    """2 key heads of width 6 for 4 value heads of width 5."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    decay = -forget * values(tokens, 4).abs()
    return Rule(
        values(tokens, 2, 6), values(tokens, 2, 6), values(tokens, 4, 5), decay, values(tokens, 4).sigmoid()
    )


def part(whole: Rule, start: int, end: int) -> Rule:
    rows = slice(start, end)
    return Rule(whole.query[rows], whole.key[rows], whole.value[rows], whole.decay[rows], whole.beta[rows])


def state(seed: int = 5) -> torch.Tensor:
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_by_one(whole: Rule, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, now = [], now[None]
    for token in range(len(whole.value)):
        output, now = recur(part(whole, token, token + 1), now)
        outputs.append(output)
    return torch.cat(outputs), now[0]


@draws(20)
@given(
    tokens=st.integers(1, 2 * CHUNK + 9),
    cut=st.floats(0, 1),
    seed=st.integers(0, 100),
    forget=st.sampled_from([0.0, 0.01, 1.0, 300.0]),  # all is kept … hardly anything
)
def test_scan_equals_recurrence_cut_anywhere(tokens: int, cut: float, seed: int, forget: float) -> None:
    whole, first = rule(tokens, seed, forget=forget), int(cut * tokens)
    right, after = one_by_one(whole, state())
    now, outputs = state(), []
    for piece in (part(whole, 0, first), part(whole, first, tokens)):
        if len(piece.value):
            output, now = scan(piece, now)
            outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), right, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(now, after, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("tokens", [1, 7, CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_it_is_transformers(tokens: int, theirs: object) -> None:
    whole, before = rule(tokens, dtype=torch.float32), state().float()
    query, key = (x.repeat_interleave(2, dim=1)[None] for x in (whole.query, whole.key))
    right, after = theirs(  # type: ignore[operator]
        query,
        key,
        whole.value[None],
        g=whole.decay[None],
        beta=whole.beta[None],
        initial_state=before[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for ours, end in (scan(whole, before), one_by_one(whole, before)):
        torch.testing.assert_close(ours, right[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(end, after[0], atol=2e-6, rtol=1e-5)


def test_sequences_of_a_step_are_apart() -> None:
    whole = rule(3)
    states = torch.stack([state(seed) for seed in range(3)])
    together, after = recur(whole, states)
    for row in range(3):
        alone, end = recur(part(whole, row, row + 1), states[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)
        torch.testing.assert_close(after[row : row + 1], end)


def test_sixteen_bits_are_widened() -> None:
    whole = rule(20, dtype=torch.bfloat16)
    output, after = scan(whole, state().float())
    assert output.dtype == after.dtype == torch.float32
    wide = Rule(*(x.float() for x in (whole.query, whole.key, whole.value, whole.decay, whole.beta)))
    torch.testing.assert_close(output, scan(wide, state().float())[0])


def test_what_comes_in_is_not_changed() -> None:
    whole, before = rule(9), state()
    kept = before.clone()
    scan(whole, before)
    recur(part(whole, 0, 1), before[None])
    assert torch.equal(before, kept)
