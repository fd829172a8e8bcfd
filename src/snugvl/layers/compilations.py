"""Counts the kernels that had to be compiled in this process. All requests wait meanwhile, so each is logged.

What Triton finds in its folder on disk is not compiled: it is there within some milliseconds. What another
process compiles at this moment (`backends/native/ahead.py`) is waited for, and isn't compiled twice.
"""

import logging
import threading
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Compilations:
    """Triton's listener. `count`: kernels compiled; `loaded`: kernels that were asked for the first time,
    compiled or found: each goes to the device then."""

    def __init__(self, other: Any = None) -> None:
        """`other`: a listener that was there before, who goes on hearing everything."""
        self.count = self.loaded = 0
        self._other = other

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        """Triton's call after every kernel that a process asks for the first time; times in µs."""
        self.loaded += 1
        if not cache_hit:
            self.count += 1
            logger.info("compiled the kernel %s in %.2f s", src.name, times.total / 1e6)
        if self._other is not None:
            self._other(src=src, times=times, cache_hit=cache_hit, **more)


class Elsewhere:
    """Variants that other processes compile now, by digests. Safe to use from several threads."""

    def __init__(self, most_s: float = 60.0) -> None:
        """`most_s`: seconds that a variant is waited for."""
        self._most_s = most_s
        self._changed = threading.Condition()
        self._begun: dict[str, object] = {}  # and who compiles it

    def begins(self, digest: str, who: object) -> None:
        """Note that `who` compiles the variant `digest` from now on."""
        with self._changed:
            self._begun[digest] = who

    def ends(self, digest: str | None = None, who: object = None) -> None:
        """Note the end, good or bad, of compiling `digest`; without one, of all that `who` had begun."""
        with self._changed:
            for each, mine in list(self._begun.items()):
                if each == digest or (digest is None and mine is who):
                    del self._begun[each]
            self._changed.notify_all()

    def wait(self, digest: str) -> bool:
        """Wait until no process compiles the variant `digest`; returns whether one did."""
        with self._changed:
            if digest not in self._begun:
                return False
            self._changed.wait_for(lambda: digest not in self._begun, self._most_s)
            return True


elsewhere = Elsewhere()


def compilations(device: torch.device) -> Compilations:
    """Compilations of this process since the first call; none for a device that has no kernels."""
    return _of_triton() if device.type == "cuda" else Compilations()


@cache
def _of_triton() -> Compilations:
    from triton import knobs  # which only GPUs bring

    counted = Compilations(knobs.compilation.listener)
    knobs.compilation.listener = counted
    return counted
