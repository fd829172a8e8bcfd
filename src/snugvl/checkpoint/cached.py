"""Models in the local Hub cache: which there are, how large they are, and how one is removed.

Layout: `store.py`. Another program may have put them there, so nothing is believed of names and links: only
what lies in a model's own folder counts as its own, and only that is ever removed.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snugvl.checkpoint.listing import is_inside, is_repo
from snugvl.checkpoint.store import REPO_PREFIX, repo_folder, repo_of
from snugvl.core.folders import hub_cache
from snugvl.errors import CheckpointNotFound, InputError


@dataclass(frozen=True, slots=True)
class Cached:
    """A model of the cache. `nbytes`: of all its contents on the disk, begun downloads included."""

    name: str
    folder: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes with some revisions of a model, and what stays.

    Attributes:
        commits: the revisions that go.
        others: the revisions that stay.
        blobs: contents that nothing else uses.
        nbytes: of these.
        whole: the folder goes, too, as nothing is left in it.
    """

    folder: Path
    commits: tuple[str, ...]
    others: tuple[str, ...]
    blobs: tuple[Path, ...]
    nbytes: int
    whole: bool


def cached() -> list[Cached]:
    """Every model of the cache, by name. A cache that isn't there has none."""
    found = []
    for folder in _folders():
        name = repo_of(folder)
        if is_repo(name):
            found.append(Cached(name, folder, sum(map(_size, _blobs(folder)))))
    return found


def removal(model: str, *, revision: str | None = None, every: bool = False) -> Removal:
    """What `remove` would do.

    Args:
        revision: branch, tag or commit; "main" without, or the only one there is.
        every: all revisions, and begun downloads.

    Raises:
        CheckpointNotFound: no such model, or revision, in the cache.
        InputError: `model` is no name of the Hub; a link stands in the way.
    """
    folder = _folder_of(model)
    commits = sorted(path.name for path in _children(folder / "snapshots"))
    gone = commits if every else [_commit(model, folder, commits, revision)]
    others = tuple(commit for commit in commits if commit not in gone)
    used = set(_targets(gone, folder))
    needed = set(_needed_elsewhere(folder, gone))
    blobs = [
        path
        for path in _blobs(folder)
        if path.resolve() not in needed and (not others or path.resolve() in used)
    ]
    whole = not others and len(blobs) == len(list(_blobs(folder)))
    return Removal(folder, tuple(gone), others, tuple(blobs), sum(map(_size, blobs)), whole)


def remove(what: Removal) -> None:
    """Remove it. Links are removed, never followed.

    Raises:
        OSError: the disk refuses; what was removed by then is gone.
    """
    if what.whole:
        shutil.rmtree(what.folder)
        return
    for commit in what.commits:
        shutil.rmtree(what.folder / "snapshots" / commit)
    for ref in (what.folder / "refs").rglob("*"):
        if ref.is_file() and not ref.is_symlink() and _read(ref) in what.commits:
            ref.unlink()
    for blob in what.blobs:
        blob.unlink(missing_ok=True)


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
    """A model's own contents."""
    with suppress(OSError):
        for path in sorted((folder / "blobs").iterdir()):
            if path.is_file() and not path.is_symlink():
                yield path


def _targets(commits: list[str], folder: Path) -> Iterator[Path]:
    """The contents that revisions show."""
    for commit in commits:
        for path in (folder / "snapshots" / commit).rglob("*"):
            if path.is_symlink():
                yield path.resolve()


def _needed_elsewhere(folder: Path, gone: list[str]) -> Iterator[Path]:
    """What revisions that stay show, those of other models included: contents may be shared."""
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
        return path.lstat().st_size
    except OSError:
        return 0
