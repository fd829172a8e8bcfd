"""Processes that work on what strangers send: what they are given of the environment, and how they end."""

import sys
from pathlib import Path

import psutil
import pytest

from snugvl.core.resources import Worker
from tests.patience import until


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that says back what it reads, and the variables around it."""
    (tmp_path / "echo_worker.py").write_text(
        "import sys, shutil\nshutil.copyfileobj(sys.stdin, sys.stdout)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHOME", sys.base_prefix)
    monkeypatch.setenv("HF_TOKEN", "secret")
    return "echo_worker"


def test_a_worker_knows_where_python_is_and_no_secrets(echo: str) -> None:
    worker = Worker(echo, ("a",), {"OMP_NUM_THREADS": "1"})
    process = psutil.Process(worker._popen.pid)
    until(lambda: bool(process.environ()))  # the system shows none until it has laid out the new program
    found = process.environ()
    assert found["PYTHONHOME"] == sys.base_prefix
    assert found["OMP_NUM_THREADS"] == "1"
    assert "HF_TOKEN" not in found
    assert process.cmdline()[-2:] == [echo, "a"]
    worker.end()


def test_a_worker_that_is_ended_is_gone_and_may_be_ended_again(echo: str) -> None:
    worker = Worker(echo)
    assert worker.alive
    worker.end()
    worker.end()
    assert not worker.alive
    assert worker._popen.stdin is not None
    assert worker._popen.stdin.closed
