"""What a model is, asked of the Hub: sizes, small JSON files and safetensors headers by range requests.

Never the weights: a server that ignores ranges, and would send gigabytes, is left at once. huggingface_hub's
own `parse_safetensors_file_metadata` and `model_info` read whatever such a server sends, so the requests are
made here (`conversation.py`). Nothing that it answers is believed before it is checked (`names.py`).
"""

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from snugvl.checkpoint.assemble import Material, Stored
from snugvl.checkpoint.conversation import HubRefused, HubUnreachable, asking, not_the_hub, read
from snugvl.checkpoint.folder import CONFIG, IMAGES, PROCESSOR, image_settings
from snugvl.checkpoint.names import (
    blob_id_of,
    commit_of,
    is_commit,
    is_repo,
    is_revision,
    path_of,
    plain_name_of,
    sha256_of,
    shards_of,
    size_of,
)
from snugvl.checkpoint.safetensors import INDEX, SINGLE, check_number, parse_header
from snugvl.checkpoint.section import MAX_JSON_BYTES, plain, shown
from snugvl.errors import CheckpointError, CheckpointNotFound, UnsupportedModel

__all__ = ["Hub", "HubRefused", "HubUnreachable", "Listing", "RemoteFile", "wanted"]

FIRST_BYTES = 100_000  # enough for the whole header of most files, so that one request does
MAX_FILES = 100_000  # of a repository
MAX_WANTED = 2 * 4096  # of them fetched: as many shards as an index may name, and the small ones
MAX_SMALL_BYTES = 64_000_000  # of a file without a sha256: git itself takes 10 MB of them at the Hub
MAX_REMOTE_HEADER_BYTES = 32_000_000  # the largest of the Hub have 12; the format allows 100
CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository.

    Attributes:
        sha256: of its content, known for what is stored as LFS (the weights).
        blob_id: git's name of its content; known for the others, where a mirror tells it.
    """

    name: str
    size: int
    sha256: str | None
    blob_id: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True)
class Hub:
    """Where and as whom to ask. `timeout`: seconds without a byte; `deadline`: seconds for one answer."""

    token: str | None = None
    timeout: float = 10.0
    deadline: float = 60.0

    @property
    def endpoint(self) -> str | None:
        """From HF_ENDPOINT, or huggingface_hub's own."""
        return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None

    def listing(self, repo: str, revision: str | None = None) -> Listing:
        """Commit, files and sizes of a repository.

        Raises:
            CheckpointNotFound: no such model or revision, or a private one.
            CheckpointError: a name, a hash or a size in it that can't be one.
            HubRefused, HubUnreachable: as they say.
        """
        from huggingface_hub import constants

        if not is_repo(repo):
            raise CheckpointNotFound(f"{shown(repo)} is no Hub id; it has the form owner/name")
        if revision is not None and not is_revision(revision):
            raise CheckpointNotFound(f"{repo} has no such revision on the Hub; check --revision")
        url = f"{self.endpoint or constants.ENDPOINT}/api/models/{repo}"
        if revision is not None:
            url += f"/revision/{quote(revision, safe='')}"
        with asking(repo, f"{url}?blobs=true", self._headers(), self.timeout) as answer:
            data = read(repo, answer, MAX_JSON_BYTES, self.deadline)
        try:
            listing = read_listing(repo, json.loads(data))
        except (ValueError, RecursionError):
            raise not_the_hub(repo) from None
        if revision is not None and is_commit(revision) and listing.commit != revision:
            raise CheckpointError(
                f"{repo}: asked for the commit {revision}, the answer is of {listing.commit}; "
                "is HF_ENDPOINT a Hub?"
            )
        return listing

    def material(self, listing: Listing) -> Material:
        """Configuration and headers of a repository.

        Raises:
            CheckpointError: a file is missing, nonsense, truncated, or would come whole.
            UnsupportedModel: weights in another format than safetensors.
        """
        names = {file.name for file in listing.files}
        if CONFIG not in names:
            raise CheckpointError(
                f"{listing.repo} has no {CONFIG} on the Hub; it is not a complete checkpoint"
            )
        config = self._json(listing, CONFIG)
        documents = {name: self._json(listing, name) for name in (IMAGES, PROCESSOR) if name in names}
        weights = self._weight_files(listing, names)
        tensors = tuple(self._tensors(listing, weights))
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise CheckpointError(f"{listing.repo}: a tensor stands in two of its weight files")
        images = image_settings(documents)
        size = sum(file.size for file in wanted(listing))
        return Material(listing.repo, "hub", listing.commit, config, images, tensors, size)

    def _weight_files(self, listing: Listing, names: set[str]) -> list[str]:
        if INDEX in names:
            shards = shards_of(self._json(listing, INDEX), f"{listing.repo}: {INDEX}")
            missing = [name for name in shards if name not in names]
            if missing:
                raise CheckpointError(f"{listing.repo} lacks {plain(missing[0])}, which its {INDEX} names")
            return shards
        if SINGLE in names:
            return [SINGLE]
        raise UnsupportedModel(f"{listing.repo} has no {SINGLE}; only safetensors weights are read")

    def _tensors(self, listing: Listing, weights: list[str]) -> list[Stored]:
        """Of all weight files, several asked for at a time; the first that is wrong ends it."""
        pool, parsing, seen = ThreadPoolExecutor(min(CONNECTIONS, len(weights))), Lock(), [0]

        def read_one(name: str) -> list[Stored]:
            raw, size = self._header(listing, name)
            with parsing:  # one at a time: a header of some megabytes becomes hundreds of them
                check_number(seen[0], listing.repo)
                header = parse_header(raw, Path(f"{listing.repo}/{name}"), size).values()
                seen[0] += len(header)
                return [Stored(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in header]

        try:
            tensors = [tensor for header in pool.map(read_one, weights) for tensor in header]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        check_number(len(tensors), listing.repo)
        return tensors

    def _json(self, listing: Listing, name: str) -> dict[str, Any]:
        data, _ = self._fetch(listing, name, None)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{listing.repo}: {name} came as no JSON object, but as {data[:40]!r}; is a proxy or a login "
                "page between this machine and the Hub?"
            )
        return value

    def _header(self, listing: Listing, name: str) -> tuple[bytes, int]:
        """The JSON of a weight file's header, and the file's size."""
        where = f"{listing.repo}/{name}"
        data, size = self._fetch(listing, name, (0, FIRST_BYTES - 1))
        if len(data) < 8:
            raise CheckpointError(f"{where} is only {size} bytes on the Hub; it is truncated")
        length = struct.unpack("<Q", data[:8])[0]
        if length > MAX_REMOTE_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"{where} announces a header of {length:,} bytes in a file of {size:,}; it is truncated or "
                "not a safetensors file"
            )
        if len(data) < 8 + length:
            data += self._fetch(listing, name, (len(data), 7 + length))[0]
        return data[8 : 8 + length], size

    def small_file(self, listing: Listing, file: RemoteFile) -> bytes:
        """A small file whole.

        Raises:
            CheckpointError: it is longer than its listing says.
        """
        return self._fetch(listing, file.name, None, limit=file.size)[0]

    @contextmanager
    def pieces(self, listing: Listing, file: RemoteFile, have: int) -> Iterator[Iterator[bytes]]:
        """Bytes `have`… of a file as they come, at most those that the listing says are left.

        Raises:
            HubUnreachable: the connection broke.
            CheckpointError: the server sends something else, or more.
        """
        where = f"{listing.repo}/{file.name}"
        headers = self._headers() | ({"Range": f"bytes={have}-"} if have else {})
        with asking(where, self._url(listing, file.name), headers, self.timeout) as answer:
            skip = have
            if answer.status_code == 206:
                told = answer.headers.get("Content-Range", "")
                if not told.startswith(f"bytes {have}-"):
                    raise CheckpointError(f"{where}: asked from byte {have:,}, the answer is {shown(told)}")
                skip = 0
            yield _bounded(where, answer.iter_raw(), skip, file.size - have)

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # not marked as exported

        return {**build_hf_headers(token=self.token), "Accept-Encoding": "identity"}

    def _url(self, listing: Listing, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self.endpoint)

    def _fetch(
        self, listing: Listing, name: str, span: tuple[int, int] | None, *, limit: int = MAX_JSON_BYTES
    ) -> tuple[bytes, int]:
        """Bytes `span` (both ends included) of a file, or a small file whole; and the file's size."""
        where = f"{listing.repo}/{name}"
        headers = self._headers()
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
            limit = span[1] - span[0] + 1
        with asking(where, self._url(listing, name), headers, self.timeout) as answer:
            size = _size(answer.headers.get("Content-Range"), where) if span else 0
            data = read(where, answer, limit, self.deadline)
        if span is not None and len(data) < min(limit, size - span[0]):
            raise CheckpointError(f"{where}: the connection ended after {len(data):,} bytes of {limit:,}")
        return data, size


def _bounded(where: str, pieces: Iterator[bytes], skip: int, left: int) -> Iterator[bytes]:
    """What comes, without its first `skip` bytes, which a server without ranges sends once more."""
    total = left
    for piece in pieces:
        rest = piece[min(skip, len(piece)) :]
        skip -= len(piece) - len(rest)
        if rest[:left]:
            yield rest[:left]
        left -= len(rest)
        if left < 0:
            raise CheckpointError(
                f"{where} is longer than its listing says ({total:,} bytes more); try again"
            )


def read_listing(repo: str, answer: Any) -> Listing:
    """A listing as the Hub's API gives it; nothing in it is used before it is checked.

    Raises:
        CheckpointError: names the value that can't be what it says.
    """
    files = answer.get("siblings") if isinstance(answer, dict) else None
    if not isinstance(files, list) or "sha" not in answer:
        raise not_the_hub(repo)
    if not files:
        raise CheckpointError(f"{repo} is empty on the Hub")
    if len(files) > MAX_FILES:
        raise CheckpointError(f"{repo} has {len(files):,} files; {MAX_FILES:,} are listed at most")
    listing = Listing(repo, commit_of(answer["sha"], repo), tuple(_remote_file(repo, file) for file in files))
    fetched = wanted(listing)
    names = {plain_name_of(file.name, repo) for file in fetched}
    if len(names) != len(fetched):
        raise CheckpointError(f"{repo} lists a file twice; is HF_ENDPOINT a Hub?")
    if len(names) > MAX_WANTED:
        raise CheckpointError(f"{repo} has {len(names):,} files to fetch; {MAX_WANTED:,} are fetched at most")
    for file in fetched:
        if file.sha256 is None and file.size > MAX_SMALL_BYTES:
            raise CheckpointError(
                f"{repo}/{file.name} has {file.size:,} bytes and no sha256; it couldn't be verified"
            )
    return listing


def _remote_file(repo: str, file: Any) -> RemoteFile:
    if not isinstance(file, dict) or not isinstance(lfs := file.get("lfs"), dict | None):
        raise not_the_hub(repo)
    name = path_of(file.get("rfilename"), repo)
    where = f"{repo}/{name}"
    size = size_of(file.get("size"), where)
    if lfs:
        return RemoteFile(name, size, sha256_of(lfs.get("sha256"), where))
    blob_id = file.get("blobId")
    return RemoteFile(name, size, None, None if blob_id is None else blob_id_of(blob_id, where))


def wanted(listing: Listing) -> tuple[RemoteFile, ...]:
    """The files of a repository that an engine reads: no copies of the weights in other formats.

    Safetensors files at the top (not the vendor's own "consolidated" copy beside the usual ones),
    and the small files: configuration, tokenizer, templates.
    """
    names = {file.name for file in listing.files}
    usual = SINGLE in names or INDEX in names
    return tuple(
        file
        for file in listing.files
        if "/" not in file.name
        and file.name.endswith((".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken"))
        and not (usual and file.name.startswith("consolidated"))
    )


def _size(content_range: str | None, where: str) -> int:
    """The whole file's size, which only an answer to a range request tells."""
    total = (content_range or "").rpartition("/")[2]
    if not total.isdecimal() or not total.isascii() or len(total) > 16:
        raise CheckpointError(
            f"{where}: the server ignores range requests and would send the whole file; its headers can't be "
            "read from there: download the model with snugvl pull, or unset HF_ENDPOINT"
        )
    return int(total)
