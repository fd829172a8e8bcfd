"""Downloads a model into the Hub cache: only needed files, resumable, verified before they count.

    1. list     files, sizes and sha256 at one commit
    2. refuse   no room on the disk, or `fits` says no
    3. weights  each into blobs/SHA256.part, continued where it broke off, hashed, renamed to blobs/SHA256
    4. the rest small files, each bounded and hashed; then the snapshot's links and the branch's ref

huggingface_hub 2 deletes a partial file when a download is interrupted, and makes paths of ETags and commits
that a server sends, hence our own steps: after Ctrl+C at 5 of 6 GB the same command fetches the last one, and
a mirror can neither write nor delete outside the cache. Its cache's layout is kept (`store.py`).
"""

import errno
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import BinaryIO, Protocol

from snugvl.checkpoint.assemble import assemble
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.gguf_files import DEFAULT_QUANT, repository
from snugvl.checkpoint.hub import Hub, HubUnreachable
from snugvl.checkpoint.listing import SUFFIX, Listing, RemoteFile, of_quant, wanted
from snugvl.checkpoint.locate import looks_like_hub_id
from snugvl.checkpoint.store import Store, git_blob_id, sha256_in
from snugvl.core.folders import hub_cache
from snugvl.core.sizes import GIB
from snugvl.errors import CheckpointError, CheckpointNotFound, DoesNotFit, UnsupportedModel

WORKERS = 4
ATTEMPTS = 5
PROGRESS_BYTES = 2**16  # of a connection that breaks; with less it is one of the ATTEMPTS
SPARE_BYTES = 256 * 2**20  # what the rest of the machine should keep of the disk

Fits = Callable[[ModelFacts], str | None]
Came = Callable[[int], None]


class _Stopped(Exception):
    """Ends a download in another thread. It is not an error of the Hub's, as those are tried again."""


class Watch(Protocol):
    """Shows how far a download is."""

    def start(self, label: str, total_bytes: int) -> None: ...

    def advance(self, count_bytes: int) -> None: ...


class Unwatched:
    """Shows nothing."""

    def start(self, label: str, total_bytes: int) -> None:
        """Ignore the call: nothing is shown."""

    def advance(self, count_bytes: int) -> None:
        """Ignore the call: nothing is shown."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is complete on this machine. `fetched_bytes`: bytes that this call fetched."""

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
    watch: Watch | None = None,
) -> Pulled:
    """Download `model` into the Hub cache, or finish or check what is there. `force`: download although the
    disk or the plan has no room; `fits`: why the model can't be used on this machine, or None if it can.

    Raises:
        CheckpointNotFound, CheckpointError: no such model, no network, a refused or corrupt file.
        DoesNotFit: no room on the disk, or `fits` objects.
    """
    repo, quant = repository(model) or (model, None)
    if not looks_like_hub_id(repo):
        raise CheckpointNotFound(
            f"{model!r} is not a Hub id; it has the form owner/name, as Qwen/Qwen3-VL-2B-Instruct"
        )
    hub, watch = Hub(), watch or Unwatched()
    listing = of_quant(hub.listing(repo, revision), quant)
    files = wanted(listing)
    if quant is None and not any(file.name.endswith(".safetensors") for file in files):
        there = any(file.name.lower().endswith(SUFFIX) for file in listing.files)
        how = f"say which quantisation of its GGUF files: snugvl pull {model}:{DEFAULT_QUANT}"
        raise UnsupportedModel(
            f"{model} has no safetensors weights; {how if there else 'other formats are not downloaded'}"
        )
    store = Store(repo)
    missing = sum(max(0, file.size - _held(store, file)) for file in files)
    if not force:
        _check_room(model, missing)
        objection = _objection(model, hub, listing, fits) if fits else None
        if objection:
            raise DoesNotFit(f"{objection}; --force downloads it all the same")
    with _storing(model):
        store.prepare()
        names = _fetch_weights(hub, listing, store, watch) | _fetch_small(hub, listing, store)
        folder = store.snapshot(listing.commit)
        for file in files:
            store.link(listing.commit, file.name, names[file.name])
        if revision != listing.commit:
            store.refer(revision or "main", listing.commit)
    return Pulled(folder, listing.commit, sum(file.size for file in files), missing)


def _objection(model: str, hub: Hub, listing: Listing, fits: Fits) -> str | None:
    """The objection of `fits`, or None; None too for a model that only another engine may run."""
    try:
        facts = assemble(model, hub.material(listing))
    except CheckpointError:
        return None
    return fits(facts)


def _fetch_weights(hub: Hub, listing: Listing, store: Store, watch: Watch) -> dict[str, str]:
    """Fetch and verify every file whose sha256 the Hub gives; returns the contents' names by file."""
    files = [file for file in wanted(listing) if file.sha256]
    watch.start("downloading", sum(file.size for file in files))
    stop = Event()

    def came(count_bytes: int) -> None:
        if stop.is_set():  # Ctrl+C, or another file failed: the part that came is kept
            raise _Stopped
        watch.advance(count_bytes)

    return _together(lambda file: _fetch(hub, listing, file, store, came), files, stop)


def _fetch_small(hub: Hub, listing: Listing, store: Store) -> dict[str, str]:
    """Fetch every other file; returns the contents' names by file, which are computed here."""
    files = [file for file in wanted(listing) if not file.sha256]
    return _together(lambda file: _fetch_one_small(hub, listing, file, store), files, Event())


def _together(fetch: Callable[[RemoteFile], str], files: list[RemoteFile], stop: Event) -> dict[str, str]:
    """Fetch several files at a time; returns their contents' names. The first failure stops the others."""
    pool = ThreadPoolExecutor(WORKERS)
    try:
        futures = {file.name: pool.submit(fetch, file) for file in files}
        done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return {name: future.result() for name, future in futures.items()}
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _fetch_one_small(hub: Hub, listing: Listing, file: RemoteFile, store: Store) -> str:
    """Fetch one small file unless its content is here, whole; returns the content's name."""
    here = store.blob(file.blob_id) if file.blob_id else None
    if (
        here is not None
        and here.stat().st_size == file.size
        and git_blob_id(here.read_bytes()) == file.blob_id
    ):
        return here.name
    where = f"{listing.repo}/{file.name}"
    data = hub.small_file(listing, file)
    name = git_blob_id(data)
    if len(data) != file.size or file.blob_id not in (None, name):
        raise CheckpointError(
            f"{where} is corrupt ({len(data):,} bytes called {name[:12]}…, its listing says {file.size:,} "
            f"called {str(file.blob_id)[:12]}…); run the same command again"
        )
    store.blob(name)  # refuses what is not a file
    store.keep(name, data)
    return name


def _fetch(hub: Hub, listing: Listing, file: RemoteFile, store: Store, came: Came) -> str:
    """Fetch one file: continue its .part, check its hash, then give it its name, which is returned."""
    from filelock import FileLock, Timeout

    where, name = f"{listing.repo}/{file.name}", str(file.sha256)
    lock = Path(f"{store.part(name)}.lock")
    if lock.is_symlink():
        raise CheckpointError(f"{lock} is a link; nothing was changed: move it away")
    try:
        with FileLock(lock, timeout=0):
            # Complete by its name, but a disk may have failed since; then a whole one takes its place.
            blob = store.blob(name)
            if blob is not None and _whole(where, blob, file):
                came(file.size)
                return name
            with store.begun(name) as (part, have):
                _fill(hub, listing, file, part, have, came)
    except Timeout:
        raise CheckpointError(f"{where} is being downloaded by another process; wait for it") from None
    lock.unlink(missing_ok=True)
    return name


def _whole(where: str, blob: Path, file: RemoteFile) -> bool:
    """Whether a complete file has the hash of its name.

    Raises:
        CheckpointError: it has, but the listing says another size, and so is wrong.
    """
    with blob.open("rb") as stream:
        if sha256_in(stream) != file.sha256:
            return False
    if blob.stat().st_size != file.size:
        raise CheckpointError(
            f"{where} has {blob.stat().st_size:,} bytes, its listing says {file.size:,}; "
            "is HF_ENDPOINT a Hub?"
        )
    return True


def _fill(hub: Hub, listing: Listing, file: RemoteFile, part: BinaryIO, have: int, came: Came) -> None:
    """Complete `part`, of which `have` bytes are from an earlier run, and verify it.

    If the earlier bytes were wrong, all of it is fetched once more, over them. If all came in this run and is
    wrong, the part is emptied: the server is at fault, and the next attempt starts clean.

    Raises:
        CheckpointError: the content is not what the Hub says it is.
    """
    where = f"{listing.repo}/{file.name}"
    if have > file.size:
        raise CheckpointError(
            f"{where}: {have:,} bytes of it are here ({part.name}), its listing says {file.size:,} in all; "
            "nothing was changed: is HF_ENDPOINT a Hub? If it is, delete that file"
        )
    came(have)
    while True:
        _resume(hub, listing, file, part, have, came)
        digest = sha256_in(part)
        if digest == file.sha256:
            return
        came(-file.size)
        if not have:
            break
        have = 0
    part.truncate(0)
    raise CheckpointError(
        f"{where} is corrupt (sha256 {digest[:12]}…, the Hub says {str(file.sha256)[:12]}…) "
        "and was thrown away; run the same command to fetch it again"
    )


def _resume(hub: Hub, listing: Listing, file: RemoteFile, part: BinaryIO, have: int, came: Came) -> None:
    """Write `part` from byte `have` to its end, past broken connections while they still bring bytes."""
    failures = 0
    while have < file.size:
        before = have
        try:
            part.seek(have)
            with hub.pieces(listing, file, have) as pieces:
                for piece in pieces:
                    part.write(piece)
                    have += len(piece)
                    came(len(piece))
            if have < file.size:
                where = f"{listing.repo}/{file.name}"
                raise HubUnreachable(f"{where}: the connection ended after {have:,} of {file.size:,} bytes")
        except HubUnreachable as error:
            failures = 0 if have - before >= PROGRESS_BYTES else failures + 1
            if failures >= ATTEMPTS:
                raise HubUnreachable(
                    f"{error}; the part that came is kept, run the same command to continue"
                ) from None
        finally:
            part.flush()


def _held(store: Store, file: RemoteFile) -> int:
    """Number of bytes of a file that are on this machine already."""
    name = file.sha256 or file.blob_id
    return store.held(name) if name else 0


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
    """Turn errors of a full or unwritable disk, within the block, into an error of one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(
                f"the disk is full while downloading {model}; the part that came is kept: make room, then "
                "run the same command to continue"
            ) from None
        raise CheckpointError(
            f"{model} can't be stored in {hub_cache()}: {error.strerror or error}; set HF_HOME to a folder "
            "that can be written to"
        ) from None
