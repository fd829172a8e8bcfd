"""What a network would launch: its own launch code, run without a GPU, without memory and without numbers.

    network, tensors on "meta" ── forward ──► product(), decode(), … ──► a launch ──► written down

Which kernels a step needs, in which tiles and for which types, is decided by code in many places, by shapes
alone. So it is asked itself: no list of kernels is kept that could fall behind it. Tensors without memory
know their shape, dtype, and how far from the beginning of their storage they begin; here they say, too, that
they are on a GPU, and code takes that path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from snugvl.layers.kernels.compiler.launch import Launched
from snugvl.layers.kernels.device import Hardware, described


@dataclass(frozen=True, slots=True)
class Address:
    """Of a tensor, as Triton looks at it: type, and a number that 16 divides or not."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel with what it would be given: addresses for tensors, and numbers."""

    kernel: Launched
    values: tuple[object, ...]
    constants: dict[str, object]

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
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.is_meta and not isinstance(made, _Elsewhere):
            return made.as_subclass(_Elsewhere)
        return made


@contextmanager
def dry_run(hardware: Hardware) -> Iterator[list[Launch]]:
    """Write down launches on `hardware` instead of launching, each variant once, in the order of first use.

    For a process of its own: kernels can't be launched meanwhile, in any thread.
    """
    launches: list[Launch] = []
    seen: set[object] = set()

    def note(kernel: Launched, values: tuple[object, ...], constants: dict[str, object]) -> None:
        variant = id(kernel), kernel.variant(values, constants)
        if variant not in seen:
            seen.add(variant)
            launches.append(Launch(kernel, tuple(map(_kept, values)), constants))

    assert Launched.instead is None, "one dry run at a time"
    Launched.instead = note
    try:
        with described(hardware), _Everywhere():
            yield launches
    finally:
        Launched.instead = None


def _kept(value: object) -> object:
    return Address(value.dtype, value.data_ptr()) if isinstance(value, torch.Tensor) else value
