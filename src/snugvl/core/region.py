"""Memory that a process shares with a child of its own: pixels go through it without a copy on the way.

    parent: made ─► a descriptor that the child inherits, as arguments ─► child: inherited

Linux only; elsewhere pixels go through the pipe or socket that is there for everything else. Its pages come
as they are first written to, and stay. Its size is sealed: were it cut by one side, the other's next look
would end that process.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

if sys.platform == "linux":
    import fcntl

    _SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Region:
    """Shared memory, mapped.

    Attributes:
        view: its bytes.
        descriptor: what a child inherits, until `keep_to_ourselves`.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, nbytes)
        self.view = memoryview(self._map)

    @classmethod
    def made(cls, nbytes: int) -> Self | None:
        """A new region of `nbytes` bytes; None where the system has no such memory."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            return None
        try:
            descriptor = os.memfd_create("snugvl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # a sandbox that forbids it
            return None
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALED)
            return cls(descriptor, nbytes)
        except OSError:  # too little memory, or address space
            os.close(descriptor)
            return None

    @classmethod
    def inherited(cls, descriptor: str, nbytes: str) -> Self:
        """In the child: the region that the parent made, from the values of `arguments`."""
        region = cls(int(descriptor), int(nbytes))
        region.keep_to_ourselves()
        return region

    @property
    def arguments(self) -> tuple[str, str]:
        """Arguments of a command line, for a child that inherits `descriptor`."""
        return str(self.descriptor), str(len(self.view))

    def keep_to_ourselves(self) -> None:
        """Close the descriptor, so that children started from now on don't inherit the region."""
        os.close(self.descriptor)

    def put(self, pieces: Sequence[memoryview]) -> bool:
        """Write pieces one after the other from the start; False, nothing written, where they don't fit."""
        if sum(map(len, pieces)) > len(self.view):
            return False
        end = 0
        for piece in pieces:
            start, end = end, end + len(piece)
            self.view[start:end] = piece
        return True

    def close(self) -> None:
        """Unmap it once no view of it is left. Safe to call twice."""
        self.view.release()
        with suppress(BufferError):
            self._map.close()
