"""What a model is, asked of the Hub: sizes, small JSON files and safetensors headers by range requests.

Never the weights: a server that ignores ranges, and would send gigabytes, is left at once. huggingface_hub's
own `parse_safetensors_file_metadata` reads whatever such a server sends, so the requests are made here, over
its session (proxies, redirects without the token to other hosts, HF_ENDPOINT, saved tokens).
"""

import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugvl.checkpoint.assemble import Material, Stored
from snugvl.checkpoint.folder import CONFIG, IMAGES, PROCESSOR, image_settings
from snugvl.checkpoint.safetensors import INDEX, MAX_HEADER_BYTES, SINGLE, parse_header
from snugvl.errors import CheckpointError, CheckpointNotFound, UnsupportedModel

FIRST_BYTES = 100_000  # enough for the whole header of most files, so that one request does
MAX_JSON_BYTES = 64_000_000
CONNECTIONS = 8


class HubUnreachable(CheckpointError):
    """No network, no answer in time, or a Hub in trouble: what is known without it may still serve."""


class HubRefused(CheckpointError):
    """The repository is gated or private, and we may not read it."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. `sha256`: of its content, known for what is stored as LFS (the weights)."""

    name: str
    size: int
    sha256: str | None


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
            HubRefused, HubUnreachable: as they say.
        """
        from huggingface_hub import HfApi

        with speaking(repo):
            info = HfApi(endpoint=self.endpoint, token=self.token).model_info(
                repo, revision=revision, files_metadata=True, timeout=self.timeout
            )
            files = tuple(
                RemoteFile(file.rfilename, int(file.size or 0), file.lfs.sha256 if file.lfs else None)
                for file in info.siblings or ()
            )
            if not info.sha or not files:
                raise CheckpointError(f"{repo} is empty on the Hub")
            return Listing(repo, info.sha, files)

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
        with ThreadPoolExecutor(min(CONNECTIONS, len(weights))) as pool:
            headers = list(pool.map(lambda name: self._header(listing, name), weights))
        tensors = tuple(tensor for header in headers for tensor in header)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise CheckpointError(f"{listing.repo}: a tensor stands in two of its weight files")
        images = image_settings(documents)
        size = sum(file.size for file in wanted(listing))
        return Material(listing.repo, "hub", listing.commit, config, images, tensors, size)

    def _weight_files(self, listing: Listing, names: set[str]) -> list[str]:
        if INDEX in names:
            index = self._json(listing, INDEX).get("weight_map")
            if not isinstance(index, dict) or not index:
                raise CheckpointError(f"{listing.repo}: {INDEX} has no weight_map")
            shards = sorted({str(name) for name in index.values()})
            missing = [name for name in shards if name not in names]
            if missing:
                raise CheckpointError(f"{listing.repo} lacks {missing[0]}, which its {INDEX} names")
            return shards
        if SINGLE in names:
            return [SINGLE]
        raise UnsupportedModel(f"{listing.repo} has no {SINGLE}; only safetensors weights are read")

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

    def _header(self, listing: Listing, name: str) -> list[Stored]:
        where = f"{listing.repo}/{name}"
        data, size = self._fetch(listing, name, (0, FIRST_BYTES - 1))
        if len(data) < 8:
            raise CheckpointError(f"{where} is only {size} bytes on the Hub; it is truncated")
        length = struct.unpack("<Q", data[:8])[0]
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"{where} announces a header of {length:,} bytes in a file of {size:,}; it is truncated or "
                "not a safetensors file"
            )
        if len(data) < 8 + length:
            data += self._fetch(listing, name, (len(data), 7 + length))[0]
        entries = parse_header(data[8 : 8 + length], Path(where), size)
        return [Stored(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in entries.values()]

    def append(
        self, listing: Listing, name: str, path: Path, have: int, size: int, came: Callable[[int], None]
    ) -> None:
        """Append bytes `have`… of a file to `path`, telling `came` of each piece.

        Raises:
            HubUnreachable: the connection broke; what came is in `path`.
            CheckpointError: the server sends something else.
        """
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status

        where = f"{listing.repo}/{name}"
        url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self.endpoint)
        headers = self._headers() | ({"Range": f"bytes={have}-"} if have else {})
        with (
            speaking(where),
            get_session().stream("GET", url, headers=headers, timeout=self.timeout) as answer,
        ):
            hf_raise_for_status(answer)
            if have and answer.status_code != 206:
                came(-have)  # the server starts from the beginning, and so do we
                path.unlink(missing_ok=True)
                have = 0
            with path.open("ab") as file:
                for (
                    chunk
                ) in answer.iter_bytes():  # of no fixed size: an unfilled one is lost when the line breaks
                    have += len(chunk)
                    if have > size:
                        path.unlink()
                        raise CheckpointError(
                            f"{where} is longer than the {size:,} bytes of its listing; try again"
                        )
                    file.write(chunk)
                    came(len(chunk))
        if have < size:
            raise HubUnreachable(f"{where}: the connection ended after {have:,} of {size:,} bytes")

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # not marked as exported

        return {**build_hf_headers(token=self.token), "Accept-Encoding": "identity"}

    def _fetch(self, listing: Listing, name: str, span: tuple[int, int] | None) -> tuple[bytes, int]:
        """Bytes `span` (both ends included) of a file, or a small file whole; and the file's size."""
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status

        where = f"{listing.repo}/{name}"
        url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self.endpoint)
        headers = self._headers()
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
        end = time.monotonic() + self.deadline
        with (
            speaking(where),
            get_session().stream("GET", url, headers=headers, timeout=self.timeout) as answer,
        ):
            hf_raise_for_status(answer)
            size = _size(answer.headers.get("Content-Range"), where) if span else 0
            limit = span[1] - span[0] + 1 if span else MAX_JSON_BYTES
            data = bytearray()
            for chunk in answer.iter_bytes():
                data += chunk
                if len(data) > limit:
                    raise CheckpointError(f"{where}: more than the {limit:,} bytes came that were asked for")
                if time.monotonic() > end:
                    raise HubUnreachable(
                        f"{where}: the Hub sent {len(data):,} bytes in {self.deadline:.0f} s; try again later"
                    )
        if span is not None and len(data) < min(limit, size - span[0]):
            raise CheckpointError(f"{where}: the connection ended after {len(data):,} bytes of {limit:,}")
        return bytes(data), size


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
    if not total.isdecimal():
        raise CheckpointError(
            f"{where}: the server ignores range requests and would send the whole file; its headers can't be "
            "read from there: download the model with snugvl pull, or unset HF_ENDPOINT"
        )
    return int(total)


@contextmanager
def speaking(what: str) -> Iterator[None]:
    """Turns every way in which a conversation with the Hub fails into one line about `what`."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise HubRefused(
            f"{what} is gated: accept its licence on its page at the Hub, then set HF_TOKEN to your token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointNotFound(
            f"no model {what} on the Hub, or it is private; check the name, or set HF_TOKEN to a token "
            "that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointNotFound(f"{what} has no such revision on the Hub; check --revision") from None
    except errors.EntryNotFoundError:
        raise CheckpointError(f"{what} is not on the Hub, although its listing names it") from None
    except errors.HFValidationError:
        raise CheckpointNotFound(f"{what} is no Hub id; it has the form owner/name") from None
    except errors.HfHubHTTPError as error:
        raise _refusal(what, error.response.status_code, error.response.headers.get("Retry-After")) from None
    except errors.OfflineModeIsEnabled:
        raise HubUnreachable(f"{what}: HF_HUB_OFFLINE forbids to ask the Hub; unset it") from None
    except httpx2.TimeoutException:
        raise HubUnreachable(f"{what}: the Hub didn't answer in time; try again later") from None
    except httpx2.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise HubUnreachable(f"{what}: the Hub can't be reached ({reason}); is there a network?") from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise CheckpointError(
            f"{what}: the answer is not the Hub's; is a proxy or a login page between here and the Hub?"
        ) from None


def _refusal(what: str, status: int, retry_after: str | None) -> CheckpointError:
    if status in (401, 403):
        return HubRefused(f"{what}: the Hub refuses ({status}); set HF_TOKEN to a token that may read it")
    if status == 429:
        wait = f" in {retry_after} s" if retry_after else " later"
        return HubUnreachable(f"{what}: too many requests to the Hub (429); try again{wait}, or set HF_TOKEN")
    if status >= 500:
        return HubUnreachable(f"{what}: the Hub has a problem ({status}); try again later")
    return CheckpointError(f"{what}: the Hub answers with status {status}")
