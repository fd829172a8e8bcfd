"""Checkpoints that many tests share, written once a session."""

import gc
import os
import tempfile
from pathlib import Path

# Kernels run in Triton's interpreter where there is no GPU. Triton reads this when it is imported, and torch
# imports it.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Four test processes on two cores, and the servers and engines that they start: more threads would wait
# for one another, and those of OpenMP wait by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import pytest
import torch

from tests import checkpoints
from tests.patience import PATIENCE_S

# No test finds the servers, the measurements and the configuration of whoever runs it.
_folder = tempfile.TemporaryDirectory(prefix="snugvl-tests-")
os.environ |= {"XDG_CACHE_HOME": f"{_folder.name}/cache", "XDG_CONFIG_HOME": f"{_folder.name}/config"}
torch.set_num_threads(1)
# Where a test doesn't say how long it waits for a server: httpx's five seconds pass on a busy machine.
httpx._config.DEFAULT_TIMEOUT_CONFIG.__init__(PATIENCE_S)  # type: ignore[misc]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests begin first: at the end, one process would run them while the others idle.

    xdist gives each process a stretch of the list, so they begin two of the stretches.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = ("test_types_are_clean", "test_a_real_vllm_keeps_the_contract", "test_the_python_clients")
    for process, name in enumerate(longest):
        for index, item in enumerate(items):
            if item.name == name:
                items.insert(process * len(items) // processes, items.pop(index))
                break


def pytest_collection_finish() -> None:
    """What was imported and collected stays: a test that looks for garbage looks for its own."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the exit it is all let go of."""
    gc.unfreeze()


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
