"""CUDA graphs of steps and pictures that come again in the same size, in one piece of memory.

    first use     runs as ever, launch by launch          one of a size that never comes again costs nothing
    second use    runs on the graph's buffers, which compiles what is missing; before the next step, when its
                  tokens are told, it is captured
    later ones    the host fills the buffers and starts all of its kernels at once

A graph reads and writes fixed addresses: what `buffers` gives. Graphs are never replayed side by side, so all
that is in between shares one memory pool, which is claimed as one piece before the first is captured. When
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

from snugvl.engine.oom import out_of_memory
from snugvl.layers.shared import capturing
from snugvl.models.batch import Network

logger = logging.getLogger(__name__)

SMALL_BYTES = 8 << 20  # of a piece, for tensors of up to 1 MiB, which torch's allocator keeps apart
MOST = 24  # graphs; the least recently used goes
LATELY = 64  # sizes without one that are remembered
Work = Callable[[], None]
T = TypeVar("T")


class GraphCapturer(Protocol):
    """How work becomes a CUDA graph. One that stores the work itself stands in for a GPU in tests."""

    def capture(self, work: Work) -> Work:
        """What does the work again on the same addresses. Nothing is computed now."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was started."""
        ...

    def drop_pool(self) -> None:
        """Let go of the memory pool, whose graphs are gone."""
        ...


class CudaCapturer:
    """CUDA graphs."""

    def __init__(self, device: torch.device, stream: Callable[[], Any]) -> None:
        """`stream`: that of all captures of the process; the library gets a workspace for each."""
        self._device = device
        self._stream = stream
        self._pool: Any = None

    def capture(self, work: Work) -> Work:
        """See `GraphCapturer`."""
        graph, _ = capture(work, self._pool, self._stream())
        self._pool = self._pool or graph.pool()
        replay: Work = graph.replay
        return replay

    def synchronize(self) -> None:
        """See `GraphCapturer`."""
        torch.cuda.synchronize(self._device)

    def drop_pool(self) -> None:
        """See `GraphCapturer`."""
        self._pool = None


def capture(work: Callable[[], T], pool: Any, stream: Any) -> tuple[Any, T]:
    """A CUDA graph of `work`, and what that returned; its kernels are compiled, its handles made already.

    Args:
        pool: memory pool to capture in, or None for a new one.
        stream: a `torch.cuda.Stream` to capture on.
    """
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with capturing, torch.cuda.stream(stream), _nothing_collected():
        # Not `torch.cuda.graph`, which first gives back all that torch's allocator holds free: the
        # workspace that was claimed at the start (`engine/memory.py`). Other threads may use the GPU
        # meanwhile.
        stream.wait_stream(before)
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return graph, result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python's garbage stays: a graph of an engine that is gone can't be freed while another is captured."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class GraphPool:
    """The graphs that there are now, and their memory. Not thread-safe.

    Attributes:
        on: whether graphs are captured. Not since memory was short, until `start`; nor since something
            couldn't be captured, for good.
        captures: how many were captured.
        replays: how often one was used.
    """

    def __init__(
        self, capturer: GraphCapturer, model: Network, nbytes: int, most: int = MOST, lately: int = LATELY
    ) -> None:
        """`nbytes`: of the pool, what is held in it included."""
        self.on = True
        self.captures = self.replays = 0
        self._capturer = capturer
        self._device, self._dtype = model.device, model.dtype
        self._nbytes = nbytes
        self._most, self._lately = most, lately
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._replays: OrderedDict[Hashable, Work] = OrderedDict()
        self._buffers: dict[str, Any] = {}
        self._kept: list[Work] = []  # graphs that made the buffers: their pool lives as long as they
        self._broken = False
        self._due: dict[Hashable, Work] = {}  # has run, and is to be captured

    def __len__(self) -> int:
        """How many there are now."""
        return len(self._replays)

    def admit(self, key: Hashable) -> bool:
        """Whether work of this size is to go through `run`: it has a graph, or came lately.

        Remembers the size, and claims the pool before the first graph.
        """
        if not self.on:
            return False
        if key in self._replays or key in self._seen:
            return bool(self._kept) or self._claim_pool()
        self._seen[key] = None
        if len(self._seen) > self._lately:
            self._seen.popitem(last=False)
        return False

    def buffers(self, name: str, make: Callable[[], T]) -> T:
        """Zeroed tensors that graphs read and write, made in their pool on first use; after `admit`."""
        if name not in self._buffers:
            made: list[T] = []
            self._hold(lambda: made.append(make()))
            self._buffers[name] = made[-1]
        result: T = self._buffers[name]
        return result

    def run(self, key: Hashable, work: Work) -> None:
        """Do `work` by its graph, or do it; `capture_due` will capture it. What it raises passes through."""
        replay = self._replays.get(key)
        if replay is not None:
            self._replays.move_to_end(key)
            self.replays += 1
            replay()
            return
        work()
        self._due[key] = work

    @property
    def has_due(self) -> bool:
        """Whether `capture_due` has something to capture."""
        return self.on and bool(self._due)

    def capture_due(self) -> None:
        """Capture what ran since the last time. It takes as long as a step, so call it while none waits."""
        while self.on and self._due:
            key, work = self._due.popitem()
            begun = time.monotonic()
            try:
                self._replays[key] = self._capturer.capture(work)
            except Exception as error:
                self._give_up(error)
                return
            self.captures += 1
            logger.info("captured the CUDA graph of %s in %.2f s", key, time.monotonic() - begun)
            self._seen.pop(key, None)
            if len(self._replays) > self._most:
                self._capturer.synchronize()
                self._replays.popitem(last=False)

    def stop(self) -> None:
        """Let go of all of them and their memory, and make no more."""
        self.clear()
        self.on = False

    def start(self) -> None:
        """Make them again, as they are needed."""
        self.on = not self._broken

    def clear(self) -> None:
        """Let go of all of them; each is captured again when it is needed."""
        if self._kept:
            self._capturer.synchronize()  # one may be running
        self._replays.clear()
        self._due.clear()
        self._seen.clear()
        self._buffers.clear()
        self._kept.clear()
        self._capturer.drop_pool()

    def _give_up(self, error: Exception) -> None:
        if out_of_memory(error):
            logger.warning("no memory for CUDA graphs of steps with prompts: %s", error)
        else:
            logger.exception("a step or a picture can't be captured; from now on none is")
            self._broken = True
        self.stop()

    def _claim_pool(self) -> bool:
        """Claim the pool; whether that worked."""
        try:
            self._warm_up()  # its handles and kernels can't be made while something is captured
            self._hold(self._claim)
        except Exception as error:
            self._give_up(error)
        return self.on

    def _hold(self, make: Work) -> None:
        """Capture how tensors are made, so that they are in the pool, and fill them."""
        fill = self._capturer.capture(make)
        fill()
        self._kept.append(fill)

    def _claim(self) -> None:
        """Take the pool in one piece, of which later graphs are cut.

        Before it comes what the library works in, which it keeps for good, once a stream: a part of the piece
        would hold all of it.
        """
        self._warm_up()
        claim = max(self._nbytes - SMALL_BYTES, 0)
        torch.empty(claim, dtype=torch.uint8, device=self._device)

    def _warm_up(self) -> None:
        one = torch.zeros(16, 16, dtype=self._dtype, device=self._device)
        torch.mm(one, one)
        torch.addmm(one[0], one, one)
