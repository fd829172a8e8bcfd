"""Pictures on their way to the engine's process: in memory that it shares, until it has read them.

    region  │ picture of 7 │ free │ picture of 9 │ free …
    message 9  "… RGB, 1024×1024, at byte 4,194,304 …" ─► engine: copies it, prepares it, replies ─► free

A socket would carry it in pieces of some hundred KiB, each of which wakes both sides.
"""

from bisect import insort
from threading import Lock

from snugvl.core.region import Region

REGION_BYTES = 64 << 20  # of which only what was ever in use at once is held


class Arena:
    """The sender's side: the layout of pieces in the region. Safe to use from several threads."""

    def __init__(self, region: Region) -> None:
        self._view = region.view
        self._used: list[tuple[int, int, int]] = []  # start, end and owner of each piece, in order
        self._lock = Lock()

    def put(self, owner: int, piece: bytes | memoryview) -> int | None:
        """Write a piece where there is room for it, and return where; None where there is none.

        An owner that has a piece already gets no more than half of all: others come meanwhile.
        """
        with self._lock:
            own = sum(end - start for start, end, its in self._used if its == owner)
            if own and own + len(piece) > len(self._view) // 2:
                return None
            start = self._gap(len(piece))
            if start is None:
                return None
            insort(self._used, (start, start + len(piece), owner))
        self._view[start : start + len(piece)] = piece
        return start

    def free(self, owner: int) -> None:
        """Free the pieces of an owner: they were read, or will never be."""
        with self._lock:
            self._used = [piece for piece in self._used if piece[2] != owner]

    def _gap(self, nbytes: int) -> int | None:
        """The first gap that is large enough, or None: low addresses have been touched before."""
        end_before = 0
        for start, end, _ in self._used:
            if start - end_before >= nbytes:
                break
            end_before = end
        return end_before if end_before + nbytes <= len(self._view) else None
