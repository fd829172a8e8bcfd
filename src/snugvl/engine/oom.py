"""Out of memory: whether an error says so, and the refusal of a request that fails of it even alone.

A step takes workspace. The plan has room for it, but another program may have taken that meanwhile, or the
plan was wrong. So a step that runs out of memory is tried again in parts, and only what fails alone ends:

    step  a ▒▒▒▒  b ▒  c ▒        out of memory: all three wait, what torch keeps goes back to the driver
          a ▒                     alone, a quarter as long, without a graph; it fails again: a ends
          b ▒                     alone, until it has a token; then it shares steps again
          c ▒  b ▒
"""

import re

import torch

from snugvl.engine.blocks import BlockPool
from snugvl.engine.scheduler import Chunk
from snugvl.errors import OutOfMemory
from snugvl.layers.device import give_back_free_blocks

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"Tried to allocate ([\d.]+ (?:[KMGT]iB|bytes))")


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


def refusal(error: BaseException, chunk: Chunk, device: torch.device) -> OutOfMemory:
    """The error of a request whose step failed even alone: its size, the memory asked for, the memory
    allowed."""
    tokens = chunk.end - chunk.start
    pictures = chunk.sequence.prompt.vision_in(chunk.start, chunk.end)
    what = f"{tokens:,} tokens" if tokens > 1 else "1 token"
    if pictures:
        largest = max(t * h * w for t, h, w in (part.item.grid_thw for part in pictures))
        what += f" with {len(pictures)} images or videos of up to {largest:,} patches"
    found = _ASKED.search(str(error))
    asked = f" asked for {found[1]} more than there was" if found else " needed more than there was"
    smaller = "send smaller or fewer images, or " if pictures else ""
    return OutOfMemory(
        f"out of memory: a step of {what}, with nothing beside it,{asked}{_held(device)}; {smaller}"
        "try again when other programs have given memory back"
    )


def no_room(tokens: int, pool: BlockPool) -> OutOfMemory:
    """The error of a request that waited in vain for memory that other programs have taken."""
    held = pool.num_blocks * pool.block_size
    assert tokens > held, "a request waits for nothing"
    return OutOfMemory(
        f"out of memory: other programs have taken the KV cache's memory; {held:,} tokens of it are left, "
        f"and this request has {tokens:,}; try again when they have given memory back"
    )


def release(device: torch.device) -> None:
    """Give memory that torch holds and doesn't use back to the driver."""
    if device.type == "cuda":
        give_back_free_blocks()


def pooled_bytes() -> int:
    """Bytes of torch's private pools: those of CUDA graphs, the library's workspace there included."""
    segments = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def _held(device: torch.device) -> str:
    """Text with torch's memory, its limit, and the free memory of the card; empty on a CPU."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    most = total * torch.cuda.get_per_process_memory_fraction(device)
    held = torch.cuda.memory_reserved(device)
    return f" ({_mib(held)} held of {_mib(most)} allowed, {_mib(free)} free on the card)"


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
