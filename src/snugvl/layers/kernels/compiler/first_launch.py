"""The questions that the first launch of a kernel asks Triton, asked while something else is waited for.

To find a compiled kernel on disk Triton hashes all of itself (400 MB), asks the assembler for its version and
reads the sources of the kernel and of what it calls; on a new machine it compiles a part of its own, in C.
None of it needs a GPU, and most of it no lock of Python's; the answers are kept by Triton for the process.
What fails here is asked again by that launch.
"""

import sys
from contextlib import suppress
from typing import Final

KERNELS: Final = "snugvl.layers.kernels."


def read_triton(compute_capability: tuple[int, int] | None) -> bool:
    """Read what kernels for such a GPU have in common; whether that worked. Imports no torch.

    None: for a process that launches none, so that Triton's part in C isn't compiled for it.
    """
    with suppress(Exception):
        from triton.backends.nvidia.compiler import get_ptxas_version
        from triton.runtime.build import platform_key
        from triton.runtime.cache import triton_key

        major, minor = compute_capability or (8, 0)
        get_ptxas_version(10 * major + minor)
        platform_key()
        triton_key()
        if compute_capability is not None:
            has_launcher()
        return True
    return False


def has_launcher() -> bool:
    """Whether Triton's part in C, which launches kernels, is compiled; it is now, where that is possible.

    It needs a C compiler, Python's headers and the GPU's driver, once on a machine.
    """
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
        return True
    return False


def read_kernels() -> bool:
    """The sources of the kernels that every model needs; whether that worked."""
    with suppress(Exception):
        from snugvl.layers.kernels.compiler.launch import LaunchedKernel, read
        from snugvl.layers.kernels.products import dequantize  # noqa: F401

        modules = [each for name, each in sys.modules.items() if name.startswith(KERNELS)]
        for value in [value for module in modules for value in vars(module).values()]:
            if isinstance(value, LaunchedKernel):
                read(value.kernel)
        return True
    return False
