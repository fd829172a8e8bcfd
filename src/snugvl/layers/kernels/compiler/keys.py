"""A kernel's key is the same in every process.

Triton keeps a compiled kernel under a key made of its source, of what it calls, and of the constants that
both read. Triton 3.6 takes the constants of a called function before it has read that function: the key of
`gemm` depends on whether another kernel that calls the same function was read earlier. What one process
compiled another would not find, and everybody would wait while it is compiled again. (Later versions read
first: `DependenciesFinder._update_hash` in `triton/runtime/jit.py`.)

So whatever a kernel calls is asked for its key first, the innermost function before all.
"""

import inspect
from types import ModuleType

from triton.runtime import JITFunction


def read(kernel: JITFunction) -> None:
    """Have Triton read a kernel and all that it calls, which it does once a process."""
    if kernel.hash is None:
        for called in _called(kernel):
            if called is not kernel:
                read(called)
    _ = kernel.cache_key


def _called(kernel: JITFunction) -> list[JITFunction]:
    """By its own name, or as a module's: `tl.sum`."""
    names = inspect.getclosurevars(kernel.fn)
    values = [*names.globals.values(), *names.nonlocals.values()]
    modules = [value for value in values if isinstance(value, ModuleType)]
    values += [getattr(module, name, None) for module in modules for name in kernel.fn.__code__.co_names]
    return [value for value in values if isinstance(value, JITFunction)]
