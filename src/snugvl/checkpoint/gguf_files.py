"""Finds GGUF models on this machine, wherever a program has put them; they are read in place, never changed.

FOLDER/model-Q4_K_M.gguf                    with its parts and the mmproj beside it (`listing.py`)
owner/name:Q4_K_M, hf:owner/name:Q4_K_M     in the Hub cache: repository and quantisation, as for
                                            `llama-server -hf`
ollama:name, ollama:name:tag                what Ollama has pulled: a manifest names two blobs
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from snugvl.checkpoint.facts import FactSource, Material
from snugvl.checkpoint.gguf import MAGIC, GgufHeader, read_gguf
from snugvl.checkpoint.gguf_facts import FILE, UNLIKE
from snugvl.checkpoint.listing import SUFFIX, first_of, is_first, is_repo, parts_of, projectors_of, quant_of
from snugvl.checkpoint.section import MAX_JSON_BYTES
from snugvl.checkpoint.store import REPO_PREFIX, repo_folder, repo_of
from snugvl.core.folders import expanded, hub_cache, read_small
from snugvl.errors import CheckpointError, CheckpointNotFound

ANY: Final = "*.[gG][gG][uU][fF]"  # pattern of files
OLLAMA: Final = "ollama:"
HUB: Final = "hf:"
DEFAULT_QUANT: Final = "Q4_K_M"  # llama.cpp's own
IMAGE, PROJECTOR = "application/vnd.ollama.image.model", "application/vnd.ollama.image.projector"
_PAGE: Final = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?"
    r"(?:/(?:tree|blob|resolve)/main(?:/(?P<file>[^?#]*))?)?/?(?:[?#].*)?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """The files of one model, the first part first; `projector`: its mmproj, or None.

    `unlike`: why an mmproj beside it doesn't belong to it, as a sentence, or "".
    """

    parts: tuple[Path, ...]
    projector: Path | None
    unlike: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(path.stat().st_size for path in (*self.parts, *filter(None, [self.projector])))


def repository(model: str) -> tuple[str, str] | None:
    """Repository and quantisation of `owner/name:QUANT` or `hf:owner/name[:QUANT]`; None for other names."""
    name, _, quant = model.removeprefix(HUB).partition(":")
    named = model.startswith(HUB) or bool(quant)
    return (name, quant or DEFAULT_QUANT) if named and is_repo(name) else None


def hub_id(model: str) -> str:
    """The id in the address of a page or file at the Hub, with the quantisation of a GGUF. Other names, and
    addresses of branches other than main, are returned as they are."""
    found = _PAGE.fullmatch(model.strip())
    if found is None:
        return model
    quant = quant_of(found["file"]) if (found["file"] or "").lower().endswith(SUFFIX) else found["quant"]
    return f"{found['id']}:{quant}" if quant else found["id"]


def gguf_files(model: str) -> GgufFiles | None:
    """The files of `model` on this machine; None where it isn't the name of a GGUF, or isn't here.

    Raises:
        CheckpointNotFound: a folder with several models; nothing of Ollama's under that name.
        CheckpointError: a part is missing, or a manifest is broken.
    """
    if model.startswith(OLLAMA):
        return _of_ollama(model.removeprefix(OLLAMA))
    if (found := repository(model)) is not None:
        return _of_hub_cache(*found)
    path = expanded(model)
    if (
        model and path.is_file() and (path.suffix.lower() == SUFFIX or is_gguf(path))
    ):  # else reading it says what it is
        return _beside(path)
    if not model or not path.is_dir() or (path / "config.json").is_file():
        return None
    firsts = sorted(file for file in path.glob(ANY) if is_first(file.name))
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts[:5])
        raise CheckpointNotFound(f"{model} has several models ({names}); name one file: {firsts[0]}")
    some = firsts or sorted(path.glob(ANY))  # a tower alone or a later part: reading it says what is missing
    return _beside(some[0]) if some else None


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _beside(path: Path) -> GgufFiles:
    """A file with its other parts, and the mmproj in the same folder."""
    parts = [path.with_name(name) for name in parts_of(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path.parent} lacks {missing[0]} ({len(missing)} of {len(parts)} parts)")
    others = {file.name for file in path.parent.glob(ANY)} - {path.name}
    towers = projectors_of(others, path.name)
    if path.parent == _llamacpp_folder():  # OWNER_REPO_FILE, of all repositories together
        mine = path.name.lower()
        towers = [name for name in towers if mine.startswith(name.lower().partition("mmproj")[0])]
    width = _width(path, "{}.embedding_length") if towers else None
    widths = {name: _width(path.with_name(name), "{}.vision.projection_dim") for name in towers}
    fitting = next((path.with_name(name) for name in towers if widths[name] == width), None)
    if not towers or fitting is not None:
        return GgufFiles(tuple(parts), fitting)
    gives = widths[towers[0]] or "an unknown number of"
    why = f"it gives {gives} values a token of a picture, and the model takes {width or 'an unknown one'}"
    return GgufFiles(tuple(parts), None, f"{towers[0]} is left out, so the model sees no pictures: {why}.")


def _width(path: Path, key: str) -> Any:
    """Width of an embedding at `key`, by which a tower is matched with a model; None where unknown."""
    values = read_gguf(path).values
    return values.get(key.format(values.get("general.architecture")))


def _of_hub_cache(repo: str, quant: str) -> GgufFiles | None:
    """The files of the newest snapshot that has them; llama.cpp and others also download into this cache."""
    folder = repo_folder(repo) / "snapshots"
    for snapshot in sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True):
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob(ANY)]
        try:
            first = first_of(names, quant, repo)
        except CheckpointNotFound:
            continue
        parts = [snapshot / name for name in parts_of(first)]
        if all(part.is_file() for part in parts):
            tower = next(iter(projectors_of(names, first)), None)
            return GgufFiles(tuple(parts), None if tower is None else snapshot / tower)
    return None


def hub_models() -> Iterator[str]:
    """The GGUF models of the Hub cache, as `owner/name:QUANT`."""
    for folder in sorted(hub_cache().glob(f"{REPO_PREFIX}*--*")):
        names = {path.name for path in folder.glob(f"snapshots/**/{ANY}") if is_first(path.name)}
        yield from (f"{repo_of(folder)}:{quant_of(name)}" for name in sorted(names))


def ollama_models() -> Iterator[str]:
    """The models that Ollama has on this machine, as `ollama:name:tag`."""
    for path in sorted((_ollama_folder() / "manifests").glob("*/*/*/*")):
        owner, name, tag = path.parts[-3:]
        if path.is_file():
            yield f"{OLLAMA}{name if owner == 'library' else f'{owner}/{name}'}:{tag}"


def lm_studio_models() -> Iterator[str]:
    """Model files that LM Studio has here."""
    for folder in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        for path in sorted(expanded(folder).glob(f"*/*/{ANY}")):
            if is_first(path.name):
                yield str(path)


def llamacpp_models() -> Iterator[str]:
    """Model files of llama.cpp's own cache: in one folder by older builds, in the Hub cache's layout by newer
    ones."""
    folder = _llamacpp_folder()
    nested = () if folder == hub_cache() else folder.glob(f"{REPO_PREFIX}*/snapshots/*/**/{ANY}")
    for path in sorted([*folder.glob(ANY), *nested]):
        if is_first(path.name):
            yield str(path)


def ggufs_here() -> list[str]:
    """The names of all GGUF models on this machine, by any program that downloaded them."""
    return [*hub_models(), *ollama_models(), *lm_studio_models(), *llamacpp_models()]


def _llamacpp_folder() -> Path:
    """llama.cpp's cache: LLAMA_CACHE, else its folder among the user's caches."""
    if chosen := os.environ.get("LLAMA_CACHE"):
        return expanded(chosen)
    if sys.platform == "darwin":
        return expanded("~/Library/Caches/llama.cpp")
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llama.cpp"


def _ollama_folder() -> Path:
    """Ollama's folder of models: OLLAMA_MODELS, the user's, or that of its service on Linux."""
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return expanded(chosen)
    mine, service = expanded("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")
    return service if not mine.is_dir() and service.is_dir() else mine


def _of_ollama(name: str) -> GgufFiles:
    """The blobs that a manifest names: manifests/HOST/OWNER/NAME/TAG, blobs/sha256-…"""
    title, _, tag = name.partition(":")
    path, root = [*title.split("/"), tag or "latest"], _ollama_folder()
    if not all(re.fullmatch(r"\w[\w.-]*", part) for part in path) or len(path) > 3:
        raise CheckpointNotFound(f"{OLLAMA}{name} is not the name of a model; use {OLLAMA}NAME[:TAG]")
    wanted = "/".join(["*", *(["library"] if len(path) == 2 else []), *path])
    manifest = next(iter(sorted((root / "manifests").glob(wanted))), None)
    if manifest is None:
        raise CheckpointNotFound(f"Ollama has no {name} in {root}; `snugvl list` shows what it has")
    digests = _digests(manifest)
    blobs = {kind: root / "blobs" / digest.replace(":", "-") for kind, digest in digests.items()}
    missing = [blob for blob in blobs.values() if not blob.is_file()]
    if missing:
        raise CheckpointError(f"Ollama's {name} lacks {missing[0]}; pull it again with ollama pull {name}")
    return GgufFiles((blobs[IMAGE],), blobs.get(PROJECTOR))


def _digests(manifest: Path) -> dict[str, str]:
    try:
        layers = json.loads(read_small(manifest, MAX_JSON_BYTES))["layers"]
        found = {str(layer["mediaType"]): str(layer["digest"]) for layer in layers}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = {}
    digests = {kind: found[kind] for kind in (IMAGE, PROJECTOR) if kind in found}
    if IMAGE not in digests or not all(_DIGEST.fullmatch(digest) for digest in digests.values()):
        raise CheckpointError(f"{manifest} is not a manifest of a model that is a GGUF")
    return digests


def file_material(where: str, files: GgufFiles) -> Material:
    """Read the headers of files on this machine.

    Raises:
        CheckpointError, UnsupportedModel: as `read_gguf`; parts that don't belong together.
    """
    headers = [read_gguf(path) for path in files.parts]
    tower = None if files.projector is None else read_gguf(files.projector)
    found = header_material(where, headers, tower, source="file", nbytes=files.nbytes)
    return replace(found, config={**found.config, UNLIKE: files.unlike}) if files.unlike else found


def header_material(
    where: str,
    headers: Sequence[GgufHeader],
    tower: GgufHeader | None,
    *,
    source: FactSource,
    nbytes: int,
    revision: str | None = None,
) -> Material:
    """The material of all parts together; the first one has the metadata.

    Raises:
        CheckpointError: a tensor is there twice, or there are fewer than the first part says.
    """
    values: dict[str, Any] = dict(headers[0].values)
    tensors = [each for header in (*headers, *filter(None, [tower])) for each in header.tensors]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise CheckpointError(f"{where}: a tensor is in two of its files")
    told, mine = values.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if told not in (None, mine):
        raise CheckpointError(
            f"{where} has {mine:,} tensors in {len(headers)} parts; its header names {told:,}"
        )
    images = None if tower is None else dict(tower.values)
    if source == "file":
        values[FILE] = headers[0].where
        images = None if tower is None else {**tower.values, FILE: tower.where}
    return Material(where, source, revision, values, images, tuple(tensors), nbytes)
