"""GPU memory that the CUDA driver takes beside torch's allocator, and how little of it will do.

Measured on an H200 (`benchmarks/LOG.md`), where a context with torch's first kernel takes 610 MiB:

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

import torch

LIBRARY: Final = "libcuda.so.1"
CAPTURES: Final = "captures"
COPIES: Final = "copies"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING, as torch's own: it doesn't wait for the default stream
T = TypeVar("T")


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
