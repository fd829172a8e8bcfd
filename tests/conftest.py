"""Checkpoints that many tests share, written once a session."""

from pathlib import Path

import pytest
import torch

from tests import checkpoints

# Two test processes on two cores: more threads each would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied checkpoint in one file."""
    return checkpoints.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official FP8 layout in small: block scales, a stored head although the model ties it."""
    return checkpoints.write(tmp_path_factory.mktemp("fp8"), checkpoints.Options(fp8=True))


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied checkpoint in three shards."""
    return checkpoints.write(tmp_path_factory.mktemp("untied"), checkpoints.Options(tied=False, shards=3))
