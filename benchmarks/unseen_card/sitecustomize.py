"""A card that nobody has seen: its driver takes more of its memory, at once and later.

Python imports this where its folder is on PYTHONPATH. `SNUGVL_UNSEEN_MIB=150` has the process that runs our
engine lose 150 MiB when it makes its first stream, which is where a start measures the driver; and 12 MiB
more, three times, while it runs, as for kernels that load late. torch knows nothing of them. With
`SNUGVL_UNTOLD=1` NVML doesn't say what a process holds, as under WSL2. It is what `never_oom.py` uses for
`--unseen` and `--untold`.
"""

import ctypes
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

LATE_MIB, LATE_AFTER_S = 12, (6.0, 12.0, 18.0)
EXTRA_MIB = int(os.environ.get("SNUGVL_UNSEEN_MIB", "0"))


def take(mib: int) -> None:
    """Hold so much of the first GPU until this process ends."""
    driver, context, block = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxSetCurrent(context)
    driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(mib << 20))


def take_late() -> None:
    """Take a little more, now and then."""
    began = time.monotonic()
    for after_s in LATE_AFTER_S:
        time.sleep(max(began + after_s - time.monotonic(), 0))
        take(LATE_MIB)


def larger(module: ModuleType) -> None:
    """Have the driver take more with the first stream."""
    made = module.stream_on
    lost: list[bool] = []

    def stream_on(device: Any, purpose: str) -> Any:
        stream = made(device, purpose)
        if not lost:
            lost.append(True)
            take(EXTRA_MIB)
            threading.Thread(target=take_late, daemon=True).start()
        return stream

    module.stream_on = stream_on  # type: ignore[attr-defined]


def untold(module: ModuleType) -> None:
    """Have NVML name no process's memory."""
    module.held_by = lambda *_: 0  # type: ignore[attr-defined]


class Finder:
    """Finds one module, and changes it once it is there."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module, self._change = module, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As `importlib.abc.MetaPathFinder` has it."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = changed
        return spec


if EXTRA_MIB:
    sys.meta_path.insert(0, Finder("snugvl.layers.driver", larger))
if os.environ.get("SNUGVL_UNTOLD"):
    sys.meta_path.insert(0, Finder("snugvl.hardware.nvml", untold))
