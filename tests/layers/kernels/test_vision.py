"""The tower's kernels against plain torch."""

import pytest
import torch
from torch.nn.functional import layer_norm

from snugvl.layers.kernels.vision import add_normed, rotate
from snugvl.models.patches import Rotation, patch_places

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (3, 24), (16, 72)])
@pytest.mark.parametrize("between", [0, 1])
def test_rotation(dtype: torch.dtype, heads: int, dim: int, between: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(heads + dim)
    places = patch_places((1, 4, 6), 2, torch.device("cpu"))
    rows = torch.randn(len(places), 1 + between, heads, dim, generator=generator).to(dtype)
    expected, rotation = rows.clone(), Rotation(6, dim, 1e4, torch.device("cpu"))
    rotation.rotate(expected[:, 0], places)
    ours = rows.clone().to(device)
    rotate(ours[:, 0], places.to(device), rotation.cos.to(device), rotation.sin.to(device))
    assert not torch.equal(ours.cpu(), rows)
    torch.testing.assert_close(ours.cpu(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(ours[:, 1:].cpu(), rows[:, 1:]), "what lies between is left alone"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [32, 72])
def test_residual_and_layer_norm(dtype: torch.dtype, size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    x, delta = (torch.randn(5, size, generator=generator).mul(3).add(7).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    total = x + delta
    expected = layer_norm(total.float(), (size,), weight.float(), bias.float(), 1e-6)
    ours = x.clone().to(device)
    normed = add_normed(ours, delta.to(device), weight.to(device), bias.to(device), 1e-6)
    tolerance = TOLERANCES[dtype]  # of the sum too: Triton's interpreter rounds bf16 otherwise than torch
    torch.testing.assert_close(ours.cpu(), total, atol=0, rtol=tolerance)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.cpu().float(), expected, atol=6 * tolerance, rtol=tolerance)
