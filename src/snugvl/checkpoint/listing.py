"""What a repository has: its listing and index of weights, checked before a name becomes a path or request.

Whoever answers at HF_ENDPOINT chooses these values, so none of them may lead out of the Hub cache, stand for
another file, or write to a terminal. Every refusal is one line with the value in it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from snugvl.checkpoint.gguf_names import first_of, parts_of, projectors_of
from snugvl.checkpoint.section import plain, shown
from snugvl.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_NAME = 255  # bytes of one part of a path: what file systems take
MAX_SHARDS = 4096
MAX_FILES = 100_000  # of a repository
MAX_WANTED = 2 * MAX_SHARDS  # of them fetched: as many shards as an index may name, and the small ones
MAX_SMALL_BYTES = 64_000_000  # of a file without a sha256: git itself takes 10 MB of them at the Hub
MAX_BYTES = 2**50  # of one file, a petabyte: sums of such sizes stay numbers that can be shown

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PLAIN = re.compile(r"[\w.][\w.+=@ -]*")  # without *, ? and [ ]: other tools take names for patterns
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


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
    """A repository at one commit. `quant`: of its GGUF files those of one quantisation are meant."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    quant: str | None = None

    @property
    def name(self) -> str:
        """As `llama-server -hf` has it where a quantisation is meant."""
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def is_commit(value: object) -> bool:
    """Whether `value` is a whole commit hash."""
    return isinstance(value, str) and _COMMIT.fullmatch(value) is not None


def is_repo(value: str) -> bool:
    """Whether `value` has the characters of owner/name, and neither is a way to another folder."""
    return _REPO.fullmatch(value) is not None and not {"..", "."} & set(value.split("/"))


def _hash_of(value: object, kind: str, digits: int, where: str) -> str:
    """A hash, which names a file or a folder of the cache.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(value, str) or re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is None:
        raise CheckpointError(f"{where} has the {kind} {shown(value)}; it must be {digits} digits of 0-9a-f")
    return value


def _path_of(value: object, where: str) -> str:
    """A file's path in a repository: it may lead down, and nowhere else.

    Raises:
        CheckpointError: it is absolute, climbs, or has characters that no path here has.
    """
    if not isinstance(value, str) or not is_inside(value):
        raise CheckpointError(
            f"{where} names the file {shown(value)}, which is not a path inside it; nothing was written"
        )
    return value


def _plain_name_of(value: object, where: str) -> str:
    """The name of a file that is to be fetched: in the repository's own folder, no pattern.

    Raises:
        CheckpointError: it is a path, a pattern, or no name.
    """
    name = _path_of(value, where)
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
    names = sorted({_path_of(name, where) for name in shards.values()})
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{where} names {len(names):,} weight files; {MAX_SHARDS:,} are read at most")
    return names


def is_inside(path: str) -> bool:
    """Whether a path stays below where it begins, on every system, and each part of it can be a name.

    So must a branch, a tag or a commit, which is a path below refs/.
    """
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and ":" not in path
        and not any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME for part in parts)
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
    listing = Listing(
        repo, _hash_of(answer["sha"], "commit", 40, repo), tuple(_remote_file(repo, file) for file in files)
    )
    fetched = wanted(listing)
    names = {_plain_name_of(file.name, repo) for file in fetched}
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
    name = _path_of(file.get("rfilename"), repo)
    where = f"{repo}/{name}"
    size = file.get("size")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_BYTES:
        raise CheckpointError(f"{where} has the size {shown(size)}; a file has 0 to {MAX_BYTES:,} bytes")
    if lfs:
        return RemoteFile(name, size, _hash_of(lfs.get("sha256"), "sha256", 64, where))
    blob_id = file.get("blobId")
    return RemoteFile(name, size, None, None if blob_id is None else _hash_of(blob_id, "blob id", 40, where))


def wanted(listing: Listing) -> tuple[RemoteFile, ...]:
    """The files of a repository that an engine reads: no copies of the weights in other formats.

    Safetensors files at the top (not the vendor's own "consolidated" copy beside the usual ones),
    and the small files: configuration, tokenizer, templates.
    """
    if listing.quant is not None:
        parts, projector = gguf_parts(listing)
        return (*parts, *(() if projector is None else (projector,)))
    names = {file.name for file in listing.files}
    usual = SINGLE in names or INDEX in names
    return tuple(
        file
        for file in listing.files
        if "/" not in file.name
        and file.name.endswith((".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken"))
        and not (usual and file.name.startswith("consolidated"))
    )


def gguf_parts(listing: Listing) -> tuple[list[RemoteFile], RemoteFile | None]:
    """The parts of the quantisation that is meant, and the mmproj that fits.

    Raises:
        CheckpointNotFound: the repository has no such quantisation.
        CheckpointError: a part of it is missing.
    """
    files = {file.name: file for file in listing.files}
    first = first_of(files, listing.quant or "", f"{listing.repo} on the Hub")
    parts = parts_of(first)
    missing = [name for name in parts if name not in files]
    if missing:
        raise CheckpointError(f"{listing.repo} lacks {plain(missing[0])}, a part of {plain(first)}")
    projector = next(iter(projectors_of(files, first)), None)
    return [files[name] for name in parts], None if projector is None else files[projector]


def of_quant(listing: Listing, quant: str | None) -> Listing:
    """The same repository, of which one quantisation is meant; every file of it can be fetched.

    Raises:
        CheckpointNotFound, CheckpointError: as `gguf_parts`; a file whose name is a path.
    """
    mine = replace(listing, quant=quant)
    for file in wanted(mine) if quant else ():
        _plain_name_of(file.name, listing.repo)
    return mine


def not_the_hub(what: str) -> CheckpointError:
    """Somebody else answers."""
    return CheckpointError(
        f"{what}: the answer is not the Hub's; is a proxy or a login page between here and the Hub?"
    )
