"""Counts the kernels that had to be compiled in this process. All requests wait meanwhile, so each is logged.

What Triton finds in its folder on disk is not compiled: it is there within some milliseconds.
"""

import logging
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Compilations:
    """Triton's listener.

    Attributes:
        count: kernels compiled.
        loaded: kernels that were asked for the first time, compiled or found: each goes to the device then.
    """

    def __init__(self, other: Any = None) -> None:
        """`other`: a listener that was there before, who goes on hearing everything."""
        self.count = self.loaded = 0
        self._other = other

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        """What Triton tells after every kernel that a process asks for the first time; times in µs."""
        self.loaded += 1
        if not cache_hit:
            self.count += 1
            logger.info("compiled the kernel %s in %.2f s", src.name, times.total / 1e6)
        if self._other is not None:
            self._other(src=src, times=times, cache_hit=cache_hit, **more)


def compilations(device: torch.device) -> Compilations:
    """Compilations of this process since the first call; none for a device that has no kernels."""
    return _of_triton() if device.type == "cuda" else Compilations()


@cache
def _of_triton() -> Compilations:
    from triton import knobs  # which only GPUs bring

    counted = Compilations(knobs.compilation.listener)
    knobs.compilation.listener = counted
    return counted
