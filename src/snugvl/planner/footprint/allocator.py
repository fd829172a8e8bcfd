"""What torch's caching allocator takes for tensors of given sizes.

Rules (PyTorch, `c10/cuda/CUDACachingAllocator.cpp`): a request is rounded up to 512 bytes. Requests up to
1 MiB come from 2 MiB segments, those below 10 MiB from 20 MiB segments, larger ones get a segment of their
own, rounded up to 2 MiB. A remainder of a large segment is split off for others unless it is 1 MiB or less.
"""

from collections.abc import Iterable
from typing import Final

MIB: Final = 1 << 20
ROUND_BYTES: Final = 512
SMALL_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
MEDIUM_BYTES: Final = 10 * MIB
MEDIUM_SEGMENT_BYTES: Final = 20 * MIB
LARGE_ROUND_BYTES: Final = 2 * MIB


def up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def together_bytes(sizes: Iterable[int]) -> int:
    """Bytes of one segment that holds all tensors that don't come from small ones, side by side."""
    large = (up(size, ROUND_BYTES) for size in sizes)
    return up(sum(size for size in large if size > SMALL_BYTES), LARGE_ROUND_BYTES)


def reserved_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Bytes of the segments that hold tensors of the given (size in bytes, how many)."""
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
