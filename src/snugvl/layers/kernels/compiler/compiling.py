"""Compiling kernels for a GPU before they are needed, in a process that doesn't touch it.

What is compiled lands in Triton's folder on disk, under a name made of the source, the types, the constants
and the GPU's compute capability. Whoever launches it later finds it there. No GPU memory is used: Triton is
given a driver that knows the capability and nothing else.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from snugvl.layers.kernels.compiler.dry_run import Launch
from snugvl.layers.kernels.compiler.keys import read
from snugvl.layers.kernels.device import Hardware


class _Described:
    """What compiling asks a driver."""

    def __init__(self, hardware: Hardware) -> None:
        major, minor = hardware.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(
    launches: Sequence[Launch], hardware: Hardware, threads: int = 1
) -> Iterator[tuple[Launch, Exception | None]]:
    """Compile what `dry_run` wrote down, in its order; each with what went wrong, if something did.

    For a process of its own: it can launch nothing afterwards.
    """
    driver.set_active(_Described(hardware))
    with ThreadPoolExecutor(threads) as pool:
        yield from zip(launches, pool.map(_compile, launches), strict=True)


def compiled(launch: Launch) -> Any:
    """Triton's compiled kernel, within `compile_all` or after it: found in the folder, or compiled now."""
    read(launch.kernel.kernel)
    return launch.kernel.kernel.warmup(*launch.values, grid=(1,), **launch.constants)


def _compile(launch: Launch) -> Exception | None:
    try:
        compiled(launch)
    except Exception as error:  # the others are wanted all the same; whoever launches it will see it
        return error
    return None
