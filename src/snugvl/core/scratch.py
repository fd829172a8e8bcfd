"""Folders for what a process puts on disk while it lives: gone with it, however it ends.

    $TMPDIR/snugvl-KIND-xxxxxxxx/     holds `.owner`, a file that is locked as long as that process lives

A process that is killed can't tidy up. So a process that makes such a folder, and a server whose engine's
process has ended, first remove those whose owner no process holds locked any more.
"""

import os
import shutil
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "snugvl-"
OWNER: Final = ".owner"


class Scratch:
    """A temporary folder of this process, removed by `remove`, with this object, or after the process' end.

    Attributes:
        path: where the folder is.
    """

    def __init__(self, kind: str) -> None:
        """Make the folder. `kind`: its purpose, a part of its name."""
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        self.remove = weakref.finalize(self, _remove, self.path, _held(self.path))


def sweep() -> None:
    """Remove the folders of processes that have ended; what can't be removed stays."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
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
