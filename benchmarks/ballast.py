"""Cards of another size, and neighbours that grow.

    with Ballast(7200):    # whoever starts now finds 7,200 MiB free, its own CUDA context included
        with Neighbour() as game:
            game.grow(500)

A `Ballast` is a process that holds all of a GPU but so many MiB; a `Neighbour` is one that takes more
while others run, as a game does. Both allocate through the driver alone: no torch, one plain context each. On
`device="cpu"` a ballast holds nothing (a limit of the server's own stands in), and a neighbour takes main
memory.
"""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

MIB = 1 << 20
STEP_MIB = 50  # a neighbour grows in pieces
PATIENCE_S = 5.0  # that it goes on asking: an engine may make room for it

Device = Literal["cuda", "cpu"]


class Driver:
    """What is needed of the CUDA driver, with a context of its own on the first visible GPU."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._do("cuInit", lambda: self._cuda.cuInit(0))
        self._do(
            "cuDevicePrimaryCtxRetain", lambda: self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        )
        self._do("cuCtxSetCurrent", lambda: self._cuda.cuCtxSetCurrent(context))

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._do("cuMemGetInfo", lambda: self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def take(self, nbytes: int) -> int:
        """Allocate; where it is, or 0 where there was not so much."""
        block = ctypes.c_uint64()
        failed = self._cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(nbytes))
        return 0 if failed else block.value

    def give(self, block: int) -> None:
        """Give back what was taken."""
        self._do("cuMemFree", lambda: self._cuda.cuMemFree_v2(ctypes.c_uint64(block)))

    def _do(self, name: str, call: Callable[[], int]) -> None:
        if code := call():
            sys.exit(f"{name} failed with CUDA error {code}")


def hold(free_mib: int) -> None:
    """Take the memory, say how much is free, and keep it until standard input closes."""
    driver = Driver()
    # At least one page: this process's own context may have taken all that was asked for.
    if not driver.take(max(driver.free_bytes() - free_mib * MIB, 2 * MIB)):
        sys.exit("the memory can't be had")
    print(driver.free_bytes(), flush=True)
    sys.stdin.read()


def grow(device: Device) -> None:
    """Take so many MiB for every line of standard input, as far as they can be had in time; say how many.

    A line with 0 gives everything back.
    """
    driver = Driver() if device == "cuda" else None
    taken: list[bytes | int] = []
    print(0, flush=True)
    for line in sys.stdin:
        wanted, got, end = int(line), 0, time.monotonic() + PATIENCE_S
        while not wanted and taken:
            block = taken.pop()
            if driver is not None and isinstance(block, int):
                driver.give(block)
        while got < wanted and time.monotonic() < end:
            piece = min(STEP_MIB, wanted - got)
            block = b"1" * (piece * MIB) if driver is None else driver.take(piece * MIB)
            if block:
                taken.append(block)
                got += piece
            else:
                time.sleep(0.05)
        print(got, flush=True)


class _Other:
    """A process beside the one that is measured, which answers each line with a number."""

    def __init__(self, *words: str, gpu: int = 0) -> None:
        self._words = words
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._gpu = visible.split(",")[gpu] if visible else str(gpu)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, *self._words]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._gpu}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._hello = self._answer()
        return self

    @property
    def pid(self) -> int | None:
        """Of its process; None: it has none."""
        return self._process.pid if self._process is not None else None

    def _answer(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._words)}: exit code {self._process.wait()}")
        return int(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Ballast(_Other):
    """Holds the memory while the block runs. `free_bytes`: exactly what it left, as the driver counts."""

    def __init__(self, free_mib: int, device: Device = "cuda", *, gpu: int = 0) -> None:
        super().__init__("hold", str(free_mib), gpu=gpu)
        self._holds = device == "cuda"
        self.free_bytes = free_mib * MIB

    def __enter__(self) -> Self:
        if self._holds:
            super().__enter__()
            self.free_bytes = self._hello
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds:
            super().__exit__(kind, error, trace)


class Neighbour(_Other):
    """A process with a context from the start, which grows when told to."""

    def __init__(self, device: Device = "cuda") -> None:
        super().__init__("grow", device)

    def grow(self, mib: int) -> int:
        """Take so many MiB more, or as many as can be had in `PATIENCE_S`; how many."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mib}\n")
        self._process.stdin.flush()
        return self._answer()

    def leave(self) -> None:
        """Give everything back."""
        self.grow(0)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]))
    else:
        grow("cuda" if sys.argv[2] == "cuda" else "cpu")
