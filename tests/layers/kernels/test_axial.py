"""The kernel of the vision tower's rotary embedding against its definition."""

import pytest
import torch

from snugvl.models.patches import Rotation, patch_places

pytest.importorskip("triton")
from snugvl.layers.kernels.axial import rotate_in_place

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("dim", [8, 64, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_its_definition(heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    places = patch_places((1, 4, 6), 2, CPU)
    # Keys as they stand beside values, so that rows are apart.
    kept = torch.randn(24, 2, heads, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    rotation, wanted = Rotation(6, dim, 1e4, CPU), kept.clone()
    rotation.rotate(wanted[:, 0], places)
    got = kept.clone().to(device)
    rotate_in_place(got[:, 0], places.to(device), rotation.cos.to(device), rotation.sin.to(device))
    assert not torch.equal(wanted, kept)
    # A fused product and sum rounds once instead of twice.
    torch.testing.assert_close(got.cpu(), wanted, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(got[:, 1].cpu(), kept[:, 1]), "the values are left alone"
