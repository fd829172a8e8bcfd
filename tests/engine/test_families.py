"""Every family's step finds a kernel for each of its products: `family_steps.py` does the work."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from snugvl.checkpoint.families import SUPPORTED


@pytest.fixture(scope="module")
def kernels() -> Mapping[str, list[str] | str]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.family_steps"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str] | str] = json.loads(ran.stdout)
    return found


def test_every_family_makes_its_steps(kernels: Mapping[str, list[str] | str]) -> None:
    assert {name: said for name, said in kernels.items() if isinstance(said, str)} == {}
    assert len({name.split(",")[0] for name in kernels}) == len(SUPPORTED)
