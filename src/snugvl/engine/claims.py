"""Memory that the models of one process share on a device, and its release when one of them is closed.

Some memory belongs to no model: free blocks of torch's allocators, on the GPU and page-locked ones beside it;
a workspace of the library (cuBLAS) for each thread and stream; small tensors that all networks read
(`layers/device.py`); and torch's limit on what it may take is one number a device.

    load ─► DeviceClaim ─► limit, weights, cache, graphs ─► release ─┬─ always: free blocks
                                                                    └─ the last one: workspaces, shared
                                                                       tensors, the limit of before

While another model is there its CUDA graphs read and write the latter. Nothing here asks the garbage
collector: the owner of tensors lets go of them first.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from traceback import clear_frames
from typing import Final
from weakref import WeakSet

import torch

from snugvl.core.resources import give_back_heap
from snugvl.layers.device import clear_shared, give_back_free_blocks

logger = logging.getLogger(__name__)

_lock: Final = RLock()  # the garbage collector may release one in the middle of another


class DeviceClaim:
    """One model's stay on a device, from before it is loaded until it is closed. Safe to use from any thread.
    `disturbed`: see `use`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.disturbed: Callable[[], None] = lambda: None
        self._closing: list[Callable[[], object]] = []
        with _lock:
            if device.type == "cuda" and device not in _limits:
                there = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
                # Before there is a CUDA context asking makes one; and what is free must be read first.
                _limits[device] = torch.cuda.get_per_process_memory_fraction(device) if there else 1.0
            _claims.add(self)

    def use(self, disturbed: Callable[[], None], *close: Callable[[], object]) -> None:
        """Have each of `close` called, in their order, when it is released, instead of any given before.

        `disturbed`: called, in any thread, when another model has gone, and with it what torch's allocator
        held free: the workspace of this one included.
        """
        self.disturbed = disturbed
        self._closing = list(close)

    def release(self) -> None:
        """Call the functions of `use`, then give torch's unused memory back. Safe to call twice."""
        self.disturbed = lambda: None
        while self._closing:
            _close(self._closing.pop(0))
        with _lock:
            _claims.discard(self)
            _give_back(self.device)


_claims: Final[WeakSet[DeviceClaim]] = WeakSet()
_limits: Final[dict[torch.device, float]] = {}  # share of it that torch might take before the first claim


def _close(close: Callable[[], object]) -> None:
    """Call it; on a GPU that has failed nothing can be closed, and the memory ends with the process."""
    try:
        close()
    except Exception as error:
        logger.warning("a part of the model can't be closed: %s", error)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _give_back_of_gpus(device)
    elif not _claims:
        clear_shared()
    give_back_heap()


def _give_back_of_gpus(device: torch.device) -> None:
    others = [each for each in _claims if each.device.type == "cuda"]
    if not others:
        clear_shared()
        torch._C._cuda_clearCublasWorkspaces()
    give_back_free_blocks()
    getattr(torch._C, "_host_emptyCache", lambda: None)()  # torch 2.8 has no public name for it
    if device in _limits and all(each.device != device for each in others):
        torch.cuda.set_per_process_memory_fraction(_limits.pop(device), device)
    for each in others:
        each.disturbed()


@contextmanager
def loading_onto(device: torch.device) -> Iterator[DeviceClaim]:
    """A claim that is released at once where loading fails.

    An error keeps the local variables of all functions that it came through, weights among them, for as long
    as the error is kept. They are cleared, but for those of the function that has this block and its
    callers: that one should hold nothing.
    """
    claim, before = DeviceClaim(device), sys.exception()
    try:
        yield claim
    except BaseException as error:  # also Ctrl+C
        _forget_variables(error, before)
        claim.release()
        raise


def _forget_variables(error: BaseException, before: BaseException | None) -> None:
    """Clear local variables of the functions that have ended with an error, and with those it came from.

    `before`: the error that the caller was handling already.
    """
    waiting, seen = [error], {id(before)}
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            clear_frames(each.__traceback__)
            waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
