"""Where kernels run: compiled on a GPU, else in Triton's interpreter (see tests/conftest.py)."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
