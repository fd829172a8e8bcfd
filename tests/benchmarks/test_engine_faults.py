"""A few of the faults that `benchmarks/engine_faults.py` has hundreds of: nothing hangs or is left."""

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import NEVER_S, PATIENCE_S

ROOT = Path(__file__).parents[2]
FAULTS = 3  # of which more than half end the engine's process, which takes seconds to come back


@pytest.fixture
def engine_faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("engine_faults", None)
    return importlib.import_module("engine_faults")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.extended
def test_after_each_fault_it_serves_and_nothing_is_left(
    engine_faults: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock decides here, however busy the machine is: the script's own 10 s are for its long run."""
    # pytest keeps what is logged, and with a traceback all that the functions in it had.
    monkeypatch.setattr(logging.getLogger("snugvl"), "propagate", False)
    monkeypatch.setattr(engine_faults, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(engine_faults, "LEAVE_S", PATIENCE_S)
    watched = engine_faults.Supervision(ping_s=0.2, snapshot_s=0.05, settle_s=0.0, watchdog_s=NEVER_S)
    monkeypatch.setattr(engine_faults, "WATCHED", watched)
    found = engine_faults.run(FAULTS, seed=1)
    assert not found.wrong, found.table()
    assert sum(found.raised.values()) >= FAULTS // 2, found.table()
