"""All CUDA graphs of an engine: decode steps, steps with prompts, pictures and drafts.

A graph reads and writes fixed addresses. Two kinds of them differ in when they are captured, and in how they
end:

    kind                    captured                                   ends
    decode, choose          at once, before the step that needs it     `clear`: another cache size, the end
    step, picture, drafts   when its size comes for the second time    as above; under memory pressure; and
                                                                       the least recently used beyond `MOST`

The first kind is *lasting*, the second *spare*: it saves time where memory is plenty.

    first use     runs as ever, launch by launch          one of a size that never comes again costs nothing
    second use    runs on the graph's buffers, which compiles what is missing; before the next step, when its
                  tokens are delivered, it is captured
    later ones    the host fills the buffers and starts all of its kernels at once

Graphs are never replayed side by side, so those of a kind share one memory pool of torch's, which gives its
memory back when all of its graphs are gone, and not before: under pressure the spare ones and their pool go
at once, and decode steps go on. The spare pool is claimed as one piece before its first graph is captured.
"""

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import torch

from snugvl.layers.device import capturing, out_of_memory, release
from snugvl.models.batch import Network

logger = logging.getLogger(__name__)

SMALL_BYTES = 8 << 20  # of a piece, for tensors of up to 1 MiB, which torch's allocator keeps apart
MOST = 24  # spare graphs; the least recently used goes
LATELY = 64  # sizes without one that are remembered
Work = Callable[[], None]
T = TypeVar("T")
Pool = Literal["lasting", "spare"]
Kind = Literal["decode", "choose", "step", "picture", "drafts"]
LASTING: Final = ("decode", "choose")


class GraphKey(NamedTuple):
    """The key of a graph: its kind and sizes (sequences; tokens and sequences; a grid; rows and drafts)."""

    kind: Kind
    size: tuple[int, ...]

    @property
    def pool(self) -> Pool:
        """The memory pool that its graph is captured in."""
        return "lasting" if self.kind in LASTING else "spare"

    def __str__(self) -> str:
        return f"{self.kind} of {' × '.join(map(str, self.size))}"


class GraphCapturer(Protocol):
    """Makes CUDA graphs of work. One that stores the work itself stands in for a GPU in tests."""

    def capture(self, work: Work, pool: Pool) -> Work:
        """Capture work in a pool; returns what does it again on the same addresses. Nothing is computed."""

    def synchronize(self) -> None:
        """Wait for everything that was started."""

    def drop_pool(self, pool: Pool) -> None:
        """Let go of a memory pool, whose graphs are gone."""


class CudaCapturer:
    """Makes CUDA graphs on a GPU."""

    def __init__(self, device: torch.device, stream: Callable[[], Any]) -> None:
        """`stream`: returns the stream of all captures of the process; the library gets a workspace each."""
        self._device = device
        self._stream = stream
        self._pools: dict[Pool, Any] = {}

    def capture(self, work: Work, pool: Pool) -> Work:
        """See `GraphCapturer`."""
        graph = captured(work, self._pools.get(pool), self._stream())
        self._pools.setdefault(pool, graph.pool())
        replay: Work = graph.replay
        return replay

    def synchronize(self) -> None:
        """See `GraphCapturer`."""
        torch.cuda.synchronize(self._device)

    def drop_pool(self, pool: Pool) -> None:
        """See `GraphCapturer`."""
        self._pools.pop(pool, None)


def captured(work: Work, pool: Any, stream: Any) -> Any:
    """A CUDA graph of `work`, whose kernels are compiled and whose handles are made already. `pool`: memory
    pool to capture in, or None for a new one; `stream`: a `torch.cuda.Stream` to capture on."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with capturing, torch.cuda.stream(stream), _nothing_collected():
        # Not `torch.cuda.graph`, which first gives back all that torch's allocator holds free: the
        # workspace that was claimed at the start (`engine/memory.py`). Other threads may use the GPU
        # meanwhile.
        stream.wait_stream(before)
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


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


class GraphCache:
    """The graphs that there are now, and their memory. Not thread-safe.

    Attributes:
        capturer: what makes graphs.
        nbytes: of the spare graphs' pool, what is held in it included; 0: there are none.
        most: spare graphs at most; the least recently used goes. `lately`: sizes that are remembered.
        on: whether spare graphs are captured. Not since memory was short, until `start`; nor since something
            couldn't be captured, for good.
        captures: how many graphs were captured, each again after a `clear`.
        replays: how often a spare one was used.
        released: whether a lasting one was short of memory, so that torch gave the driver back what was free,
            the claimed workspace included. `engine/memory.py` claims it again, and sets this to False.
    """

    def __init__(
        self, capturer: GraphCapturer, model: Network, nbytes: int = 0, most: int = MOST, lately: int = LATELY
    ) -> None:
        self.nbytes = nbytes
        self.on = nbytes > 0
        self.captures = self.replays = 0
        self.released = False
        self.capturer = capturer
        self._device, self._dtype = model.device, model.dtype
        self.most, self.lately = most, lately
        self._replays: OrderedDict[GraphKey, Work] = OrderedDict()
        self._short: set[GraphKey] = set()  # lasting ones that memory was short of
        self._seen: OrderedDict[GraphKey, None] = OrderedDict()
        self._buffers: dict[str, Any] = {}
        self._kept: list[Work] = []  # graphs that made the buffers: their pool lives as long as they
        self._broken = False
        self._due: dict[GraphKey, Work] = {}  # has run, and is to be captured
        self._forget: dict[Pool, list[Callable[[], None]]] = {"lasting": [], "spare": []}

    @property
    def given_bytes(self) -> int:
        """Bytes of the plan that spare graphs don't take, because they were given up."""
        return 0 if self.on else self.nbytes

    @property
    def spare(self) -> int:
        """Number of spare graphs now."""
        return sum(key.pool == "spare" for key in self._replays)

    def on_void(self, pool: Pool, forget: Callable[[], None]) -> None:
        """Have `forget` called whenever the graphs of a pool go: it lets go of tensors that they use."""
        self._forget[pool].append(forget)

    def note_release(self) -> None:
        """Note that free memory of torch's allocator went back to the driver. Safe to call in any thread."""
        self.released = True

    # Lasting graphs

    def lacks(self, key: GraphKey) -> bool:
        """Whether a lasting graph isn't captured, and memory wasn't short of it since the last `clear`."""
        return key not in self._replays and key not in self._short

    def ensure(self, key: GraphKey, attempt: Work) -> bool:
        """Have a lasting graph captured at once unless there is one; whether there is one now.

        One that memory was short of is tried once more with all that torch keeps for later given back, which
        it can't do while it captures; then not before `clear`.

        Args:
            attempt: makes what the graph reads and writes, does the work once (which compiles its kernels and
                makes its handles, as a capture can't), and calls `capture`.
        """
        if self.lacks(key) and not self._fits(attempt):
            self.released = True
            release(self._device)
            if not self._fits(attempt):
                self._short.add(key)
                logger.warning("no memory for the CUDA graph of %s: its steps run without", key)
        return key in self._replays

    def capture(self, key: GraphKey, work: Work) -> None:
        """Capture a graph, on the stream of all captures."""
        begun = time.monotonic()
        self._replays[key] = self.capturer.capture(work, key.pool)
        self.captures += 1
        logger.info("captured the CUDA graph of %s in %.2f s", key, time.monotonic() - begun)

    def replay(self, key: GraphKey) -> None:
        """Start the graph of a key, which must be captured."""
        self._replays[key]()

    def _fits(self, attempt: Work) -> bool:
        """Whether there was memory to capture a lasting graph."""
        try:
            attempt()
        except Exception as error:
            if not out_of_memory(error):
                raise
            logger.info("no memory for a CUDA graph: %s", error)
            clear_frames(error.__traceback__)  # they hold the step's tensors
            return False
        return True

    # Spare graphs

    def admit(self, key: GraphKey) -> bool:
        """Whether spare work of this size is to go through `run`: it has a graph, or came lately.

        Remembers the size, and claims the pool before the first graph.
        """
        if not self.on:
            return False
        if key in self._replays or key in self._seen:
            return bool(self._kept) or self._claim_pool()
        self._seen[key] = None
        if len(self._seen) > self.lately:
            self._seen.popitem(last=False)
        return False

    def buffers(self, name: str, make: Callable[[], T]) -> T:
        """Zeroed tensors that spare graphs use, made in their pool on first use; call it after `admit`."""
        if name not in self._buffers:
            made: list[T] = []
            self._hold(lambda: made.append(make()))
            self._buffers[name] = made[-1]
        result: T = self._buffers[name]
        return result

    def run(self, key: GraphKey, work: Work) -> None:
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
        """Capture what ran since the last time, between steps: each capture takes as long as a step."""
        while self.on and self._due:
            key, work = self._due.popitem()
            try:
                self.capture(key, work)
            except Exception as error:
                self._give_up(error)
                return
            self._seen.pop(key, None)
            if self.spare > self.most:
                self.capturer.synchronize()
                del self._replays[next(key for key in self._replays if key.pool == "spare")]

    # How graphs end

    def stop(self) -> None:
        """Give back all spare graphs and their memory, which is wanted elsewhere, and capture no more."""
        was_on, self.on = self.on, False
        self._drop("spare")
        self._void("spare")
        if was_on:
            release(self._device)

    def start(self) -> None:
        """Capture spare graphs again, as they are needed."""
        self.on = self.nbytes > 0 and not self._broken

    def clear(self) -> None:
        """Let go of all graphs and their memory; each is captured again when it is needed."""
        self._drop("lasting")
        self._drop("spare")
        self._void("lasting")
        self._void("spare")

    def close(self) -> None:
        """Let go of all graphs for good, and of whatever was given to `on_void`."""
        self.clear()
        self._forget = {"lasting": [], "spare": []}

    def _drop(self, pool: Pool) -> None:
        gone = [key for key in self._replays if key.pool == pool]
        if gone or (pool == "spare" and self._kept):
            self.capturer.synchronize()  # one may be running
        for key in gone:
            del self._replays[key]
        if pool == "lasting":
            self._short.clear()
        else:
            self._due.clear()
            self._seen.clear()
            self._buffers.clear()
            self._kept.clear()
        self.capturer.drop_pool(pool)

    def _void(self, pool: Pool) -> None:
        for forget in self._forget[pool]:
            forget()

    def _give_up(self, error: Exception) -> None:
        if out_of_memory(error):
            logger.warning("no memory for CUDA graphs of steps with prompts: %s", error)
        else:
            logger.exception("a step or a picture can't be captured; from now on none is")
            self._broken = True
        claimed, self.on = bool(self._kept), False
        self._drop("spare")
        if claimed:  # else nothing stands in the pool, and a step may be about to read drafts
            self._void("spare")

    def _claim_pool(self) -> bool:
        """Claim the spare pool; whether that worked."""
        try:
            self._warm_up()  # its handles and kernels can't be made while something is captured
            self._hold(self._claim)
        except Exception as error:
            self._give_up(error)
        return self.on

    def _hold(self, make: Work) -> None:
        """Capture how tensors are made, so that they are in the spare pool, and fill them."""
        fill = self.capturer.capture(make, "spare")
        fill()
        self._kept.append(fill)

    def _claim(self) -> None:
        """Take the spare pool in one piece, of which later graphs are cut.

        Before it comes what the library works in, which it keeps for good, once a stream: a part of the piece
        would hold all of it.
        """
        self._warm_up()
        claim = max(self.nbytes - SMALL_BYTES, 0)
        torch.empty(claim, dtype=torch.uint8, device=self._device)

    def _warm_up(self) -> None:
        one = torch.zeros(16, 16, dtype=self._dtype, device=self._device)
        torch.mm(one, one)
        torch.addmm(one[0], one, one)
