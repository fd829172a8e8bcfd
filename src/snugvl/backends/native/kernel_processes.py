"""The processes that compile kernels ahead (`ahead.py`), from both sides.

The engine's process starts them and tells each, on its standard input, what runs (`engine/precompile.py`) and
which share of what that needs is its own. Where no kernel was compiled yet that is before torch is read, as
they need it, too: importing this needs no torch. A process is `python -m` this module, with the PID of who
starts it. It works at the lowest priority, without the GPU, and only as long as the engine's process lives.
"""

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from snugvl.errors import RequestError
from snugvl.hardware import host

logger = logging.getLogger(__name__)

Ahead = Literal["none", "kernels", "graphs"]
VARIABLE = "SNUGVL_AHEAD"
MOST = 8  # and half of the processors; each has one thread, as several would wait for Python's lock
LEAST_MEMORY_BYTES = 2 << 30  # of host memory that must be free for the first, which takes about half a GiB
MORE_MEMORY_BYTES = 1 << 30  # and for each of the others
COMMAND = (sys.executable, "-m", "snugvl.backends.native.kernel_processes")
LOOK_S = 0.5  # between two looks at the parent
FIRST = "what a first question needs is compiled"  # a line that a process says
VARIANT = "variant: "  # before what it says of one that it compiles, and its digest
Heard = Callable[[str, str, object], None]


def ahead_of(value: str | None) -> Ahead:
    """The work that is done before it is needed, from `SNUGVL_AHEAD`.

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
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 (as Triton: it needs none)
    named = os.environ.get("TRITON_CACHE_DIR")
    folder = Path(named) if named else Path(home) / ".triton" / "cache"
    return not any(folder.glob("*.done"))


class KernelProcesses:
    """Processes that compile kernels, as many as there is room for. Safe to use from several threads."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self.stopped = False
        self._command = command
        self._started: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Start them, unless they run already; whether there are any."""
        with self._lock:
            if not self.stopped and not self._started:
                self._started = [self._one() for _ in range(room())]
                if not self._started:
                    logger.info("too little host memory is free to compile kernels ahead")
            return bool(self._started) and not self.stopped

    def stop(self) -> None:
        """End them. Safe to call twice, and before they are started: then they aren't."""
        with self._lock:
            self.stopped = True
            for process in self._started:
                process.kill()

    def ask(
        self, wanted: object, first: Callable[[], object] = lambda: None, heard: Heard = lambda *_: None
    ) -> list[tuple[int, list[str]]]:
        """Let each compile its share of `wanted`; returns (exit code, lines of output) of each.

        `first` is called when all have compiled what a first question needs; `heard` with whatever one says
        of a variant that it compiles, and that one; at its end with "" and "".
        """
        count = len(self._started)
        left = iter(range(count - 1, -1, -1))

        def said_first() -> None:
            if next(left, 1) == 0:
                first()

        orders = (pickle.dumps((wanted, number, count)) for number in range(count))
        with ThreadPoolExecutor(count, "snugvl-kernels") as pool:
            return list(pool.map(_told, self._started, orders, [said_first] * count, [heard] * count))

    def _one(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(  # noqa: S603 (ourselves)
            [*self._command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )


def room() -> int:
    """Number of processes that this machine has room for now."""
    left = host.memory().free_bytes - LEAST_MEMORY_BYTES
    return 0 if left < 0 else max(1, min(MOST, host.cores() // 2, 1 + left // MORE_MEMORY_BYTES))


def _told(
    process: "subprocess.Popen[bytes]", order: bytes, first: Callable[[], object], heard: Heard
) -> tuple[int, list[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # it may have ended
        pipe.write(order)
    said = []
    with process.stdout as lines:
        for line in lines:
            text = line.decode("utf-8", "replace").strip()
            if text == FIRST:
                first()
            elif text.startswith(VARIANT):
                what, _, digest = text.removeprefix(VARIANT).partition(" ")
                heard(what, digest, process)
            elif text:
                said.append(text)
    heard("", "", process)
    return process.wait(), said


def leave_with(parent: int) -> None:
    """End this process as soon as that isn't its parent any more."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(0)


def main() -> None:
    """Compile for the process that started this one; the last line printed is the report, in JSON."""
    if hasattr(os, "nice"):
        os.nice(19)  # before torch is imported
    threading.Thread(target=leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    import json
    from dataclasses import asdict

    from snugvl.engine.precompile import compile_kernels, read_compiler

    read_compiler()  # what is to be compiled may not be known yet
    job, number, count = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the engine's process, through a pipe of its own)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def said(what: str, digest: str) -> None:
        say(f"{VARIANT}{what} {digest}")

    report = compile_kernels(job, number, count, lambda: say(FIRST), said)
    say(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
