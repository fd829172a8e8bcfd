"""Launching compiled kernels: without asking Triton anew which one it is, and before the last one has ended.

A step of a prompt starts hundreds of kernels, of 5 to 20 µs each. Triton takes longer than that to see
which compiled variant a launch needs, and asks hooks that aren't set: about 15 µs on a fast host, 70 on a
busy one. What it looks at is little, and is looked at here in a third of the time; the first launch of each
variant goes through Triton as ever.

    @launched            above `@triton.jit`; then `kernel[grid](*values, NAME=constant, num_warps=4)`
    @triton.jit          as before: what varies by position, constants by name
    def kernel(…)

A variant that was never compiled on this machine takes a second or more, and everybody waits. So what Triton
compiles a kernel anew for is as little as can be: numbers of tokens, of blocks or of rows are not looked at
(`do_not_specialize`), nor where index tensors begin; and what a model will need is compiled before it is
needed (`ahead_of_time.py`), for which `LaunchedKernel.instead` is there.

It is found under a key made of its source, of what it calls, and of the constants that both read. Triton 3.6
takes the constants of a called function before it has read that function: the key of `gemm` depends on
whether another kernel that calls the same function was read earlier. What one process compiled another would
not find, and everybody would wait while it is compiled again. (Later versions read first:
`DependenciesFinder._update_hash` in `triton/runtime/jit.py`.) So whatever a kernel calls is asked for its key
first, the innermost function before all: `read`.

Between two kernels the GPU idles for about a microsecond: the last programs end, memory is flushed, the next
kernel is launched. From Hopper on a kernel can be launched before, and wait where it needs what others wrote:
`pdl`, programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization").

How a compiled kernel is started is what `JITFunction.run` does in Triton 3.6 to 3.9;
`tests/layers/kernels/test_launch.py` holds it to that.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from types import ModuleType
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import JITFunction, driver

from snugvl.layers.compilations import elsewhere
from snugvl.layers.kernels.device import capability

_ONE_BY_ONE = threading.Lock()
Instead = Callable[["LaunchedKernel", tuple[object, ...], dict[str, object]], None]


class LaunchedKernel:
    """A kernel and its compiled variants.

    Attributes:
        instead: given every launch of any kernel, in place of launching it: the kernel, its values and its
            constants. For a process that has no GPU.
    """

    instead: ClassVar[Instead | None] = None

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._looks = tuple(kind if p.do_not_specialize else trait for p in kernel.params)
        self._variants: dict[object, tuple[Any, ...]] = {}
        # The same by all traits, whether the kernel looks at them or not: that is quicker to say.
        self._seen: dict[object, tuple[Any, ...] | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: object, **constants: object) -> None:
            if LaunchedKernel.instead is not None:
                LaunchedKernel.instead(self, values, constants)
                return
            device = driver.active.get_current_device()
            key = (device, *map(trait, values), *constants.items())
            found = self._seen.get(key)
            if found is None:
                variant = (device, *self.variant(values, constants))
                found = self._seen[key] = self._variants.get(variant)
            if found is None:
                self._seen[key] = self._variants[variant] = self._first(grid, values, constants)
                return
            run, function, metadata, rest = found
            x, y, z = (*grid, 1, 1)[:3]
            stream = driver.active.get_current_stream(device)
            run(x, y, z, stream, function, metadata, None, None, None, *values, *rest)  # None: no hooks

        return launch

    def variant(self, values: tuple[object, ...], constants: dict[str, object]) -> tuple[object, ...]:
        """Equal for two launches that the same compiled kernel serves."""
        looks = zip(self._looks, values, strict=False)  # constants are not values
        return (*[look(value) for look, value in looks], *constants.items())

    def digest(self, values: tuple[object, ...], constants: dict[str, object]) -> str:
        """A variant's name, the same in every process."""
        said = f"{self.kernel.fn.__name__} {self.variant(values, constants)}"
        return sha256(said.encode()).hexdigest()[:16]

    def _first(
        self, grid: tuple[int, ...], values: tuple[object, ...], constants: dict[str, object]
    ) -> tuple[Any, ...]:
        """Launch by Triton, which compiles; what later launches of the variant need.

        One after the other: weights are rounded by several threads, of which each would compile for itself.
        """
        elsewhere.wait(self.digest(values, constants))
        with _ONE_BY_ONE:
            read(self.kernel)
            compiled = self.kernel[grid](*values, **constants)
        names = self.kernel.arg_names[len(values) :]
        rest = tuple(constants[name] for name in names)
        return compiled.run, compiled.function, compiled.packed_metadata, rest


def trait(value: Any) -> object:
    """The trait by which Triton compiles variants: type, and whether 16 divides an address or a number."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() & 15 == 0
    if isinstance(value, int):
        return value == 1, value & 15 == 0, -0x80000000 <= value <= 0x7FFFFFFF
    return type(value)


def kind(value: Any) -> object:
    """`trait` where a kernel asks Triton not to look at the number or the address."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return -0x80000000 <= value <= 0x7FFFFFFF if isinstance(value, int) else type(value)


Seen = Callable[[str, object, str, Callable[[], None]], None]


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Hand over every launch: the kernel's name, which variant, shapes, and what launches it.

    For a process of its own, which checks kernels: without it no launch is slower.
    """
    from triton.runtime.interpreter import InterpretedFunction  # which only tests use

    def watching(kind: Any) -> None:
        real = kind.__getitem__

        def take(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
            launch = real(kernel, grid)
            compiled = isinstance(kernel, LaunchedKernel)
            name = (kernel.kernel if compiled else kernel).fn.__name__

            def run(*values: object, **constants: object) -> None:
                variant = kernel.variant(values, constants) if compiled else _interpreted(values, constants)
                seen(name, variant, _shapes(values), partial(launch, *values, **constants))

            return run

        kind.__getitem__ = take
        undo.callback(setattr, kind, "__getitem__", real)

    with ExitStack() as undo:
        for each in (LaunchedKernel, InterpretedFunction):
            watching(each)
        yield


def _interpreted(values: tuple[object, ...], constants: dict[str, object]) -> tuple[object, ...]:
    return (*map(kind, values), *constants.items())


def _shapes(values: tuple[object, ...]) -> str:
    """Shapes of the first tensors that a kernel is given, such as "1×2048 6144×256"."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return " ".join("×".join(map(str, each.shape)) or "1" for each in tensors[:3])


def launched(kernel: Any) -> Any:
    """Make a kernel's launches quick; in Triton's interpreter it stays as it is."""
    return LaunchedKernel(kernel) if isinstance(kernel, JITFunction) else kernel


def read(kernel: JITFunction) -> None:
    """Have Triton read a kernel and all that it calls, which it does once a process."""
    if kernel.hash is None:
        for called in _called(kernel):
            if called is not kernel:
                read(called)
    _ = kernel.cache_key


def _called(kernel: JITFunction) -> list[JITFunction]:
    """The kernels that a kernel calls, by name or as a module's function (`tl.sum`)."""
    names = inspect.getclosurevars(kernel.fn)
    values = [*names.globals.values(), *names.nonlocals.values()]
    modules = [value for value in values if isinstance(value, ModuleType)]
    values += [getattr(module, name, None) for module in modules for name in kernel.fn.__code__.co_names]
    return [value for value in values if isinstance(value, JITFunction)]


@triton.jit
def wait_for_others(PDL: tl.constexpr):
    """Wait for all that was launched before, then let the next kernel be launched."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def pdl(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch: start early where the hardware can.

    The kernel must wait before it reads what another kernel writes, and before it writes anything.
    """
    return {"PDL": True, "launch_pdl": True} if capability(device) >= (9, 0) else {"PDL": False}
