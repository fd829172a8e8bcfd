"""Ends a test in which nothing moves any more.

Tests wait for what must come as long as it takes (`tests/patience.py`), as no machine says how long that is.
What will never come is told by something else: no process of the test computes, and none waits for a
processor, which on a busy machine they would.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import psutil
import pytest

# Seconds without progress after which a test is ended. Tests of this module have less patience.
IDLE_S = float(os.environ.get("SNUGVL_TESTS_IDLE_S", "90"))
LOOKS = 30  # in that time
# Of the looks: those that find something moving where only loops tick that wait for something.
TICKS = LOOKS // 5
_SHARE = 0.03  # of a processor: ticking takes less


class Watchdog(threading.Thread):
    """Looks at this process and its descendants while a test runs; it starts once, as tests are many."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        super().__init__(daemon=True, name="watchdog")
        self._every_s = idle_s / LOOKS
        self._seen = deque[bool](maxlen=LOOKS)
        self._spent: dict[int, float] = {}
        self._test = threading.Lock()  # held while one begins or ends, so that none is ended for another
        self._running = False

    def run(self) -> None:
        """Look for ever; send this process SIGUSR2 whenever nothing has moved in a test for long enough."""
        me = threading.get_native_id()
        while True:
            time.sleep(self._every_s)
            if not self._running:
                continue
            moves = self._moves(me)
            with self._test:
                self._seen.append(moves)
                if self._running and len(self._seen) == LOOKS and sum(self._seen) <= TICKS:
                    self._seen.clear()
                    os.kill(os.getpid(), signal.SIGUSR2)

    def watch(self, running: bool) -> None:
        """A test begins, or ends."""
        with self._test:
            self._seen.clear()
            self._running = running

    def _moves(self, me: int) -> bool:
        """Whether a process began or ended, has computed, or would like to."""
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        spent, wants = dict[int, float](), False
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                spent[process.pid] = times.user + times.system
                wants = wants or _wants(process.pid, me)
        # Without what looking takes, which on a busy machine is more than the share that counts.
        spent[os.getpid()] = time.process_time() - time.thread_time()
        before, self._spent = self._spent, spent
        if before.keys() != spent.keys():
            return True
        return wants or sum(spent.values()) - sum(before.values()) > _SHARE * self._every_s


def _wants(pid: int, me: int) -> bool:
    """Whether a thread but `me` is running, waits for a processor, or for a disk."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state in "RD" and int(task.name) != me:
                return True
    return False


def _bite(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    pytest.fail(f"nothing has moved for {IDLE_S:g} s: it waits for what will never come")


@cache
def _dog() -> Watchdog:
    dog = Watchdog()
    dog.start()
    return dog


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Watch every test and its fixtures; most end before anybody looks."""
    before = signal.signal(signal.SIGUSR2, _bite)
    _dog().watch(True)
    try:
        return (yield)
    finally:
        _dog().watch(False)
        signal.signal(signal.SIGUSR2, before)
