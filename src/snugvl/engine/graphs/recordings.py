"""Recordings of steps and pictures that come again in the same size, in one piece of memory.

    first use     runs as ever, launch by launch          one of a size that never comes again costs nothing
    second use    runs on the recording's inputs, which compiles what is missing; then it is recorded
    later ones    the host fills the inputs and starts all of its kernels at once

A recording reads and writes fixed addresses: what `held` gives. Recordings are never replayed side by side,
so all that is in between shares one memory pool, which is claimed as one piece before the first is made. When
memory is short, all of them and the pool go at once, and whatever they did runs launch by launch.
"""

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from snugvl.engine.memory.shortage import out_of_memory
from snugvl.models.batch import Network

logger = logging.getLogger(__name__)

SMALL_BYTES = 8 << 20  # of a piece, for tensors of up to 1 MiB, which torch's allocator keeps apart
MOST = 24  # recordings; the least recently used goes
LATELY = 64  # sizes without one that are remembered
Work = Callable[[], None]
T = TypeVar("T")


class Recorder(Protocol):
    """How work becomes a recording. One that stores the work itself stands in for a GPU in tests."""

    def record(self, work: Work) -> Work:
        """What does the work again on the same addresses. Nothing is computed now."""
        ...

    def settle(self) -> None:
        """Wait for everything that was started."""
        ...

    def forget(self) -> None:
        """Let go of the memory pool, whose recordings are gone."""
        ...


class CudaRecorder:
    """CUDA graphs."""

    def __init__(self, device: torch.device, stream: Callable[[], Any]) -> None:
        """`stream`: that of all captures of the process; the library gets a workspace for each, for good."""
        self._device = device
        self._stream = stream
        self._pool: Any = None

    def record(self, work: Work) -> Work:
        """See `Recorder`."""
        graph, _ = captured(work, self._pool, self._stream())
        self._pool = self._pool or graph.pool()
        replay: Work = graph.replay
        return replay

    def settle(self) -> None:
        """See `Recorder`."""
        torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        """See `Recorder`."""
        self._pool = None


def captured(work: Callable[[], T], pool: Any, stream: Any) -> tuple[Any, T]:
    """A CUDA graph of `work`, and what that returned; its kernels are compiled, its handles made already.

    Args:
        pool: memory pool to record in, or None for a new one.
        stream: a `torch.cuda.Stream` to record on.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), _nothing_collected():
        # Not `torch.cuda.graph`, which first gives back all that torch's allocator holds free: the
        # workspace that was claimed at the start (`place.py`). Other threads may use the GPU meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return graph, result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python's garbage stays: a graph of an engine that is gone can't be freed while another is recorded."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Recordings:
    """Not thread-safe.

    Attributes:
        on: whether they are made. Not since memory was short, until `start`; nor since something couldn't be
            recorded, for good.
        made: how many were recorded, for whoever wants to know.
        replayed: how often one was used.
    """

    def __init__(
        self, recorder: Recorder, model: Network, nbytes: int, most: int = MOST, lately: int = LATELY
    ) -> None:
        """`nbytes`: of the pool, what is held in it included."""
        self.on = True
        self.made = self.replayed = 0
        self._recorder = recorder
        self._device, self._dtype = model.device, model.dtype
        self._nbytes = nbytes
        self._most, self._lately = most, lately
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._replays: OrderedDict[Hashable, Work] = OrderedDict()
        self._held: dict[str, Any] = {}
        self._kept: list[Work] = []  # recordings that made what is held: their pool lives as long as they
        self._broken = False

    def __len__(self) -> int:
        """How many there are now."""
        return len(self._replays)

    def due(self, key: Hashable) -> bool:
        """Whether work of this size is to go through `run`: it is recorded, or came lately."""
        if not self.on:
            return False
        if key in self._replays or key in self._seen:
            return bool(self._kept) or self._claimed()
        self._seen[key] = None
        if len(self._seen) > self._lately:
            self._seen.popitem(last=False)
        return False

    def held(self, name: str, make: Callable[[], T]) -> T:
        """Zeroed tensors that recordings read and write, made in their pool on first use; after `due`."""
        if name not in self._held:
            made: list[T] = []
            self._hold(lambda: made.append(make()))
            self._held[name] = made[-1]
        result: T = self._held[name]
        return result

    def run(self, key: Hashable, work: Work) -> None:
        """Do `work` by its recording, or do it and make one. Whatever the work raises passes through."""
        replay = self._replays.get(key)
        if replay is not None:
            self._replays.move_to_end(key)
            self.replayed += 1
            replay()
            return
        work()
        begun = time.monotonic()
        try:
            self._replays[key] = self._recorder.record(work)
        except Exception as error:
            self._give_up(error)
            return
        self.made += 1
        logger.info("recorded the CUDA graph of %s in %.2f s", key, time.monotonic() - begun)
        self._seen.pop(key, None)
        if len(self._replays) > self._most:
            self._recorder.settle()
            self._replays.popitem(last=False)

    def stop(self) -> None:
        """Let go of all of them and their memory, and make no more."""
        self.clear()
        self.on = False

    def start(self) -> None:
        """Make them again, as they are needed."""
        self.on = not self._broken

    def clear(self) -> None:
        """Let go of all of them; each is recorded again when it is needed."""
        if self._kept:
            self._recorder.settle()  # one may be running
        self._replays.clear()
        self._seen.clear()
        self._held.clear()
        self._kept.clear()
        self._recorder.forget()

    def _give_up(self, error: Exception) -> None:
        if out_of_memory(error):
            logger.warning("no memory for CUDA graphs of steps with prompts: %s", error)
        else:
            logger.exception("a step or a picture can't be recorded; from now on none is")
            self._broken = True
        self.stop()

    def _claimed(self) -> bool:
        """Whether there is a pool now."""
        try:
            self._products()  # its handles and kernels can't be made while something is recorded
            self._hold(self._claim)
        except Exception as error:
            self._give_up(error)
        return self.on

    def _hold(self, make: Work) -> None:
        """Record how tensors are made, so that they are in the pool, and fill them."""
        fill = self._recorder.record(make)
        fill()
        self._kept.append(fill)

    def _claim(self) -> None:
        """Take the pool in one piece, of which later recordings are cut.

        Before it comes what the library works in, which it keeps for good, once a stream: a part of the piece
        would hold all of it.
        """
        self._products()
        claim = max(self._nbytes - SMALL_BYTES, 0)
        torch.empty(claim, dtype=torch.uint8, device=self._device)

    def _products(self) -> None:
        one = torch.zeros(16, 16, dtype=self._dtype, device=self._device)
        torch.mm(one, one)
        torch.addmm(one[0], one, one)
