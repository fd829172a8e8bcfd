"""Rounding alone: what compensation gains, and which matrices get 8 bits."""

import pytest
import torch

from snugvl.errors import InputError
from snugvl.quantize import rounding
from snugvl.quantize.grids import Grid
from snugvl.quantize.passes import Matrix
from snugvl.quantize.rounding import SHARE, Moments, Rounded, rounded
from snugvl.quantize.setup import WidthOptions, group_of, own_grids


def inputs(count: int, columns: int = 128, *, seed: int) -> torch.Tensor:
    """Inputs whose columns go together, some of them much larger than others."""
    mixing = torch.randn(columns, columns, generator=torch.Generator().manual_seed(0)) * 0.15
    mixing += torch.eye(columns)
    large = 1 + 20 * (torch.arange(columns) % 31 == 0)
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)) @ mixing * large


def error(values: torch.Tensor, made: Rounded, x: torch.Tensor) -> float:
    return float((x @ (made.values() - values).T).norm() / (x @ values.T).norm())


def test_compensation_beats_plain_rounding_on_other_inputs() -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    moments = Moments(128, torch.device("cpu"))
    for part in inputs(2048, seed=1).split(700):
        moments.add(part)
    other = inputs(512, seed=2)
    plain, better = (
        error(values, rounded(values, Grid(4, 64), moments, compensate=compensate), other)
        for compensate in (False, True)
    )
    assert better < 0.8 * plain
    assert error(values, rounded(values, Grid(8, 128), moments, compensate=True), other) < 0.2 * better


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (5, 64), (8, 128)])
def test_descent_loses_less_with_every_round_and_keeps_the_format(
    bits: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(48, 128, generator=torch.Generator().manual_seed(3)) * 0.05
    moments = Moments(128, torch.device("cpu"))
    moments.add(inputs(2048, seed=1))
    lost, made = [], []
    for rounds in (0, 1, 2, 3):
        monkeypatch.setattr(rounding, "ROUNDS", rounds)
        made.append(rounded(values, Grid(bits, group), moments, compensate=True))
        beside = made[-1].values() - values
        lost.append(float(((beside @ rounding._damped(moments)) * beside).sum()))
    assert lost[1] < 0.995 * lost[0]
    assert lost[1] >= lost[2] >= lost[3]
    last = made[-1]
    assert last.codes.dtype == torch.uint8
    assert int(last.codes.max()) < 1 << bits
    assert torch.equal(last.weights().wide(torch.float32), last.values()), "in bf16"
    assert bool((last.lines.scale > 0).all())
    if bits == 8:
        assert torch.equal(last.lines.zero, made[0].lines.zero)
    else:
        assert not torch.equal(last.lines.zero, made[0].lines.zero)


def test_rows_are_rounded_alike_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50, 128, generator=torch.Generator().manual_seed(3))
    moments = Moments(128, torch.device("cpu"), rows=50)
    x = inputs(2048, seed=1)
    moments.add(x, x @ values.T * 0.1)
    together = rounded(values, Grid(5, 64), moments, compensate=True)
    monkeypatch.setattr(rounding, "SLICE_ROWS", 16)
    sliced = rounded(values, Grid(5, 64), moments, compensate=True)
    differ = (together.codes != sliced.codes).float().mean()  # sums are in another order
    assert float(differ) < 0.01
    assert torch.allclose(together.values(), sliced.values(), atol=0.05)


def test_a_matrix_makes_up_for_what_was_lost_before() -> None:
    """Inputs are half of what they were, and what the product is added to lacks a part."""
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    lacked = 0.3 * torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    moments, blind = Moments(128, torch.device("cpu"), rows=64), Moments(128, torch.device("cpu"))
    for x in inputs(4096, seed=1).split(700):
        moments.add(x, x @ values.T + x @ lacked.T)  # exact inputs are 2 x
        blind.add(x)
    other = inputs(512, seed=2)
    wanted = other @ (2 * values + lacked).T

    def missing(of: Moments) -> float:
        made = rounded(values, Grid(4, 64), of, compensate=True)
        return float((other @ made.values().T - wanted).norm() / (other @ (values + lacked).T).norm())

    # Of what lacks a share is made up for, less what is held back as inputs are known of some tokens alone.
    assert missing(blind) == pytest.approx(1, abs=0.05)
    assert missing(moments) == pytest.approx(1 - SHARE, abs=0.15)
    plain = rounded(values, Grid(4, 64), moments, compensate=False)
    assert torch.equal(plain.values(), rounded(values, Grid(4, 64), blind, compensate=False).values())


def test_values_on_the_grid_stay_and_dead_inputs_do_no_harm() -> None:
    codes = torch.randint(16, (8, 64), generator=torch.Generator().manual_seed(0))
    codes[:, :2] = torch.tensor([0, 15])
    values = (codes - 5) * 0.25
    x = inputs(256, 64, seed=1)
    x[:, 7:20] = 0
    moments = Moments(64, torch.device("cpu"))
    moments.add(x)
    for compensate in (False, True):
        made = rounded(values, Grid(4, 64), moments, compensate=compensate)
        torch.testing.assert_close(made.values(), values)
    zeros = rounded(torch.zeros(8, 64), Grid(4, 64), Moments(64, torch.device("cpu")), compensate=True)
    assert not zeros.values().any()


def test_bits_go_where_they_save_most_within_the_budget() -> None:
    matrices = {
        (0, "self_attn.qkv_proj"): Matrix(64, 128, (("model.layers.0.self_attn.q_proj.weight", 64),)),
        (0, "mlp.down_proj"): Matrix(128, 192, (("model.layers.0.mlp.down_proj.weight", 128),)),
        (1, "mlp.down_proj"): Matrix(128, 192, (("model.layers.1.mlp.down_proj.weight", 128),)),
    }
    choice = WidthOptions({place: [Grid(4, 64), Grid(8, 64)] for place in matrices}, matrices)
    measured = {(0, "self_attn.qkv_proj"): 0.5, (0, "mlp.down_proj"): 0.1, (1, "mlp.down_proj"): 0.9}
    costs = {
        place: dict(zip(choice.grids[place], (cost, 0.001), strict=True)) for place, cost in measured.items()
    }
    places = list(matrices)
    wanted = {
        4.5: set(),
        5.1: {places[0]},
        6.7: {places[0], places[2]},
        choice.mean(choice.most): set(places),
    }
    for bits, eights in wanted.items():
        choice.check(bits)
        found = choice.within(bits, costs)
        assert {place for place, grid in found.items() if grid.bits == 8} == eights
        assert choice.mean(found) <= bits + 1e-6
    for bits in (4.4, 3.0, 9.0):
        with pytest.raises(InputError, match=r"can't be reached: .* take 4\.50 .* to 8\.\d+ "):
            choice.check(bits)
    blocks = WidthOptions({place: [Grid(3, 16, "Q3_K"), Grid(8, 32, "Q8_0")] for place in matrices}, matrices)
    with pytest.raises(InputError, match=r"take 3\.44 \(all in 3 bits\) to 8\.50 "):
        blocks.check(3.4)
    assert (group_of(576, 4), group_of(576, 8), group_of(1536, 8), group_of(96, 4)) == (64, 64, 128, 32)
    assert group_of(40, 4) is None
    assert Grid(4, 64).held_bits == 4.5


def test_our_own_format_has_wide_groups_of_all_widths_unless_others_are_asked_for() -> None:
    grids = own_grids(256, None)
    assert set(grids) == {(4, 64, None), (4, 128, None), (5, 64, None), (5, 128, None), (6, 64, None),
                          (6, 128, None), (8, 128, None)}  # fmt: skip
    assert grids[0] == (4, 64, None)  # which is measured
    assert {each.group for each in own_grids(256, 32) if each.bits == 4} == {32}


def test_columns_of_many_sizes_lose_less_when_they_are_made_alike() -> None:
    """Norms' weights take the factors, so inputs are divided by what columns are multiplied with."""
    chance = torch.Generator().manual_seed(3)
    values = (
        torch.randn(64, 128, generator=chance)
        * torch.logspace(-2, 1, 128)[torch.randperm(128, generator=chance)]
    )
    values[:, 5] = 0
    factors = rounding.factors_of(values)
    assert bool((factors > 0).all())
    sizes, after = values.norm(dim=0), (values * factors).norm(dim=0)
    assert after.max() / after[after > 0].min() < 0.1 * sizes.max() / sizes[sizes > 0].min()
    moments, alike = (Moments(128, torch.device("cpu")) for _ in range(2))
    x, held = (inputs(2048, seed=seed) / values.norm(dim=0).clamp(min=0.1) for seed in (1, 2))
    moments.add(x)
    alike.add(x / factors)
    plain = rounded(values, Grid(4, 64), moments, compensate=True)
    better = rounded(values * factors, Grid(4, 64), alike, compensate=True)
    assert error(values * factors, better, held / factors) < 0.8 * error(values, plain, held)
