"""The load of `load.py`, small, on one server: it checks what it sees.

They run in this process, which has torch and the SDKs already.
"""

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snugvl.inputs.trials import PROCESSES
from tests.patience import PATIENCE_S

BENCHMARKS = str(Path(__file__).parent.parent.parent / "benchmarks")
CLIENTS = 40
LIMIT = 40  # of requests at once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE_S)]


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], Any]]:
    """Imports a script as running it does."""
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module
    sys.path.remove(BENCHMARKS)
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(BENCHMARKS)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def served(script: Callable[[str], Any]) -> Iterator[Any]:
    """A real `snugvl serve`, with a line in its log for every request."""
    options = ["--device", "cpu", "--served-model-name", "pocket"]
    options += ["--max-concurrent", str(LIMIT)]
    with script("serving").serve("pocket", options, quiet=False) as found:
        yield found


def test_clients_of_every_kind_at_once(served: Any, script: Callable[[str], Any], tmp_path: Path) -> None:
    load, out = script("tests.server.load"), tmp_path / "load.json"
    figures, wrong = load.measure(
        served, Namespace(requests=CLIENTS, concurrent=CLIENTS, limit=LIMIT, seed=0, cpus="", out=out)
    )
    load.tell(figures, wrong, served.tail(), out)
    figures = json.loads(out.read_text())
    assert figures["wrong"] == []
    assert figures["twice_the_limit_at_once"].keys() == {"200", "429"}
    held = figures["held"]
    pipes = 2 * PROCESSES  # of those that try grammars, which start with the first of them
    assert held["after"]["engine"]["files"] <= held["before"]["engine"]["files"] + pipes
    by_kind = {row["kind"]: row["statuses"] for row in figures["kinds"]}
    assert by_kind.keys() == {kind.name for kind in load.KINDS} | {"all"}
    assert by_kind["chat, image, stream"].keys() == {"200"}
    assert by_kind["bad: bomb"].keys() == {"413"}
