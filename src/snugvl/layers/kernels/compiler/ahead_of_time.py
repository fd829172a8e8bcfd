"""Ahead-of-time compilation: the kernels that a network would launch, compiled before they are needed.

    network, tensors on "meta" ── forward ──► product(), decode(), … ──► a launch ──► written down ─► compiled

Which kernels a step needs, in which tiles and for which types, is decided by code in many places, by shapes
alone. So it is asked itself, without a GPU, without memory and without numbers: no list of kernels is kept
that could fall behind it. Tensors without memory know their shape, dtype, and how far from the beginning of
their storage they begin; in a dry run they also say that they are on a GPU, and code takes that path.

What is compiled lands in Triton's folder on disk, under a name made of the source, the types, the constants
and the GPU's compute capability. A later launch finds it there. No GPU memory is used: Triton is
given a driver that knows the capability and nothing else.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from snugvl.layers.kernels.compiler.launch import LaunchedKernel, read
from snugvl.layers.kernels.device import Hardware, described

BEGINS, ENDS = "begins", "ends"  # what is said of a variant that is compiled


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """The traits of a tensor that Triton looks at: its type, and whether 16 divides its address."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """The address, under a tensor's name for it."""
        return self.address


@dataclass(frozen=True, slots=True, eq=False)
class KernelLaunch:
    """A kernel with what it would be given: addresses for tensors, and numbers.

    `digest`: its variant's, see `LaunchedKernel.digest`.
    """

    kernel: LaunchedKernel
    values: tuple[object, ...]
    constants: dict[str, object]
    digest: str = ""

    @property
    def name(self) -> str:
        """The kernel's."""
        name: str = self.kernel.kernel.fn.__name__
        return name


class _Elsewhere(torch.Tensor):
    """A tensor without memory that takes the path of one on a GPU."""

    is_cuda = True


class _Everywhere(TorchFunctionMode):
    """Makes every new tensor one of those."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = _shape_of(function, args, kwargs)
        if made is NotImplemented:
            made = function(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.is_meta and not isinstance(made, _Elsewhere):
            return made.as_subclass(_Elsewhere)
        return made


def _product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return a.new_empty(len(a), b.shape[1]) if out is None else out


def _linear(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _attended(q: torch.Tensor, _: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _alike(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Any:
    return x.new_empty(x.shape, dtype=dtype) if x.is_contiguous() else NotImplemented


def _combined(a: torch.Tensor, b: Any) -> Any:
    if not all(each.is_contiguous() for each in (a, b) if isinstance(each, torch.Tensor)):
        return NotImplemented
    shape = np.broadcast_shapes(a.shape, b.shape) if isinstance(b, torch.Tensor) else a.shape
    return torch.empty(shape, dtype=torch.result_type(a, b), device="meta")


def _divided(a: torch.Tensor, b: Any) -> Any:
    return _combined(a, b) if a.is_floating_point() else NotImplemented


def _bent(x: torch.Tensor, *_: float, **bounds: float) -> Any:
    """Shape after `clamp` of floating-point values, or of whole ones between whole numbers."""
    numbers = {type(each) for each in (*_, *bounds.values())}
    plain = numbers <= {int, float} if x.is_floating_point() else numbers == {int}
    return _alike(x) if plain else NotImplemented


def _stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, len(tensors))
    return tensors[0].new_empty(shape)


def _repeated(x: torch.Tensor, *counts: int) -> torch.Tensor:
    sides = (*(1,) * (len(counts) - x.dim()), *x.shape)
    return x.new_empty([count * side for count, side in zip(counts, sides, strict=True)])


def _methods(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name) for name in names]


# Torch finds out in Python what these make of tensors without memory, ten times as slow, and reads sympy for
# it; meanwhile a process compiles nothing.
_SHAPED: Final[dict[Any, Callable[..., Any]]] = {
    torch.mm: _product,
    torch.addmm: lambda _, *factors, **more: _product(*factors, **more),
    torch.stack: _stacked,
    torch.Tensor.repeat: _repeated,
    functional.linear: _linear,
    functional.embedding: lambda ids, table, *_, **__: table.new_empty(*ids.shape, table.shape[1]),
    functional.scaled_dot_product_attention: _attended,
    **dict.fromkeys((torch.empty_like, functional.layer_norm, functional.gelu), _alike),
    **dict.fromkeys(_methods("add", "sub", "mul", "__rsub__"), _combined),
    **dict.fromkeys(_methods("div", "__rdiv__", "__rpow__"), _divided),
    **dict.fromkeys(_methods("cos", "sin", "clamp"), _bent),
    torch.Tensor.floor: _alike,
}

_IN_PLACE: Final = ("add_", "copy_", "gelu_", "mul_", "zero_")


def _shape_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of tensors without memory; `NotImplemented`: it has to be asked."""
    if function is torch.arange and torch.device(kwargs.get("device") or "cpu").type == "meta":
        return torch.arange(*args, **kwargs | {"device": "cpu"}).to("meta")
    shaped = _SHAPED.get(function)
    in_place = getattr(function, "__name__", None) in _IN_PLACE
    if (shaped is None and not in_place) or not args:
        return NotImplemented
    first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
    if not first.is_meta:
        return NotImplemented
    if shaped is None:
        return first
    try:
        return shaped(*args, **kwargs)
    except (TypeError, ValueError, AttributeError):  # said in a way that is not known here
        return NotImplemented


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Where torch has not imported its own compiler, it doesn't.

    What finds out shapes is written in Python, and its first call imports `torch._dynamo` (800 modules, a
    second; on a new machine five) for nothing but the answer that it is not for that compiler.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torch._dynamo"]
        vars(torch).pop("_dynamo", None)  # which would be imported where it is only asked for


@contextmanager
def dry_run(
    hardware: Hardware, noted: Callable[[KernelLaunch], None] = lambda _: None
) -> Iterator[list[KernelLaunch]]:
    """Write down launches on `hardware` instead of launching, each variant once, in the order of first use.

    For a process of its own: kernels can't be launched meanwhile, in any thread. `noted` is called with each.
    """
    launches: list[KernelLaunch] = []
    seen: set[object] = set()

    def note(kernel: LaunchedKernel, values: tuple[object, ...], constants: dict[str, object]) -> None:
        variant = id(kernel), kernel.variant(values, constants)
        if variant not in seen:
            seen.add(variant)
            launches.append(
                KernelLaunch(kernel, tuple(map(_kept, values)), constants, kernel.digest(values, constants))
            )
            noted(launches[-1])

    assert LaunchedKernel.instead is None, "one dry run at a time"
    LaunchedKernel.instead = note
    try:
        with described(hardware), _without_compiler(), _Everywhere():
            yield launches
    finally:
        LaunchedKernel.instead = None


def _kept(value: object) -> object:
    return TensorAddress(value.dtype, value.data_ptr()) if isinstance(value, torch.Tensor) else value


class _DescribedDriver:
    """The driver's properties that compiling needs."""

    def __init__(self, hardware: Hardware) -> None:
        major, minor = hardware.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Compiles launches that a `dry_run` writes down, meanwhile or afterwards, by some threads.

    For a process of its own: it can launch nothing afterwards.
    """

    def __init__(
        self, hardware: Hardware, threads: int = 1, said: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        """`said` gets `BEGINS` and then `ENDS` with the digest of each variant."""
        self._said = said
        driver.set_active(_DescribedDriver(hardware))
        self._pool = ThreadPoolExecutor(threads)
        self._begun: list[tuple[KernelLaunch, Future[Exception | None]]] = []

    def add(self, launch: KernelLaunch) -> Future[Exception | None]:
        """Compile one, when it is its turn; what went wrong, once it is done."""
        compiling = self._pool.submit(self._compile, launch)
        self._begun.append((launch, compiling))
        return compiling

    def _compile(self, launch: KernelLaunch) -> Exception | None:
        self._said(BEGINS, launch.digest)
        try:
            return _compile(launch)
        finally:
            self._said(ENDS, launch.digest)

    def then(self, call: Callable[[], object]) -> None:
        """Call it when all that was added before is compiled; by one thread."""
        self._pool.submit(call)

    def results(self) -> Iterator[tuple[KernelLaunch, Exception | None]]:
        """Each of them, in their order, with what went wrong, if something did; waiting for it."""
        for launch, compiling in self._begun:
            yield launch, compiling.result()
        self._pool.shutdown()


def compile_all(
    launches: Sequence[KernelLaunch], hardware: Hardware, threads: int = 1
) -> Iterator[tuple[KernelLaunch, Exception | None]]:
    """Compile what `dry_run` wrote down: see `Compiler`."""
    compiler = Compiler(hardware, threads)
    for launch in launches:
        compiler.add(launch)
    yield from compiler.results()


def compiled(launch: KernelLaunch) -> Any:
    """Triton's compiled kernel, within `compile_all` or after it: found in the folder, or compiled now."""
    read(launch.kernel.kernel)
    return launch.kernel.kernel.warmup(*launch.values, grid=(1,), **launch.constants)


def _compile(launch: KernelLaunch) -> Exception | None:
    try:
        _compile_launcher(compiled(launch))
    except Exception as error:  # the others are wanted all the same; launching this one raises it again
        return error
    return None


def _compile_launcher(kernel: Any) -> None:
    """The launcher that hands a kernel its values: until Triton 3.6 a program in C for each kind of them.

    The C compiler takes a third of a second for it, at a kernel's first launch.
    """
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
