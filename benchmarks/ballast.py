"""A card of another size: a process that holds all of GPU 0 but so many MiB.

    with Ballast(7200):    # whoever starts now finds 7,200 MiB free, its own CUDA context included
        …

Allocates through the driver alone, so the process needs no torch and costs one plain context.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

MIB = 1 << 20


def hold(free_mib: int) -> None:
    """Take the memory, say how much is free, and keep it until standard input closes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, block = ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def take() -> ctypes.c_size_t:
        # At least one page: this process's own context may have taken all that was asked for.
        return ctypes.c_size_t(max(free.value - free_mib * MIB, 2 * MIB))

    steps: list[tuple[str, Callable[[], int]]] = [
        ("cuInit", lambda: cuda.cuInit(0)),
        ("cuDevicePrimaryCtxRetain", lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)),
        ("cuCtxSetCurrent", lambda: cuda.cuCtxSetCurrent(context)),
        ("cuMemGetInfo", lambda: cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))),
        ("cuMemAlloc", lambda: cuda.cuMemAlloc_v2(ctypes.byref(block), take())),
        ("cuMemGetInfo", lambda: cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))),
    ]  # fmt: skip
    for name, call in steps:
        if code := call():
            sys.exit(f"{name} failed with CUDA error {code}")
    print(free.value, flush=True)
    sys.stdin.read()


class Ballast:
    """Holds the memory while the block runs. `free_bytes`: exactly what it left, as the driver counts."""

    def __init__(self, free_mib: int) -> None:
        self.free_mib = free_mib
        self.free_bytes = 0

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, str(self.free_mib)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"no ballast: exit code {self._process.wait()}")
        self.free_bytes = int(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
