"""Resources of a process beside Python's objects: heap, memory shared with a child, workers, folders on disk.

Heap: a picture is a few blocks of some MiB. The C library asks the system for such a block and gives it back
after use, and the system hands it out page by page, zeroed, again and again: measured in a virtual machine,
0.66 ms a MiB, ten times what the work on it takes. `keep_freed_memory` has such blocks come from the heap,
which new threads share and which keeps what is free.

Shared memory: pixels go through a `Region` to a child without a copy on the way.

    parent: made ─► a descriptor that the child inherits, as arguments ─► child: inherited

Linux only; elsewhere pixels go through the pipe or socket that is there for everything else. Its pages come
as they are first written to, and stay. Its size is sealed: were it cut by one side, the other's next look
would end that process.

Processes that work on what strangers send (`Worker`) can be ended, and hold no secrets.

Disk: what a process puts there while it lives is gone with it, however it ends.

    $TMPDIR/snugvl-KIND-xxxxxxxx/     holds `.owner`, a file that is locked as long as that process lives

A process that is killed can't tidy up. So a process that makes a `Scratch` folder, and a server whose
engine's process has ended, first remove those whose owner no process holds locked any more.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

KEPT_BYTES: Final = 64 << 20  # of free memory; more is given back
LARGEST_BYTES: Final = 32 << 20  # of a block; larger ones are the system's as before. The library's own limit

# Environment of a process that does the same from its start.
ENVIRONMENT: Final = {
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_MMAP_THRESHOLD_": str(LARGEST_BYTES),
    "MALLOC_ARENA_MAX": "1",
}
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
if sys.platform == "linux":
    import fcntl

    _SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WORKER_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "SYSTEMROOT",
    "VIRTUAL_ENV",
)  # fmt: skip
PREFIX: Final = "snugvl-"
OWNER: Final = ".owner"


def keep_freed_memory() -> None:
    """Keep freed blocks in the heap from now on; nothing where the C library is not glibc."""
    if sys.platform != "linux":
        return
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(_ARENA_MAX, 1)


def give_back_heap() -> None:
    """Give the system what is free in the heaps of all threads; nothing where the C library is not glibc."""
    if sys.platform == "linux" and (trim := getattr(_c_library(), "malloc_trim", None)) is not None:
        trim(0)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@cache
def began() -> float:
    """When this process began, in seconds since the epoch; without a readable /proc the time of this call."""
    import psutil

    try:
        return psutil.Process().create_time()
    except (psutil.Error, OSError):
        return time.time()


def resident() -> int:
    """Bytes of host memory that this process holds; 0 where no one tells, as without /proc."""
    import psutil

    try:
        return psutil.Process().memory_info().rss
    except (psutil.Error, OSError):
        return 0


class Worker:
    """A process that works on what strangers send: `python -m` a module of ours, asked through pipes.

    Of the environment it gets what Python needs to find itself and its packages: no secrets.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start it. `environment`: variables beside those; `descriptors`: open files that it inherits.

        Raises:
            OSError: the system gives no more processes.
        """
        known = {name: os.environ[name] for name in _WORKER_ENVIRONMENT if name in os.environ}
        self._popen = subprocess.Popen(  # noqa: S603 - a module of ours
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what C or Rust say of memory that they don't get
            bufsize=0,
            env=known | dict(environment or {}),
            start_new_session=True,  # Ctrl+C is for the server, which finishes what runs
            pass_fds=tuple(descriptors),
        )

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._popen.poll() is None

    def end(self) -> None:
        """Kill it, and close the pipes. Safe to call twice."""
        self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def write_all(stream: Any, data: bytes | bytearray | memoryview) -> None:
    """Write all of it: an unbuffered pipe may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


class Region:
    """Shared memory, mapped. `view`: its bytes; `descriptor`: inherited by a child, until
    `keep_to_ourselves`."""

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
        """The region that the parent made, opened in the child with the values of `arguments`."""
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


class Scratch:
    """A temporary folder of this process, removed by `remove`, with this object, or after the process' end.
    `path`: where the folder is."""

    def __init__(self, kind: str) -> None:
        """Make the folder. `kind`: its purpose, a part of its name."""
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self.remove = weakref.finalize(self, _remove, self.path, _held(self.path))


def sweep() -> None:
    """Remove the folders of processes that have ended; what can't be removed stays."""
    try:
        place = Path(tempfile.gettempdir())
    except FileNotFoundError:  # no folder can be written to: a server needs none
        return
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            owner = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(owner).st_uid == os.getuid() and _lock(owner):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(owner)


def _held(folder: Path) -> int | None:
    """An open descriptor of the folder's owner file, locked; None where files can't be locked: then no sweep
    removes the folder.

    The file gets its name only once it is locked, so that no sweep takes the folder for an abandoned one.
    """
    draft = folder / f"{OWNER}.new"
    owner = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
    if _lock(owner):
        draft.rename(folder / OWNER)
        return owner
    os.close(owner)
    draft.unlink()
    return None


def _lock(owner: int) -> bool:
    """Whether an open file could be locked: no other process has it locked."""
    if sys.platform == "win32":
        return False
    from fcntl import LOCK_EX, LOCK_NB, flock

    with suppress(OSError):
        flock(owner, LOCK_EX | LOCK_NB)
        return True
    return False


def _remove(folder: Path, owner: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if owner is not None:
        os.close(owner)
