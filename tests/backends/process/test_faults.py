"""A few of the faults that `faults.py` has hundreds of: nothing hangs or is left."""

import logging
import sys

import pytest

from tests.backends.process import faults
from tests.patience import NEVER_S, PATIENCE_S

FAULTS = 3  # of which more than half end the engine's process, which takes seconds to come back


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.extended
def test_after_each_fault_it_serves_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No clock decides here, however busy the machine is: the script's own 10 s are for its long run."""
    # pytest keeps what is logged, and with a traceback all that the functions in it had.
    monkeypatch.setattr(logging.getLogger("snugvl"), "propagate", False)
    monkeypatch.setattr(faults, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(faults, "LEAVE_S", PATIENCE_S)
    watched = faults.Supervision(ping_s=0.2, snapshot_s=0.05, settle_s=0.0, watchdog_s=NEVER_S)
    monkeypatch.setattr(faults, "WATCHED", watched)
    found = faults.run(FAULTS, seed=1)
    assert not found.wrong, found.table()
    assert sum(found.raised.values()) >= FAULTS // 2, found.table()
