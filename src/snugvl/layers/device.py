"""A process and its device: tensors made once, torch's allocator, copies without waiting, streams.

torch's allocator can't give back what it holds free while a CUDA graph is captured, in whichever thread.

A plain copy of pageable memory waits until everything that was started before is finished, and with it the
host, which could have started more meanwhile: so copies go through page-locked memory.

The CUDA driver takes GPU memory beside torch's allocator. Measured on an H200 (`benchmarks/LOG.md`), where a
context with torch's first kernel takes 610 MiB:

    a thread that multiplies with cuBLAS     66 MiB, and a workspace of torch's, 32 MiB
    another one beside it                    64 MiB, and another workspace: a handle belongs to one thread
    another one after it has ended           nothing: torch gives it the handle of the thread that has ended
    `torch.cuda.Stream()`                    70 MiB: torch makes a pool of 32 streams at once
    a stream made by the driver alone        2 MiB or less
    a kernel with up to 1 KiB of local memory a thread: nothing; the context has that much for every thread

So streams are made here, one for each purpose, and what multiplies before the engine's thread is there does
so in a thread that ends.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import RLock
from typing import Final, TypeVar

import torch

LIBRARY: Final = "libcuda.so.1"
CAPTURES: Final = "captures"
COPIES: Final = "copies"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING, as torch's own: it doesn't wait for the default stream
_SIGNS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
capturing: Final = RLock()  # held by who captures a CUDA graph, or gives back
T = TypeVar("T")
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


def release(device: torch.device) -> None:
    """Give memory that torch holds and doesn't use back to the driver."""
    if device.type == "cuda":
        give_back_free_blocks()


def pooled_bytes() -> int:
    """Bytes of torch's private pools: those of CUDA graphs, the library's workspace there included."""
    segments = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it came from, is a lack of device memory.

    torch has a class for its own allocator's; the driver's (loading a kernel, making a graph), cuBLAS' and
    Triton's are known by their text.
    """
    while True:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
            return True
        before = error.__cause__ or error.__context__
        if before is None:
            return False
        error = before


def clear_shared() -> None:
    """Let go of all of them; each is made again when needed. No CUDA graph may be left that reads one."""
    for clear in _clearing:
        clear()


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`; in the order of its stream, on a GPU."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; on a GPU, in the order of its stream."""
    if device.type != "cuda":
        return tensor.to(device)
    # torch keeps the pinned copy until the transfer is done, and gives its memory to later ones.
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """Start to copy `tensor` to `into` of the host, of page-locked memory where the tensor is a GPU's.

        Without `into` a copy is made of a GPU's tensor, and one of the host is read where it is.
        """
        self._event: torch.cuda.Event | None = None
        if into is None and tensor.is_cuda:
            into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host = tensor if into is None else into
        if into is not None:
            into.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> torch.Tensor:
        """The copy, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@cache
def stream_on(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of this process on `device` for one purpose (`CAPTURES` or `COPIES`).

    It lives as long as the process. Where the driver makes none it is one of torch's pool.
    """
    torch.cuda.synchronize(device)  # makes torch's context there, which the driver asks for
    address = ctypes.c_void_p()
    try:
        with torch.cuda.device(device):
            failed = ctypes.CDLL(LIBRARY).cuStreamCreate(ctypes.byref(address), _NON_BLOCKING)
    except (OSError, AttributeError):
        failed = 1
    if failed or address.value is None:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.ExternalStream(address.value, device=device)  # type: ignore[no-untyped-call]


def in_thread_that_ends(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own that has ended afterwards; return or raise what it does.

    The handles of CUDA's libraries that it needed are there for the next thread.
    """
    pool = ThreadPoolExecutor(1, "snugvl-once")
    future = pool.submit(work)
    pool.shutdown(wait=False)  # who interrupts the wait below doesn't wait for the thread
    result = future.result()
    pool.shutdown()
    return result
