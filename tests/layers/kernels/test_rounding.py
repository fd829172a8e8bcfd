"""Rounding to few bits by one kernel is what plain torch does with the same weights."""

import pytest
import torch

from snugvl.core.formats import FEW_BITS, FORMATS
from snugvl.layers import weights as plain
from snugvl.layers.kernels import rounding
from snugvl.layers.weights import FormatName, Weights, shares_of, to_few_bits

ROUNDS = 4


def errors(made: Weights, values: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Of each group, weighted, `[rows, groups]`."""
    off = made.wide(torch.float32).cpu().double() - values.double()
    return (off.square().view(len(values), -1, made.group) * shares).sum(-1)


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """With what is seldom: outliers, a group of equal values, one of zeros, one without a sign change."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.05
    values[::3, ::17] *= 20
    values[0, :128], values[1, :128], values[2, :128] = 0.25, 0, values[2, :128].abs() + 3
    return values.to(dtype)


@pytest.mark.parametrize("kind", [kind for kind in FEW_BITS if FORMATS[kind].since is not None])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.sample(
    "False-32-int6",
    "False-32-int4",
    "False-64-int5",
    "False-128-int6",
    "False-128-int4",
    "True-32-int5",
    "True-64-int6",
    "True-64-int4",
    "True-128-int5",
)
def test_it_is_what_torch_makes(kind: FormatName, group: int, weighed: bool, device: torch.device) -> None:
    values = matrix(45, 384, torch.float32 if device.type == "cpu" else torch.bfloat16)
    squares = torch.rand(384, generator=torch.Generator().manual_seed(1)).pow(8) if weighed else None
    wanted = to_few_bits(values.cpu(), kind, group, squares, ROUNDS)
    made = rounding.to_few_bits(
        values.to(device), kind, group, None if squares is None else squares.to(device), ROUNDS
    )
    assert (made.format, made.rows, made.columns, made.group) == (kind, 45, 384, group)
    for name in ("data", "scale", "zero", "upper"):
        ours, theirs = getattr(made, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    same = made.wide(torch.float32).cpu() == wanted.wide(torch.float32)
    assert same.float().mean() > 0.98  # sums in another order: now and then another round is the best
    shares = shares_of(squares, 384, group, torch.device("cpu"))
    ours, theirs = errors(made, values.cpu(), shares), errors(wanted, values.cpu(), shares)
    assert (ours <= theirs * 1.01 + 1e-12).all()
    assert same.view(45, -1, group)[:3].all(), "groups of equal values, zeros, and of one sign"


def test_a_matrix_on_a_gpu_is_rounded_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(torch.Tensor):
        is_cuda = True

    asked = []
    monkeypatch.setattr(rounding, "to_few_bits", lambda *given: asked.append(given))
    values = torch.zeros(8, 64).as_subclass(Elsewhere)
    plain.to_few_bits(values, "int5", 32, None, 3)
    assert asked == [(values, "int5", 32, None, 3)]
