"""Abilities of the hardware under the kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that kernels are chosen and compiled for. `capability`: CUDA's compute capability;
    `units`: multiprocessors."""

    capability: tuple[int, int]
    units: int


TENSOR_CORES = (8, 0)  # on which Triton multiplies: Ampere and later
NATIVE_FP8 = (8, 9)  # Ada and later
HOPPER = (9, 0)
_INTERPRETED = Hardware((0, 0), 4)  # of the interpreter: nothing special
_described: list[Hardware] = []


@contextmanager
def described(hardware: Hardware) -> Iterator[None]:
    """Take every tensor for one on `hardware`: for a process that prepares for a GPU without touching it."""
    _described.append(hardware)
    try:
        yield
    finally:
        _described.pop()


def hardware_of(device: torch.device) -> Hardware:
    """The hardware behind a device."""
    return _described[-1] if _described else _look(device)


@cache
def _look(device: torch.device) -> Hardware:
    if device.type != "cuda":
        return _INTERPRETED
    facts = torch.cuda.get_device_properties(device)
    return Hardware((facts.major, facts.minor), facts.multi_processor_count)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the hardware; (0, 0) where kernels are interpreted."""
    return hardware_of(device).capability


def tensor_cores(device: torch.device) -> bool:
    """Whether Triton multiplies on tensor cores (Ampere and later); before, in loops over registers."""
    return capability(device) >= TENSOR_CORES or hardware_of(device) == _INTERPRETED


def native_fp8(device: torch.device) -> bool:
    """Whether the hardware converts float8 (Ada and later)."""
    return capability(device) >= NATIVE_FP8


def in_loops(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton multiplies in loops, with operands whole in registers, and tiles have to be small.

    So it does before Ampere, and everywhere in float32; Hopper keeps the tiles that were measured there.
    """
    card = capability(device)
    return card not in (_INTERPRETED.capability, HOPPER) and (card < TENSOR_CORES or dtype.itemsize == 4)
