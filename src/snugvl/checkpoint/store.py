"""The Hub cache on this disk, in huggingface_hub's own layout, so that other tools find our downloads.

    models--OWNER--NAME/blobs/HASH              contents: sha256, or git's blob id of a small file
    models--OWNER--NAME/blobs/SHA256.part       a download that isn't complete
    models--OWNER--NAME/snapshots/COMMIT/FILE   a relative link to a blob
    models--OWNER--NAME/refs/REVISION           the commit of a branch or tag

Every name in here is checked (`listing.py`), or a hash computed here. A content gets its name once verified.
Nothing is deleted that this run did not write, and no link is written through.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from snugvl.core.folders import hub_cache, write_whole
from snugvl.errors import CheckpointError

REPO_PREFIX = "models--"  # of the cache's folders of models
MAX_REF_BYTES = 4096  # of a file that holds a commit
CHUNK_BYTES = 4 * 2**20
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def repo_folder(repo: str) -> Path:
    """The cache's folder of a repository."""
    return hub_cache() / (REPO_PREFIX + repo.replace("/", "--"))


def repo_of(folder: Path) -> str:
    """The repository of a folder of the cache, as owner/name."""
    return folder.name.removeprefix(REPO_PREFIX).replace("--", "/", 1)


class Store:
    """One model's folder in the Hub cache."""

    def __init__(self, repo: str) -> None:
        self.folder = repo_folder(repo)
        self.blobs = self.folder / "blobs"

    def prepare(self) -> None:
        """Make the folder of contents.

        Raises:
            CheckpointError: a link stands there.
        """
        _make(self.blobs)

    def held(self, name: str) -> int:
        """Number of bytes of a content that are here, complete or partial."""
        for path in (self.blobs / name, self.part(name)):
            with suppress(OSError):
                return path.stat().st_size
        return 0

    def part(self, name: str) -> Path:
        """The path of a content until it is complete."""
        return self.blobs / f"{name}.part"

    def blob(self, name: str) -> Path | None:
        """The content of that name, if it is here. huggingface_hub links to contents of other models.

        Raises:
            CheckpointError: something else stands there.
        """
        path = self.blobs / name
        if not _stands(path):
            return None
        inside = path.resolve().is_relative_to(hub_cache().resolve())
        if not path.is_file() or (path.is_symlink() and not inside):
            raise CheckpointError(
                f"{path} is not a file of the Hub cache, but a link or folder; nothing was changed: "
                "move it away"
            )
        return path

    @contextmanager
    def begun(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Open a partial content: (the file to write on, bytes of it that are here).

        It gets its name at the end of the block, which must have verified it by then, or raise.

        Raises:
            CheckpointError: something else stands there.
        """
        path = self.part(name)
        new = not _stands(path)
        if not new and not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(
                f"{path} is not an unfinished download, but a link or folder; nothing was changed: "
                "move it away"
            )
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
        try:
            with os.fdopen(handle, "r+b") as file:
                yield file, file.seek(0, os.SEEK_END)
        except BaseException:
            if new and not path.stat().st_size:  # nothing came: all is as it was
                path.unlink()
            raise
        path.replace(self.blobs / name)

    def keep(self, name: str, data: bytes) -> None:
        """Keep a small content under the hash that it was verified to have."""
        write_whole(self.blobs / name, lambda path: path.write_bytes(data))

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files.

        Raises:
            CheckpointError: a link stands there.
        """
        folder = self.folder / "snapshots" / commit
        _make(folder.parent)
        _make(folder)
        return folder

    def link(self, commit: str, file: str, name: str) -> None:
        """Link `file` of a commit to the content `name`; an equal link stays.

        Raises:
            CheckpointError: another content is there.
        """
        path, blob = self.snapshot(commit) / file, self.blobs / name
        if _stands(path):
            if path.exists() and (path.samefile(blob) or _equal(path, blob)):
                return
            raise CheckpointError(
                f"{path} is not the file that the Hub has there; nothing was changed: move it away, then run "
                "the same command again"
            )
        try:
            path.symlink_to(Path("..", "..", "blobs", name))
        except FileExistsError:  # another process was quicker
            return
        except OSError:  # Windows, without the right to make links
            write_whole(path, lambda copy: shutil.copyfile(blob, copy))

    def refer(self, revision: str, commit: str) -> None:
        """Write the commit of a branch or tag."""
        path = self.folder / "refs" / revision
        for folder in reversed(path.relative_to(self.folder).parents[:-1]):
            _make(self.folder / folder)
        write_whole(path, lambda copy: copy.write_text(commit, encoding="utf-8"))


def sha256_in(file: BinaryIO) -> str:
    """SHA-256 of the content of `file`, in hexadecimal digits."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def git_blob_id(data: bytes) -> str:
    """git's hash of a small file's content, which is its name in the Hub cache."""
    digest = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    digest.update(data)
    return digest.hexdigest()


def _stands(path: Path) -> bool:
    """Whether anything is at `path`, a broken link included."""
    return os.path.lexists(path)


def _make(folder: Path) -> None:
    """Make a folder of the cache, unless it is there; but not through a link that leads elsewhere."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link; nothing was changed: move it away")
    folder.mkdir(parents=True, exist_ok=True)


def _equal(path: Path, blob: Path) -> bool:
    with path.open("rb") as one, blob.open("rb") as other:
        return sha256_in(one) == sha256_in(other)
