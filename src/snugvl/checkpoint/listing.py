"""A repository's listing and index of weights, checked before any name becomes a path or a request.

The server at HF_ENDPOINT chooses these values, so none may lead out of the Hub cache, stand for another file,
or control a terminal. Every refusal is one line with the value in it.

Names of GGUF files say which are parts of one model, which quantisation they have, and which is the mmproj:

model-Q4_K_M.gguf                one file, or model-Q4_K_M-00001-of-00003.gguf and the others
mmproj-model-F16.gguf            its vision tower; among several the one named most like it, in 16 bits
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

from snugvl.checkpoint.section import plain, shown
from snugvl.errors import CheckpointError, CheckpointNotFound

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


SUFFIX: Final = ".gguf"
MAX_PARTS: Final = 1024
# An mmproj of 16 bits is what vendors test; in 32 it is twice as large for the same answers.
PROJECTOR_TYPES: Final = ("F16", "BF16", "Q8_0", "F32")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d\w*|B?F16|F32|MXFP4\w*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository.

    Attributes:
        sha256: hash of its content, known for files that are stored as LFS (the weights).
        blob_id: git's hash of its content, known for the others where the server tells it.
    """

    name: str
    size: int
    sha256: str | None
    blob_id: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit. `quant`: the quantisation whose GGUF files are meant; None without any."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    quant: str | None = None

    @property
    def name(self) -> str:
        """The model's name: the id, with the quantisation, as for `llama-server -hf`, where one is meant."""
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def is_commit(value: object) -> bool:
    """Whether `value` is a whole commit hash."""
    return isinstance(value, str) and _COMMIT.fullmatch(value) is not None


def is_repo(value: str) -> bool:
    """Whether `value` has the form owner/name, in characters of the Hub's ids, and leads to no other
    folder."""
    return _REPO.fullmatch(value) is not None and not {"..", "."} & set(value.split("/"))


def _hash_of(value: object, kind: str, digits: int, where: str) -> str:
    """Check a hash, which names a file or a folder of the cache, and return it.

    Raises:
        CheckpointError: it has another form.
    """
    if not isinstance(value, str) or re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is None:
        raise CheckpointError(f"{where} has the {kind} {shown(value)}; it must be {digits} digits of 0-9a-f")
    return value


def _path_of(value: object, where: str) -> str:
    """Check a file's path in a repository, which may only lead down, and return it.

    Raises:
        CheckpointError: it is absolute, climbs, or has characters that no path here has.
    """
    if not isinstance(value, str) or not is_inside(value):
        raise CheckpointError(
            f"{where} names the file {shown(value)}, which is not a path inside it; nothing was written"
        )
    return value


def _plain_name_of(value: object, where: str) -> str:
    """Check the name of a file that is to be fetched, and return it: in the top folder, no pattern.

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

    A branch, a tag or a commit must do so as well, as it is a path below refs/.
    """
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and ":" not in path
        and not any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME for part in parts)
    )


def read_listing(repo: str, answer: Any) -> Listing:
    """Read a listing from an answer of the Hub's API, every value checked.

    Raises:
        CheckpointError: names the value that can't be right.
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
    """(the parts of the listing's quantisation, the mmproj that fits or None).

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
    """The listing with one quantisation of its files chosen, each of which can be fetched.

    Raises:
        CheckpointNotFound, CheckpointError: as `gguf_parts`; a file whose name is a path.
    """
    mine = replace(listing, quant=quant)
    for file in wanted(mine) if quant else ():
        _plain_name_of(file.name, listing.repo)
    return mine


def not_the_hub(what: str) -> CheckpointError:
    """The error about an answer that isn't the Hub's: another server answers there."""
    return CheckpointError(
        f"{what}: the answer is not the Hub's; is a proxy or a login page between here and the Hub?"
    )


def is_projector(name: str) -> bool:
    """Whether a file is a vision tower (an mmproj), by its name."""
    return "mmproj" in PurePosixPath(name).name.lower()


def is_first(name: str) -> bool:
    """Whether a file is a model's only one, or the first of its parts."""
    match = _PART.fullmatch(name)
    return not is_projector(name) and (match is None or int(match["number"]) == 1)


def parts_of(name: str) -> list[str]:
    """All parts of the model that a file is, or is a part of.

    Raises:
        CheckpointError: there are too many.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= MAX_PARTS:
        raise CheckpointError(f"{plain(name)} is one of {count:,} parts; {MAX_PARTS:,} are read at most")
    end = name[-len(SUFFIX) :]  # in capitals, if it is
    return [f"{match['stem']}-{number:05}-of-{match['count']}{end}" for number in range(1, count + 1)]


def says(name: str, quant: str) -> bool:
    """Whether a file's name has a quantisation as a word of its own: BF16 doesn't contain F16."""
    pattern = rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(pattern, PurePosixPath(name).name, re.IGNORECASE) is not None


def first_of(names: Iterable[str], quant: str, where: str) -> str:
    """The file of a quantisation, or the first of its parts.

    Raises:
        CheckpointNotFound: there is none; names those there are.
    """
    models = sorted(name for name in names if name.lower().endswith(SUFFIX) and is_first(name))
    mine = next((name for name in models if says(name, quant)), None)
    if mine is None:
        there = sorted({quant_of(name) for name in models})
        has = f"it has {', '.join(map(plain, there))}" if there else "it has no GGUF files"
        raise CheckpointNotFound(f"{where} has no {plain(quant)}; {has}")
    return mine


def projectors_of(names: Iterable[str], model: str) -> list[str]:
    """The vision towers beside a model, the likeliest to belong to it first."""

    def rank(name: str) -> tuple[int, int, str]:
        kinds = [index for index, kind in enumerate(PROJECTOR_TYPES) if says(name, kind)]
        stem = re.sub(r"^mmproj[-_.]?|[-_.]?mmproj", "", PurePosixPath(name).name.lower())
        pairs = zip(stem, PurePosixPath(model).name.lower(), strict=False)
        shared = next((index for index, (mine, its) in enumerate(pairs) if mine != its), len(stem))
        return -shared, kinds[0] if kinds else len(PROJECTOR_TYPES), name

    return sorted((name for name in names if name.lower().endswith(SUFFIX) and is_projector(name)), key=rank)


def quant_of(name: str) -> str:
    """The quantisation that a file's name says; the whole name where it says none."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", PurePosixPath(name).stem)
    match = _QUANT.search(stem)
    return match[0] if match else stem
