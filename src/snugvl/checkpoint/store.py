"""The Hub cache on this disk, in huggingface_hub's own layout, so that other tools find what we fetched.

    models--OWNER--NAME/blobs/HASH              contents: sha256, or git's blob id of a small file
    models--OWNER--NAME/blobs/SHA256.part       a download that isn't complete
    models--OWNER--NAME/snapshots/COMMIT/FILE   a relative link to a blob
    models--OWNER--NAME/refs/REVISION           the commit of a branch or tag

Every name in here is checked (`listing.py`) or a hash that we worked out ourselves. A content gets its name
when it has been verified. Nothing is deleted that this run did not write, and no link is written through.
"""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from snugvl.core.folders import hub_cache
from snugvl.errors import CheckpointError

REPO_PREFIX = "models--"  # of the cache's folders of models
CHUNK_BYTES = 4 * 2**20
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def repo_folder(repo: str) -> Path:
    """Where the cache has a repository."""
    return hub_cache() / (REPO_PREFIX + repo.replace("/", "--"))


def repo_of(folder: Path) -> str:
    """The repository, as owner/name, that a folder of the cache is of."""
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
        """Bytes that are here of a content, complete or begun."""
        for path in (self.blobs / name, self.part(name)):
            with suppress(OSError):
                return path.stat().st_size
        return 0

    def part(self, name: str) -> Path:
        """Where a content is until it is complete."""
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
        """The begun content, to be written on, and how much of it is here; it gets its name at the end.

        Whoever writes must have verified it by then, or raise.

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
        """Show the content `name` as `file` of a commit; what is there and equal stays.

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
        """Remember which commit a branch or tag is."""
        path = self.folder / "refs" / revision
        for folder in reversed(path.relative_to(self.folder).parents[:-1]):
            _make(self.folder / folder)
        write_whole(path, lambda copy: copy.write_text(commit, encoding="utf-8"))


def sha256_in(file: BinaryIO) -> str:
    """SHA-256 of all that is in `file`, in hexadecimal digits."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def git_blob_id(data: bytes) -> str:
    """What git, and so the Hub's cache, calls a small file's content."""
    digest = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    digest.update(data)
    return digest.hexdigest()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """A file whole or not at all; a link that stands at `path` is replaced, not followed."""
    copy = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        write(copy)
        copy.replace(path)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise


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
