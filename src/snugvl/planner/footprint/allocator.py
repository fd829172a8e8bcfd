"""The memory that torch's caching allocator takes for tensors of given sizes.

Rules (PyTorch, `c10/cuda/CUDACachingAllocator.cpp`): a request is rounded up to 512 bytes. Requests up to
1 MiB come from 2 MiB segments, those below 10 MiB from 20 MiB segments, larger ones get a segment of their
own, rounded up to 2 MiB. A remainder of a large segment is split off for others unless it is 1 MiB or less:
then the tensor counts as that much larger. Blocks beyond a limit (`max_split_size_mb`) are never split.

`reserved_bytes` and `together_bytes` bound what tensors take in whatever order they come;
`CachingAllocator` repeats the allocator's own steps for tensors in the order in which they are made.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

from snugvl.core.sizes import MIB

ROUND_BYTES: Final = 512
SMALL_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
MEDIUM_BYTES: Final = 10 * MIB
MEDIUM_SEGMENT_BYTES: Final = 20 * MIB
LARGE_ROUND_BYTES: Final = 2 * MIB


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def together_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Bytes of one segment that holds side by side all tensors too large for small segments.

    `sizes`: (bytes, count) each.
    """
    # A plan over the catalogue comes here for a hundred thousand tensors: `up`, without the call.
    large = sum(-(-size // ROUND_BYTES) * count for size, count in sizes if size > SMALL_BYTES)
    return up(large * ROUND_BYTES, LARGE_ROUND_BYTES)


def reserved_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Bytes of the segments that hold tensors of the given (bytes, count)."""
    small = medium = large = 0
    for size, count in sizes:
        rounded = up(size, ROUND_BYTES)
        if rounded <= SMALL_BYTES:
            small += rounded * count
        elif rounded < MEDIUM_BYTES:
            medium += rounded * count
        else:
            large += up(rounded, LARGE_ROUND_BYTES) * count
    return up(small, SMALL_SEGMENT_BYTES) + up(medium, MEDIUM_SEGMENT_BYTES) + large


class CachingAllocator:
    """The allocator's steps for tensors that stay: best fit among free blocks, else a new segment.

    Attributes:
        allocated: bytes of the blocks in use, as `torch.cuda.memory_allocated` counts them.
        reserved: bytes of all segments, as the driver sees them.
    """

    def __init__(self, max_split_bytes: int | None = None) -> None:
        self.allocated = 0
        self.reserved = 0
        self._max_split = max_split_bytes
        self._small: list[int] = []  # free blocks, in order of size
        self._large: list[int] = []

    def allocate(self, nbytes: int) -> None:
        """Make a tensor of `nbytes` bytes."""
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        small = size <= SMALL_BYTES
        if self._max_split is not None and size >= self._max_split:
            # No block this large is ever split, nor free while all stay: a segment of its own.
            block = up(size, LARGE_ROUND_BYTES)
            self.allocated += block
            self.reserved += block
            return
        free = self._small if small else self._large
        place = bisect_left(free, size)
        if place < len(free):
            block = free.pop(place)
        else:
            block = _segment_bytes(size)
            self.reserved += block
        rest = block - size
        if rest >= ROUND_BYTES if small else rest > SMALL_BYTES:
            insort(free, rest)
            block = size
        self.allocated += block


def _segment_bytes(size: int) -> int:
    """Bytes of a new segment for a rounded request."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return MEDIUM_SEGMENT_BYTES if size < MEDIUM_BYTES else up(size, LARGE_ROUND_BYTES)
