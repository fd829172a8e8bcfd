"""The delta rule's decode kernel against its plain-torch reference."""

import pytest
import torch

from snugvl.layers.delta_rule import EPS, Rule, recur
from snugvl.layers.kernels import delta_rule


@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), [(2, 2, 16, 32), (1, 4, 24, 40)])
def test_one_step_of_several_sequences(
    key_heads: int, heads: int, key_dim: int, value_dim: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    slots = torch.tensor([4, 0, 3], device=device)
    mixed = torch.randn(3, 2 * key_heads * key_dim + heads * value_dim, device=device)
    query, key, value = mixed.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=-1)
    decay, beta = -torch.rand(3, heads, device=device), torch.rand(3, heads, device=device)
    rule = Rule(query.view(3, -1, key_dim), key.view(3, -1, key_dim), value.view(3, heads, -1), decay, beta)
    states = torch.randn(6, heads, key_dim, value_dim, device=device)
    before = states.clone()
    right, after = recur(rule, states[slots])
    parts = (rule.query, rule.key, rule.value, rule.decay, rule.beta)
    ours = delta_rule.recur(*parts, states, slots, EPS)
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[slots], after, atol=1e-5, rtol=1e-5)
    assert torch.equal(states[[1, 2, 5]], before[[1, 2, 5]]), "a stranger's state was touched"


def test_sixteen_bits_come_in_and_float32_stays(device: torch.device) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 2, 16, device=device).bfloat16() for _ in range(3))
    decay, beta = -torch.rand(2, 2, device=device), torch.rand(2, 2, device=device).bfloat16()
    states, slots = torch.randn(2, 2, 16, 16, device=device), torch.tensor([0, 1], device=device)
    right, after = recur(Rule(query, key, value, decay, beta), states)
    ours = delta_rule.recur(query, key, value, decay, beta, states, slots, EPS)
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, after, atol=1e-5, rtol=1e-5)
