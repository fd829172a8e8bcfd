"""Asks the Hub about a model: sizes, small JSON files, and headers of weights by range requests.

Weights are never read here: the connection to a server that ignores ranges is closed at once.
huggingface_hub reads listings, headers, errors and the bodies of redirects whole, however long they are: so
only the session is its own (proxies, certificates, saved tokens), and the requests are made here. Every
answer is bounded, every failure is one line, and nothing is trusted before it is checked (`listing.py`).
"""

import json
import os
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from snugvl.checkpoint.assemble import CONFIG, IMAGES, PROCESSOR, image_settings
from snugvl.checkpoint.catalogue import did_you_mean
from snugvl.checkpoint.facts import Material, Stored
from snugvl.checkpoint.gguf import GgufHeader, parse_gguf
from snugvl.checkpoint.gguf_files import header_material
from snugvl.checkpoint.listing import (
    INDEX,
    SINGLE,
    Listing,
    RemoteFile,
    gguf_parts,
    is_commit,
    is_inside,
    is_repo,
    not_the_hub,
    read_listing,
    shards_of,
    wanted,
)
from snugvl.checkpoint.safetensors import check_number, parse_header
from snugvl.checkpoint.section import MAX_JSON_BYTES, plain, shown
from snugvl.core.folders import json_object
from snugvl.core.network import http_address, settle_network
from snugvl.errors import CheckpointError, CheckpointNotFound, InputError, UnsupportedModel

FIRST_BYTES = 100_000  # enough for the whole header of most files, so that one request does
MAX_REMOTE_HEADER_BYTES = 32_000_000  # the largest of the Hub have 12; the format allows 100
CONNECTIONS = 8
MAX_REDIRECTS = 10


class HubUnreachable(CheckpointError):
    """No network, no answer in time, or an error of the Hub; facts from caches may do instead."""


class HubRefused(CheckpointError):
    """The repository is gated or private, and the user's token may not read it."""


@dataclass(frozen=True, slots=True)
class Hub:
    """Access to the Hub. `timeout`: seconds without a byte; `deadline`: seconds for one answer."""

    timeout: float = 10.0
    deadline: float = 60.0

    @property
    def endpoint(self) -> str | None:
        """The Hub's address: from HF_ENDPOINT, or huggingface_hub's own.

        Raises:
            HubUnreachable: HF_ENDPOINT is not an address.
        """
        given = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/")
        if given and ("://" not in given or http_address(given) is None):
            raise HubUnreachable(
                f"HF_ENDPOINT ({shown(given)}) is not the address of a Hub; write https://HOST, or unset it"
            )
        return given or None

    def listing(self, repo: str, revision: str | None = None) -> Listing:
        """Commit, files and sizes of a repository.

        Raises:
            CheckpointNotFound: no such model or revision, or a private one.
            CheckpointError: a name, a hash or a size in it that can't be one.
            HubRefused, HubUnreachable: it can't be read, or the Hub can't be reached.
        """
        constants = library().constants
        if not is_repo(repo):
            raise CheckpointNotFound(f"{shown(repo)} is not a Hub id; it has the form owner/name")
        if revision is not None and not is_inside(revision):
            raise CheckpointNotFound(f"{repo} has no such revision on the Hub; check --revision")
        url = f"{self.endpoint or constants.ENDPOINT}/api/models/{repo}"
        if revision is not None:
            url += f"/revision/{quote(revision, safe='')}"
        with _asking(repo, f"{url}?blobs=true", self._headers(), self.timeout) as answer:
            data = _read(repo, answer, MAX_JSON_BYTES, self.deadline)
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
        if listing.quant is not None:
            return self._gguf_material(listing)
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
            raise CheckpointError(f"{listing.repo}: a tensor is in two of its weight files")
        images = image_settings(documents)
        size = sum(file.size for file in wanted(listing))
        return Material(listing.repo, "hub", listing.commit, config, images, tensors, size)

    def _gguf_material(self, listing: Listing) -> Material:
        """Headers of the parts of one quantisation and of its mmproj, read in pieces of growing size, as a
        header doesn't tell its length."""
        parts, projector = gguf_parts(listing)
        tower = None if projector is None else self._gguf_header(listing, projector)
        return header_material(
            listing.name,
            [self._gguf_header(listing, part) for part in parts],
            tower,
            source="hub",
            nbytes=sum(file.size for file in wanted(listing)),
            revision=listing.commit,
        )

    def _gguf_header(self, listing: Listing, file: RemoteFile) -> GgufHeader:
        def read(offset: int, count: int) -> bytes:
            return self._fetch(listing, file.name, (offset, offset + count - 1))[0]

        return parse_gguf(f"{listing.repo}/{file.name}", file.size, read)

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
        """Tensors of all weight files; several headers are fetched at a time, and the first error ends it."""
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
        if (value := json_object(data)) is None:
            raise CheckpointError(
                f"{listing.repo}: {name} is not a JSON object, but {data[:40]!r}; is a proxy or a login "
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
        """The content of a small file.

        Raises:
            CheckpointError: it is longer than its listing says.
        """
        return self._fetch(listing, file.name, None, limit=file.size)[0]

    @contextmanager
    def pieces(self, listing: Listing, file: RemoteFile, have: int) -> Iterator[Iterator[bytes]]:
        """Bytes of a file from byte `have` on, as they come, no more than the listing says are left.

        Raises:
            HubUnreachable: the connection broke.
            CheckpointError: the server sends something else, or more.
        """
        where = f"{listing.repo}/{file.name}"
        headers = self._headers() | ({"Range": f"bytes={have}-"} if have else {})
        with _asking(where, self._url(listing, file.name), headers, self.timeout) as answer:
            skip = have
            if answer.status_code == 206:
                told = answer.headers.get("Content-Range", "")
                if not told.startswith(f"bytes {have}-"):
                    raise CheckpointError(f"{where}: asked from byte {have:,}, the answer is {shown(told)}")
                skip = 0
            yield _bounded(where, answer.iter_raw(), skip, file.size - have)

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # not marked as exported

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if not headers.get("authorization", "").isascii():
            raise HubRefused("the token for the Hub (HF_TOKEN, or a saved one) has letters that no token has")
        return headers

    def _url(self, listing: Listing, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self.endpoint)

    def _fetch(
        self, listing: Listing, name: str, span: tuple[int, int] | None, *, limit: int = MAX_JSON_BYTES
    ) -> tuple[bytes, int]:
        """(bytes `span` of a file, both ends included, or a small file whole; the file's size)."""
        where = f"{listing.repo}/{name}"
        headers = self._headers()
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
            limit = span[1] - span[0] + 1
        with _asking(where, self._url(listing, name), headers, self.timeout) as answer:
            size = _size(answer.headers.get("Content-Range"), where) if span else 0
            data = _read(where, answer, limit, self.deadline)
        if span is not None and len(data) < min(limit, size - span[0]):
            raise CheckpointError(f"{where}: the connection ended after {len(data):,} bytes of {limit:,}")
        return data, size


def _bounded(where: str, pieces: Iterator[bytes], skip: int, left: int) -> Iterator[bytes]:
    """The pieces without their first `skip` bytes, which a server without ranges sends again."""
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


def _size(content_range: str | None, where: str) -> int:
    """The whole file's size in bytes, from the `Content-Range` of an answer to a range request."""
    total = (content_range or "").rpartition("/")[2]
    if not total.isdecimal() or not total.isascii() or len(total) > 16:
        raise CheckpointError(
            f"{where}: the server ignores range requests and would send the whole file; its headers can't be "
            "read from there: download the model with snugvl pull, or unset HF_ENDPOINT"
        )
    return int(total)


@contextmanager
def _asking(where: str, url: str, headers: dict[str, str], timeout: float) -> Iterator[Any]:
    """The answer to a GET, redirects followed, its body not read yet.

    The token is sent to the Hub's host alone: the session drops it from requests to other hosts.

    Raises:
        CheckpointError: in one line about `where`; also for what breaks while the body is read.
    """
    from huggingface_hub import get_session

    with _speaking(where):
        settle_network()
        session = get_session()
        request = session.build_request("GET", url, headers=headers, timeout=timeout)
        for _ in range(MAX_REDIRECTS):
            answer = session.send(request, stream=True, follow_redirects=False)
            try:
                if answer.next_request is None:
                    _check(where, answer)
                    yield answer
                    return
                request = answer.next_request
            finally:
                answer.close()
        raise CheckpointError(f"{where}: over {MAX_REDIRECTS} redirects; is HF_ENDPOINT a Hub?")


def library() -> Any:
    """huggingface_hub, which reads its variables when it is imported.

    Raises:
        HubUnreachable: one of them can't be read; the message has its name.
    """
    if not os.environ.get("HF_ENDPOINT", "set").strip():
        del os.environ["HF_ENDPOINT"]  # an empty one would be the address
    try:
        import huggingface_hub.constants
    except ValueError as error:
        theirs = [name for name in os.environ if name.startswith("HF_")]
        name = next((name for name in theirs if repr(os.environ[name]) in str(error)), "HF_…")
        why = f"the environment variable {name} can't be read ({error})"
        raise HubUnreachable(f"{why}; correct or unset it") from None
    return huggingface_hub


def _read(where: str, answer: Any, limit: int, seconds: float) -> bytes:
    """The body of an answer: at most `limit` bytes, in at most `seconds`.

    Raises:
        CheckpointError: it is longer.
        HubUnreachable: it takes longer.
    """
    end = time.monotonic() + seconds
    data = bytearray()
    for chunk in answer.iter_raw():
        data += chunk
        if len(data) > limit:
            raise CheckpointError(f"{where}: more than the {limit:,} bytes came that were asked for")
        if time.monotonic() > end:
            raise HubUnreachable(
                f"{where}: the Hub sent {len(data):,} bytes in {seconds:.0f} s; try again later"
            )
    return bytes(data)


@contextmanager
def _speaking(what: str) -> Iterator[None]:
    """Turn every failure of a request to the Hub within the block into an error of one line about `what`."""
    import httpx2
    from huggingface_hub import errors

    # It speaks HTTP by httpx2 from its version 2 on, by httpx before; their names are the same.
    if TYPE_CHECKING or issubclass(errors.HfHubHTTPError, httpx2.HTTPError):
        httpx = httpx2
    else:
        import httpx

    try:
        yield
    except errors.OfflineModeIsEnabled:
        meant = did_you_mean(what)
        raise HubUnreachable(f"{what}: HF_HUB_OFFLINE forbids requests to the Hub; unset it{meant}") from None
    except InputError as error:  # of proxies
        raise HubUnreachable(f"{what}: the Hub can't be reached: {error}") from None
    except httpx.TimeoutException:
        raise HubUnreachable(f"{what}: the Hub didn't answer in time; try again later") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise HubUnreachable(
            f"{what}: the Hub can't be reached ({reason}); check the network{did_you_mean(what)}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise not_the_hub(what) from None


def _check(what: str, answer: Any) -> None:
    """Refuse an answer with an error status, without reading its body.

    Raises:
        CheckpointNotFound, HubRefused, HubUnreachable, CheckpointError: by its status and X-Error-Code.
    """
    status, code = answer.status_code, answer.headers.get("X-Error-Code")
    if status in (200, 206):
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):  # it was asked to come as it is: what is compressed has no bounds
            raise CheckpointError(f"{what}: the answer came compressed; is HF_ENDPOINT a Hub?")
        return
    invalid = answer.headers.get("X-Error-Message") == "Invalid credentials in Authorization header"
    if status >= 400 and code == "GatedRepo":
        raise HubRefused(
            f"{what} is gated: accept its licence on its page at the Hub, then set HF_TOKEN to your token"
        )
    if status >= 400 and (code == "RepoNotFound" or (code is None and status == 401 and not invalid)):
        raise CheckpointNotFound(
            f"no model {what} on the Hub, or it is private; check the name, or set HF_TOKEN to a token "
            f"that may read it{did_you_mean(what)}"
        )
    if status >= 400 and code == "RevisionNotFound":
        raise CheckpointNotFound(f"{what} has no such revision on the Hub; check --revision")
    if status >= 400 and code == "EntryNotFound":
        raise CheckpointError(f"{what} is not on the Hub, although its listing names it")
    raise _refusal(what, status, answer.headers.get("Retry-After"))


def _refusal(what: str, status: int, retry_after: str | None) -> CheckpointError:
    if status in (401, 403):
        return HubRefused(f"{what}: the Hub refuses ({status}); set HF_TOKEN to a token that may read it")
    if status == 429:
        short = retry_after and retry_after.isdecimal() and len(retry_after) < 6
        wait = f" in {retry_after} s" if short else " later"
        return HubUnreachable(f"{what}: too many requests to the Hub (429); try again{wait}, or set HF_TOKEN")
    if status >= 500:
        return HubUnreachable(f"{what}: the Hub has a problem ({status}); try again later")
    return CheckpointError(f"{what}: the Hub answers with status {status}")
