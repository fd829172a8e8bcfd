"""What a listing, an index or a header may call things: checked before any of it becomes a path or a request.

Whoever answers at HF_ENDPOINT chooses these values, so none of them may lead out of the Hub cache, stand for
another file, or write to a terminal. Every refusal is one line with the value in it.
"""

import re
from collections.abc import Mapping
from typing import Any

from snugvl.checkpoint.section import shown
from snugvl.errors import CheckpointError

MAX_NAME = 255  # bytes of one part of a path: what file systems take
MAX_SHARDS = 4096
MAX_BYTES = 2**50  # of one file, a petabyte: sums of such sizes stay numbers that can be shown

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[\w.][\w.+=@ -]*")  # without *, ? and [ ]: other tools take names for patterns
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def is_commit(value: object) -> bool:
    """Whether `value` is a whole commit hash."""
    return isinstance(value, str) and _COMMIT.fullmatch(value) is not None


def is_repo(value: str) -> bool:
    """Whether `value` has the characters of owner/name, and neither is a way to another folder."""
    return _REPO.fullmatch(value) is not None and not {"..", "."} & set(value.split("/"))


def is_revision(value: str) -> bool:
    """Whether `value` can be a branch, a tag or a commit, and a path below refs/."""
    return _inside(value)


def commit_of(value: object, where: str) -> str:
    """A commit hash, which names a folder of the cache.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(value, str) or not is_commit(value):
        raise CheckpointError(f"{where} has the commit {shown(value)}; it would be 40 digits of 0-9a-f")
    return value


def sha256_of(value: object, where: str) -> str:
    """A content's hash, which names a file of the cache.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(value, str) or _SHA256.fullmatch(value) is None:
        raise CheckpointError(f"{where} has the sha256 {shown(value)}; it would be 64 digits of 0-9a-f")
    return value


def blob_id_of(value: object, where: str) -> str:
    """git's name of a small file's content, which names a file of the cache as well.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(value, str) or not is_commit(value):
        raise CheckpointError(f"{where} has the blob id {shown(value)}; it would be 40 digits of 0-9a-f")
    return value


def size_of(value: object, where: str) -> int:
    """Bytes of a file.

    Raises:
        CheckpointError: it is no size that a file can have.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
        raise CheckpointError(f"{where} has the size {shown(value)}; a file has 0 to {MAX_BYTES:,} bytes")
    return value


def path_of(value: object, where: str) -> str:
    """A file's path in a repository: it may lead down, and nowhere else.

    Raises:
        CheckpointError: it is absolute, climbs, or has characters that no path here has.
    """
    if not isinstance(value, str) or not _inside(value):
        raise CheckpointError(
            f"{where} names the file {shown(value)}, which is no path inside of it; nothing was written"
        )
    return value


def plain_name_of(value: object, where: str) -> str:
    """The name of a file that is to be fetched: in the repository's own folder, no pattern.

    Raises:
        CheckpointError: it is a path, a pattern, or no name.
    """
    name = path_of(value, where)
    if _PLAIN.fullmatch(name) is None:
        raise CheckpointError(
            f"{where} names the file {shown(name)}; such a name is not fetched (letters, digits, ._+=@- are)"
        )
    return name


def shards_of(index: Mapping[str, Any], where: str) -> list[str]:
    """The weight files that an index names, for a folder and for the Hub alike.

    Raises:
        CheckpointError: there is no weight_map, or a name in it leads out of the checkpoint.
    """
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{where} has no weight_map")
    names = sorted({path_of(name, where) for name in shards.values()})
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{where} names {len(names):,} weight files; {MAX_SHARDS:,} are read at most")
    return names


def _inside(path: str) -> bool:
    """Whether a path stays below where it begins, on every system, and each part of it can be a name."""
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and ":" not in path
        and not any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME for part in parts)
    )
