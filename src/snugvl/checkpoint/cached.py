"""Models in the local Hub cache: which there are, how large they are, and how one is removed.

Layout: `store.py`. Another program may have put them there, so names and links aren't trusted: only the
content of a model's own folder counts as its own, and only that is ever removed. But huggingface_hub keeps
contents that models may share beside them all, and links to them from each model's folder:

    blobs/XX/HASH                               such a content, whose first two digits are XX
    models--OWNER--NAME/blobs/HASH              a link to it

Those count as each model's own, and go with the last one, which huggingface_hub sees to.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snugvl.checkpoint.hub import library
from snugvl.checkpoint.listing import is_inside, is_repo
from snugvl.checkpoint.store import REPO_PREFIX, repo_folder, repo_of
from snugvl.core.folders import hub_cache
from snugvl.errors import CheckpointNotFound, InputError


@dataclass(frozen=True, slots=True)
class Cached:
    """A model of the cache. `nbytes`: bytes of all its contents on disk, shared and partial ones included."""

    name: str
    folder: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The removal of some revisions of a model: the files that go, and those that stay.

    Attributes:
        commits: the revisions that go.
        others: the revisions that stay.
        blobs: contents that nothing else uses.
        nbytes: bytes of these, without those that other models share.
        whole: whether the folder goes as well, as nothing is left in it.
    """

    folder: Path
    commits: tuple[str, ...]
    others: tuple[str, ...]
    blobs: tuple[Path, ...]
    nbytes: int
    whole: bool


def cached() -> list[Cached]:
    """Every model of the cache, sorted by name; empty where there is no cache."""
    found = []
    for folder in _folders():
        name = repo_of(folder)
        if is_repo(name):
            found.append(Cached(name, folder, sum(map(_size, _blobs(folder)))))
    return found


def removal(model: str, *, revision: str | None = None, every: bool = False) -> Removal:
    """Find what `remove` would remove.

    Args:
        revision: branch, tag or commit; None for "main", or for the only one there is.
        every: whether all revisions and partial downloads go.

    Raises:
        CheckpointNotFound: no such model, or revision, in the cache.
        InputError: `model` is not a Hub id; a link stands in the way.
    """
    folder = _folder_of(model)
    commits = sorted(path.name for path in _children(folder / "snapshots"))
    gone = commits if every else [_commit(model, folder, commits, revision)]
    others = tuple(commit for commit in commits if commit not in gone)
    used = set(_targets(gone, folder))
    needed = set(_needed_elsewhere(folder, gone))
    blobs = [
        path for path in _blobs(folder) if _place(path) not in needed and (not others or _place(path) in used)
    ]
    whole = not others and len(blobs) == len(list(_blobs(folder)))
    shared = {link.resolve() for link in _links_elsewhere(folder)}
    freed = sum(_size(path) for path in blobs if path.resolve() not in shared)
    return Removal(folder, tuple(gone), others, tuple(blobs), freed, whole)


def remove(what: Removal) -> None:
    """Remove files as `removal` found them. Links are removed, never followed.

    Raises:
        OSError: the disk refuses; files removed by then are gone.
    """
    import logging

    strategy = library().DeleteCacheStrategy
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # of what it can't remove it only warns
    refs = (
        ref
        for ref in (what.folder / "refs").rglob("*")
        if ref.is_file() and not ref.is_symlink() and _read(ref) in what.commits
    )
    parts = {
        "repos": [what.folder] if what.whole else [],
        "snapshots": [] if what.whole else [what.folder / "snapshots" / commit for commit in what.commits],
        "refs": [] if what.whole else list(refs),
        "blobs": [] if what.whole else what.blobs,
    }
    gone = {name: frozenset(paths) for name, paths in parts.items()}
    strategy(expected_freed_size=what.nbytes, cache_dir=hub_cache(), **gone).execute()
    if left := [path for paths in gone.values() for path in paths if os.path.lexists(path)]:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(left[0]))


def _folder_of(model: str) -> Path:
    if not is_repo(model):
        raise InputError(
            f"{model!r} is not the name of a downloaded model; `snugvl list` shows those (delete a folder of "
            "your own with rm -r)"
        )
    folder = repo_folder(model)
    if folder.is_symlink() or (folder / "snapshots").is_symlink() or (folder / "blobs").is_symlink():
        raise InputError(f"{folder} is, or holds, a link to another folder; nothing was removed")
    if not folder.is_dir():
        raise CheckpointNotFound(f"{model} is not in the cache ({hub_cache()}); `snugvl list` shows what is")
    return folder


def _commit(model: str, folder: Path, commits: list[str], revision: str | None) -> str:
    name = revision or "main"
    if not is_inside(name):
        raise InputError(f"--revision {name!r} is not a branch, tag or commit")
    commit = _read(folder / "refs" / name) or name
    if revision is None and commit not in commits and len(commits) == 1:
        return commits[0]
    if commit not in commits:
        there = f"; it has {', '.join(commits)}" if commits else ", and no revision is complete; say --all"
        raise CheckpointNotFound(f"{model} has no revision {name!r} in the cache{there}")
    return commit


def _folders() -> Iterator[Path]:
    for path in _children(hub_cache()):
        if path.name.startswith(REPO_PREFIX):
            yield path


def _children(folder: Path) -> list[Path]:
    """The real folders in a folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []


def _blobs(folder: Path) -> Iterator[Path]:
    """A model's own contents, and its links to those that models share."""
    with suppress(OSError):
        for path in sorted((folder / "blobs").iterdir()):
            if path.is_file() and (not path.is_symlink() or _is_shared(path)):
                yield path


def _is_shared(link: Path) -> bool:
    """Whether a link leads to a content that models share."""
    return link.resolve().parent.parent == (hub_cache() / "blobs").resolve()


def _links_elsewhere(folder: Path) -> Iterator[Path]:
    """Links of other models, and of data sets, to contents that they share."""
    for other in _children(hub_cache()):
        links = (path for path in other.glob("blobs/*") if path.is_symlink()) if other != folder else ()
        yield from (link for link in links if _is_shared(link))


def _place(path: Path) -> Path:
    """The path with links in its folders resolved; the last part may be a link."""
    return path.parent.resolve() / path.name


def _targets(commits: list[str], folder: Path) -> Iterator[Path]:
    """The contents that the revisions' links lead to."""
    for commit in commits:
        for path in (folder / "snapshots" / commit).rglob("*"):
            if path.is_symlink():
                yield _place(path.parent / path.readlink())


def _needed_elsewhere(folder: Path, gone: list[str]) -> Iterator[Path]:
    """Contents that remaining revisions link to, those of other models included: contents may be shared."""
    for other in _folders():
        commits = [path.name for path in _children(other / "snapshots")]
        yield from _targets([each for each in commits if other != folder or each not in gone], other)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
