"""Kernels that this card has: all, but for those that a check found wrong (`engine/kernel_check.py`).

Code that has a kernel and plain torch, or another kernel, for the same asks here which one to take. It asks
when it chooses, on the host: a CUDA graph holds what was chosen when it was recorded, and asks no more. So
kernels are withdrawn before anything runs. Names are those of the kernels' functions, such as "lone_codes".
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

# Where plain torch in their place reads lengths on the host, which no CUDA graph may. Attention of either
# kind of step takes the other's kernels first.
_ON_HOST: Final = (
    {"rope_and_cache"}, {"convolve"}, {"slide"}, {"correct"}, {"solve"}, {"scan"}, {"gate"},
    {"sort_pairs"}, {"grouped"}, {"grouped_blocks"}, {"attend_chunk", "attend_splits"},
    {"attend_chunk", "merge_splits"},
)  # fmt: skip
_withdrawn: set[str] = set()
_plainly: list[bool] = []


def on_gpu(x: torch.Tensor) -> bool:
    """Whether there are kernels for a tensor."""
    return x.is_cuda


def by_kernels(x: torch.Tensor, *names: str) -> bool:
    """Whether what is to be done with `x` is done by kernels, those of `names` among them."""
    return on_gpu(x) and not _plainly and _withdrawn.isdisjoint(names)


def usable(*names: str) -> bool:
    """Whether none of these kernels is withdrawn."""
    return _withdrawn.isdisjoint(names)


def withdrawn() -> tuple[str, ...]:
    """Names of the kernels that are not used, sorted."""
    return tuple(sorted(_withdrawn))


def withdraw(names: Iterable[str]) -> None:
    """Stop using these kernels in this process; CUDA graphs recorded before keep them."""
    _withdrawn.update(names)


def recordable() -> bool:
    """Whether steps can be CUDA graphs with what is left."""
    return not any(names <= _withdrawn for names in _ON_HOST)


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Also stop using these kernels inside the `with`. For a process that runs nothing else."""
    before = set(_withdrawn)
    _withdrawn.update(names)
    try:
        yield
    finally:
        _withdrawn.clear()
        _withdrawn.update(before)


@contextmanager
def plainly() -> Iterator[None]:
    """Let plain torch do everything for a while. For a process that runs nothing else."""
    _plainly.append(True)
    try:
        yield
    finally:
        _plainly.pop()
