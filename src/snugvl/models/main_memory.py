"""An embedding that stays in main memory, where the GPU reads the rows that it needs.

    main memory  │ row 0 │ row 1 │ …   page-locked, and part of the GPU's addresses
    GPU          reads `ids` rows over PCI Express: 8 KiB a token of an 8B in bf16

The lookup is the kernel of an embedding on the GPU, in the same CUDA graphs: no copy, and no host that waits.
Therefore the memory must be page-locked, and there is no falling back to memory that isn't.

The driver is asked for it, not torch: torch's `pin_memory` takes the next power of two, 2 GiB for 1.2. And it
is made page-locked (`cuMemHostAlloc`), not locked later (`cudaHostRegister`): under WSL2 a GPU can't use the
host's addresses of the latter (`cudaDevAttrCanUseHostPointerForRegisteredMem` is 0 there).
"""

import ctypes
import weakref
from typing import Final

import torch

from snugvl.layers.linear import Linear
from snugvl.models.weight_stream import lay_out, unit_bytes

DRIVER: Final = "libcuda.so.1"
PORTABLE, MAPPED = 1, 2  # CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP: every context's, and in the GPU's addresses


class NoPageLockedMemory(Exception):
    """The system doesn't give `nbytes` of page-locked memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


def to_main_memory(embedding: Linear, device: torch.device) -> None:
    """Give an embedding without memory its place, in one piece, for a GPU to read.

    Raises:
        NoPageLockedMemory: it can't be had.
    """
    lay_out(embedding, page_locked(unit_bytes(embedding), device))


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """`[nbytes]` uint8, given back when no tensor uses it any more.

    Raises:
        NoPageLockedMemory: it can't be had.
    """
    torch.cuda.synchronize(device)  # makes torch's context there, which the driver asks for
    driver, address = ctypes.CDLL(DRIVER), ctypes.c_void_p()
    with torch.cuda.device(device):
        failed = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), PORTABLE | MAPPED)
    if failed or address.value is None:
        raise NoPageLockedMemory(nbytes)
    memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
    # Tensors keep `memory`, which keeps nothing and has to say when it goes. At exit the system takes all.
    weakref.finalize(memory, driver.cuMemFreeHost, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)
