"""Where kernels run: compiled on a GPU, else in Triton's interpreter (see tests/conftest.py)."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[1, 2])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that rotates and writes keys takes so many tokens; the last one may have less to do."""
    paged = "snugvl.layers.kernels.attention.paged"
    monkeypatch.setattr(f"{paged}.MANY", 1)
    monkeypatch.setattr(f"{paged}.MANY_TOKENS", request.param)
