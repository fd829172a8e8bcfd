"""The processes that compile kernels ahead (`ahead.py`), started and told what to do by the engine's process.

Nothing here needs torch: where no kernel was compiled yet they are started before the engine's process reads
that, as they need it, too, and are told what to compile as soon as it is known.
"""

import logging
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from snugvl.errors import RequestError
from snugvl.hardware import host

logger = logging.getLogger(__name__)

Ahead = Literal["none", "kernels", "graphs"]
VARIABLE = "SNUGVL_AHEAD"
MOST = 4  # and a quarter of the processors; each has two threads, as they share Python's lock
LEAST_MEMORY_BYTES = 2 << 30  # of main memory that must be free for the first, which takes about half a GiB
MORE_MEMORY_BYTES = 1 << 30  # and for each of the others
COMMAND = (sys.executable, "-m", "snugvl.backends.native.kernel_process")


def ahead_of(value: str | None) -> Ahead:
    """What is done before it is needed: `SNUGVL_AHEAD`.

    Raises:
        RequestError: it is unknown.
    """
    for known in get_args(Ahead):
        if value == known:
            return known  # type: ignore[no-any-return]
    if value:
        raise RequestError(
            f"{VARIABLE} {value!r} is unknown; use {', '.join(get_args(Ahead))}", field=VARIABLE
        )
    return "kernels"


def nothing_compiled() -> bool:
    """Whether no kernels were compiled ahead on this machine yet; said without reading Triton."""
    named = os.environ.get("TRITON_CACHE_DIR")
    folder = Path(named) if named else Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    return not any(folder.glob("*.done"))


class KernelProcesses:
    """As many as this machine has room for, without a GPU. Safe to use from several threads."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self.stopped = False
        self._command = command
        self._started: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Start them, unless they run already; whether there are any."""
        count = room()
        with self._lock:
            if not self.stopped and not self._started:
                if not count:
                    logger.info("too little main memory is free to compile kernels ahead")
                for _ in range(count):
                    self._started.append(self._one())
            return bool(self._started) and not self.stopped

    def stop(self) -> None:
        """End them. Safe to call twice, and before they are started: then they aren't."""
        with self._lock:
            self.stopped = True
            for process in self._started:
                process.kill()

    def ask(self, wanted: object) -> list[tuple[int, list[str]]]:
        """Let each do its share of what is wanted; their exit codes, and what they said."""
        count = len(self._started)
        orders = (pickle.dumps((wanted, number, count)) for number in range(count))
        with ThreadPoolExecutor(count, "snugvl-kernels") as pool:
            return list(pool.map(_told, self._started, orders))

    def _one(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(  # noqa: S603 (ourselves)
            [*self._command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )


def room() -> int:
    """Processes that this machine has room for now."""
    left = host.memory().free_bytes - LEAST_MEMORY_BYTES
    return 0 if left < 0 else max(1, min(MOST, (os.cpu_count() or 1) // 4, 1 + left // MORE_MEMORY_BYTES))


def _told(process: "subprocess.Popen[bytes]", order: bytes) -> tuple[int, list[str]]:
    said = process.communicate(order)[0].decode("utf-8", "replace")
    return process.returncode, said.strip().splitlines()
