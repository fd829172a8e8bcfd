"""What all networks of a process share: small tensors, made once a device, and torch's allocator.

The allocator can't give back what it holds free while a CUDA graph is captured, in whichever thread.
"""

from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Final, TypeVar

import torch

capturing: Final = RLock()  # held by who captures a CUDA graph, or gives back
Make = TypeVar("Make", bound=Callable[..., object])
_clearing: Final[list[Callable[[], None]]] = []


def shared(make: Make) -> Make:
    """Keep what `make` returns, by its arguments, until `clear_shared`: CUDA graphs read it where it is."""
    kept = cache(make)
    _clearing.append(kept.cache_clear)
    return kept  # type: ignore[return-value]


def give_back_free_blocks() -> None:
    """Give the driver what torch's allocator holds free, of all GPUs."""
    with capturing:
        torch.cuda.empty_cache()


def clear_shared() -> None:
    """Let go of all of them; each is made again when needed. No CUDA graph may be left that reads one."""
    for clear in _clearing:
        clear()
