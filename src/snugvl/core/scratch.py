"""Folders for what a process puts on disk while it lives: gone with it, however it ends.

    $TMPDIR/snugvl-KIND-xxxxxxxx/     holds `.owner`, a file that is locked as long as that process lives

A process that is killed can't tidy up. So whoever makes such a folder, and a server whose engine's process
has ended, removes those that nobody holds any more.
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
    """A folder that is this process' alone, until `remove`, the end of this object, or that of the process.

    Attributes:
        path: of the folder.
    """

    def __init__(self, kind: str) -> None:
        """`kind`: what it is for, as a part of its name."""
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
    """A descriptor of the folder's owner, locked; None where files can't be: nobody sweeps it then.

    The file has its name when it is locked, so that nobody takes the folder for one that is left.
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
