"""Downloading a model into the Hub cache: only what is needed, resumable, verified before it counts.

    1. list     files, sizes and sha256 at one commit
    2. refuse   no room on the disk, or `fits` says no
    3. weights  each into blobs/SHA256.part, continued where it broke off, hashed, renamed to blobs/SHA256
    4. the rest snapshot_download: small files, the snapshot's links, the branch's ref

huggingface_hub 2 deletes a partial file when a download is interrupted, hence our own third step: after
Ctrl+C at 5 of 6 GB the same command fetches the last one. Its cache's layout is kept, so other tools find it.
"""

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from snugvl.checkpoint.assemble import assemble
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.hub import Hub, HubUnreachable, Listing, RemoteFile, speaking, wanted
from snugvl.checkpoint.locate import hub_cache, looks_like_hub_id
from snugvl.errors import CheckpointError, CheckpointNotFound, DoesNotFit, UnsupportedModel

GIB = 2**30
CHUNK_BYTES = 4 * 2**20
WORKERS = 4
ATTEMPTS = 5
SPARE_BYTES = 256 * 2**20  # what the rest of the machine should keep of the disk

Fits = Callable[[ModelFacts], str | None]
Came = Callable[[int], None]


class _Stopped(Exception):
    """Ends a download in another thread. No error of the Hub's: those are tried again."""


class Watch(Protocol):
    """Who shows how far it is."""

    def start(self, label: str, total_bytes: int) -> None: ...

    def advance(self, count_bytes: int) -> None: ...


class Unwatched:
    """Shows nothing."""

    def start(self, label: str, total_bytes: int) -> None:
        """Nothing to show."""

    def advance(self, count_bytes: int) -> None:
        """Nothing to show."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is complete on this machine. `fetched_bytes`: what this call had to fetch."""

    folder: Path
    commit: str
    total_bytes: int
    fetched_bytes: int


def pull(
    model: str,
    *,
    revision: str | None = None,
    force: bool = False,
    fits: Fits | None = None,
    hub: Hub | None = None,
    watch: Watch | None = None,
) -> Pulled:
    """Download `model` into the Hub cache, or finish or check what is there.

    Args:
        force: download although the disk or the plan has no room.
        fits: why the model can't be used on this machine, or None if it can.

    Raises:
        CheckpointNotFound, CheckpointError: no such model, no network, a refused or corrupt file.
        DoesNotFit: no room on the disk, or `fits` objects.
    """
    if not looks_like_hub_id(model):
        raise CheckpointNotFound(
            f"{model!r} is no Hub id; it has the form owner/name, as Qwen/Qwen3-VL-2B-Instruct"
        )
    hub, watch = hub or Hub(), watch or Unwatched()
    listing = hub.listing(model, revision)
    files = wanted(listing)
    if not any(file.name.endswith(".safetensors") for file in files):
        raise UnsupportedModel(f"{model} has no safetensors weights; other formats are not downloaded")
    blobs = hub_cache() / ("models--" + model.replace("/", "--")) / "blobs"
    missing = sum(max(0, file.size - _held(blobs, file)) for file in files)
    if not force:
        _check_room(model, missing)
        objection = _objection(model, hub, listing, fits) if fits else None
        if objection:
            raise DoesNotFit(f"{objection}; --force downloads it all the same")
    with _storing(model):
        _fetch_weights(hub, listing, blobs, watch)
        folder = _finish(hub, listing, revision, files)
    return Pulled(folder, listing.commit, sum(file.size for file in files), missing)


def _objection(model: str, hub: Hub, listing: Listing, fits: Fits) -> str | None:
    """What `fits` says; nothing about a model that the plan can't read, which another engine may run."""
    try:
        facts = assemble(model, hub.material(listing))
    except CheckpointError:
        return None
    return fits(facts)


def _fetch_weights(hub: Hub, listing: Listing, blobs: Path, watch: Watch) -> None:
    """Fetch and verify every file whose content the Hub names by sha256, several at a time."""
    blobs.mkdir(parents=True, exist_ok=True)
    files = [file for file in wanted(listing) if file.sha256]
    watch.start("downloading", sum(file.size for file in files))
    stop = Event()

    def came(count_bytes: int) -> None:
        if stop.is_set():  # Ctrl+C, or another file failed: what has come is kept
            raise _Stopped
        watch.advance(count_bytes)

    pool = ThreadPoolExecutor(WORKERS)
    try:
        for _ in pool.map(lambda file: _fetch(hub, listing, file, blobs, came), files):
            pass
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _fetch(hub: Hub, listing: Listing, file: RemoteFile, blobs: Path, came: Came) -> None:
    """One file: continue its .part, check its hash, then give it its name."""
    from filelock import FileLock, Timeout

    where = f"{listing.repo}/{file.name}"
    blob, part = blobs / str(file.sha256), blobs / f"{file.sha256}.part"
    try:
        with FileLock(f"{part}.lock", timeout=0):
            if blob.exists():
                # Complete by its name, but a disk may have failed since; the name is the hash.
                came(file.size)
                _verify(where, blob, file)
                return
            came(min(file.size, part.stat().st_size if part.exists() else 0))
            _resume(hub, listing, file, part, came)
            _verify(where, part, file)
            part.replace(blob)
    except Timeout:
        raise CheckpointError(f"{where} is being downloaded by another process; wait for it") from None
    Path(f"{part}.lock").unlink(missing_ok=True)


def _resume(hub: Hub, listing: Listing, file: RemoteFile, part: Path, came: Came) -> None:
    """Append to `part` until it is complete, past broken connections while they still bring bytes."""
    failures = 0
    while (have := part.stat().st_size if part.exists() else 0) < file.size:
        try:
            hub.append(listing, file.name, part, have, file.size, came)
        except HubUnreachable as error:
            brought = part.exists() and part.stat().st_size > have
            failures = 0 if brought else failures + 1
            if failures >= ATTEMPTS:
                raise HubUnreachable(
                    f"{error}; what has come is kept, run the same command to continue"
                ) from None


def _verify(where: str, path: Path, file: RemoteFile) -> None:
    """Compare size and sha256; what differs is deleted, so that the next attempt starts clean.

    Raises:
        CheckpointError: the content is not what the Hub says it is.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    if path.stat().st_size == file.size and digest.hexdigest() == file.sha256:
        return
    path.unlink()
    raise CheckpointError(
        f"{where} is corrupt (sha256 {digest.hexdigest()[:12]}…, the Hub says {str(file.sha256)[:12]}…) "
        "and was deleted; run the same command to fetch it again"
    )


def _finish(hub: Hub, listing: Listing, revision: str | None, files: tuple[RemoteFile, ...]) -> Path:
    """Small files, links and the branch's ref, by huggingface_hub; weights are found among the blobs."""
    from huggingface_hub import snapshot_download

    with _silence(), speaking(listing.repo):
        folder = Path(
            snapshot_download(
                listing.repo,
                revision=revision,
                cache_dir=hub_cache(),
                allow_patterns=[file.name for file in files],
                token=hub.token,
                endpoint=hub.endpoint,
                max_workers=WORKERS,
            )
        )
    if folder.name != listing.commit:
        raise CheckpointError(f"{listing.repo} changed on the Hub meanwhile; run the same command again")
    for file in files:
        path = folder / file.name
        if not path.is_file() or (file.size and path.stat().st_size != file.size):
            raise CheckpointError(f"{listing.repo}/{file.name} is incomplete; run the same command again")
    return folder


@contextmanager
def _silence() -> Iterator[None]:
    """Without huggingface_hub's own bars and warnings: ours are the lines that count."""
    from huggingface_hub import utils

    hub: Any = utils  # its loggers and switches are exported, but not marked so
    level = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    hub.disable_progress_bars()
    try:
        yield
    finally:
        hub.enable_progress_bars()
        hub.logging.set_verbosity(level)


def _held(blobs: Path, file: RemoteFile) -> int:
    """Bytes of a file that are on this machine already."""
    for name in (file.sha256, f"{file.sha256}.part"):
        path = blobs / str(name)
        if file.sha256 and path.is_file():
            return path.stat().st_size
    return 0


def _check_room(model: str, missing: int) -> None:
    folder = hub_cache()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing and missing + SPARE_BYTES > free:
        raise DoesNotFit(
            f"{model} needs {missing / GIB:.2f} GiB more on the disk of {folder}, which has "
            f"{free / GIB:.2f} GiB free (0.25 are kept spare); make room, set HF_HOME "
            "to another disk, or use --force"
        )


@contextmanager
def _storing(model: str) -> Iterator[None]:
    """Turns a disk that is full after all, or can't be written, into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(
                f"the disk is full while downloading {model}; what has come is kept: make room, then run the "
                "same command to continue"
            ) from None
        raise CheckpointError(
            f"{model} can't be stored in {hub_cache()}: {error.strerror or error}; set HF_HOME to a folder "
            "that can be written to"
        ) from None
