"""The same suite against a real vLLM on the CPU.

In a process of its own: with the tests spread over several processes, each would start a vLLM, which takes a
minute. The variable SNUGVL_CONTRACT chooses the engine (see `engines.py`).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.vllm.real.install import vllm_python
from tests.patience import PATIENCE_S

HERE = Path(__file__).parent
FILES = ("test_answers", "test_sampling", "test_refusals", "test_differences", "test_life")


@pytest.mark.extended
@pytest.mark.timeout(6 * PATIENCE_S)
def test_a_real_vllm_keeps_the_contract() -> None:
    vllm_python()  # installed, or a reason to skip
    files = [str(HERE / f"{name}.py") for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    command += ["-o", f"timeout={4 * PATIENCE_S:g}"]  # the first one waits for vLLM's start
    run = subprocess.run(
        [*command, "-k", "vllm"],
        env={**os.environ, "SNUGVL_CONTRACT": "vllm"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=5 * PATIENCE_S,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 60
