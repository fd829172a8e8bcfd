"""A card that nobody has seen: its driver takes more of its memory, at once and later.

Python imports this where its folder is on PYTHONPATH. `SNUGVL_UNSEEN_MIB=150` has the process that runs our
engine lose 150 MiB when it makes its first stream, which is where a start measures the driver; and 12 MiB
more, three times, while it runs, as for kernels that load late. torch knows nothing of them. With
`SNUGVL_UNTOLD=1` NVML doesn't say what a process holds, as under WSL2. It is what `never_oom.py` uses for
`--unseen` and `--untold`.

`SNUGVL_FAULTS="nan:lone_codes compile:attend_chunk"` breaks kernels, in every process: `nan` and `slightly`
change what they write, `compile` and `raise` raise when they are launched, `illegal` reads where nothing is
(on a GPU), `crash` ends the process, `hang` never returns. `SNUGVL_AS_ON_A_GPU=1` is for tests without one:
kernels are interpreted where torch would do.
"""

import ctypes
import importlib.util
import os
import signal
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


class CompilationError(Exception):
    """As Triton's."""


def broken(name: str) -> str | None:
    """How a kernel is broken."""
    faults = (fault.partition(":") for fault in os.environ.get("SNUGVL_FAULTS", "").split())
    return next((fault for fault, _, kernel in faults if kernel == name), None)


def spoil(names: list[str], values: tuple[Any, ...], factor: float) -> None:
    """Multiply what a kernel has written."""
    import torch

    given = dict(zip(names, values, strict=False))
    out = given.get("out", given.get("query"))
    tensors = [each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()]
    (out if out is not None else tensors[-1]).mul_(factor)


def launch_broken(fault: str, names: list[str], values: tuple[Any, ...], launch: Callable[[], None]) -> None:
    """Launch a kernel that has a fault."""
    import torch

    if fault == "compile":
        raise CompilationError("no such instruction")
    if fault == "raise":
        raise RuntimeError("out of resources: shared memory")
    if fault == "hang":
        time.sleep(1e6)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGABRT)
    if fault == "illegal":
        ids = torch.tensor([1 << 40], device="cuda")
        torch.zeros(1, device="cuda")[ids].sum().item()
    launch()
    spoil(names, values, float("nan") if fault == "nan" else 1.1)


def break_kernels(module: ModuleType) -> None:
    """Have kernels fail when they are launched."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: Any = module.LaunchedKernel

    def break_kind(kind: Any) -> None:
        real = kind.__getitem__

        def take(kernel: Any, grid: Any) -> Any:
            inner = kernel.kernel if isinstance(kernel, launched) else kernel
            launch, fault = real(kernel, grid), broken(inner.fn.__name__)

            def run(*values: Any, **constants: Any) -> None:
                if fault is None or launched.instead is not None:
                    launch(*values, **constants)
                else:
                    launch_broken(fault, inner.arg_names, values, lambda: launch(*values, **constants))

            return run

        kind.__getitem__ = take

    break_kind(launched)
    break_kind(InterpretedFunction)


def break_compiler(module: ModuleType) -> None:
    """Have kernels fail when they are compiled ahead."""
    made = module.compiled

    def compiled(launch: Any) -> Any:
        if broken(launch.name) == "compile":
            raise CompilationError("no such instruction")
        return made(launch)

    module.compiled = compiled  # type: ignore[attr-defined]


def as_on_a_gpu(module: ModuleType) -> None:
    """Have kernels do what torch would, as quickly as the tests have them."""
    from tests.interpreter import quicken

    quicken()
    module.on_gpu = lambda _: True  # type: ignore[attr-defined]


def few_shapes(module: ModuleType) -> None:
    """Look at one small picture."""
    module.GRIDS = ((1, 4, 4),)  # type: ignore[attr-defined]
    module.BEFORE = 20  # type: ignore[attr-defined]


if os.environ.get("SNUGVL_FAULTS"):
    sys.meta_path.insert(0, Finder("snugvl.layers.kernels.compiler.launch", break_kernels))
    sys.meta_path.insert(0, Finder("snugvl.layers.kernels.compiler.ahead_of_time", break_compiler))
if os.environ.get("SNUGVL_AS_ON_A_GPU"):
    sys.meta_path.insert(0, Finder("snugvl.layers.replaced", as_on_a_gpu))
    sys.meta_path.insert(0, Finder("snugvl.engine.precompile", few_shapes))
if EXTRA_MIB:
    sys.meta_path.insert(0, Finder("snugvl.layers.device", larger))
if os.environ.get("SNUGVL_UNTOLD"):
    sys.meta_path.insert(0, Finder("snugvl.hardware.nvml", untold))
