"""A GGUF as the small files of a checkpoint folder, which our own engine reads like any other folder.

    $XDG_CACHE_HOME/snugvl/gguf/HASH/     config.json, …, gguf.json (where the weights are), digest

Made once for a file, as it was then: the hash is of paths, sizes and times. The GGUF itself stays where it
is, and is never changed. Only the last few folders are kept.
"""

import hashlib
import json
import secrets
import shutil
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from snugvl.checkpoint.families import PROJECTORS, parse_config
from snugvl.checkpoint.gguf import GgufHeader, read_gguf
from snugvl.checkpoint.gguf_facts import KEPT, tokenizer_files
from snugvl.checkpoint.gguf_files import GgufFiles
from snugvl.checkpoint.gguf_network import (
    FACTORS,
    config_of,
    entries_of,
    parsed,
    placed,
    projector_of,
    squares,
)
from snugvl.checkpoint.safetensors import TensorEntry, read_tensors
from snugvl.checkpoint.section import read_json
from snugvl.core.folders import cache_folder
from snugvl.core.resources import Scratch
from snugvl.errors import CheckpointError
from snugvl.version import __version__

GGUF: Final = "gguf.json"
DIGEST: Final = "digest"  # of all other files
MAX_FACTORS: Final = 4096  # half of the values of a head
KEEP: Final = 8  # folders; the vocabulary of one takes up to 11 MB
_unkept: Final[dict[str, Scratch]] = {}  # of this process, by the name of a folder that can't be kept


def folder_of(files: GgufFiles) -> Path:
    """The folder that stands for a GGUF, made where it isn't there.

    Raises:
        CheckpointError: a file is broken, or a part is missing.
        UnsupportedModel: our engine doesn't run it; says why, and what does.
    """
    place = cache_folder() / "gguf" / _hash(files)
    if _is_whole(place):
        with suppress(OSError):
            place.touch()
        return place
    documents = documents_of(files)
    work = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(work, documents)
        if place.exists() and not _is_whole(place):
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        with suppress(OSError):  # another process was quicker
            work.rename(place)
        made = sorted(filter(Path.is_dir, place.parent.iterdir()), key=lambda each: -each.stat().st_mtime)
        for old in made[KEEP:]:  # all but the folders that were used last
            shutil.rmtree(old, ignore_errors=True)
    except OSError:  # a cache that can't be written costs the time, no more
        _unkept[place.name] = _unkept.get(place.name) or Scratch("gguf")
        place = _unkept[place.name].path
        _write(place, documents)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def documents_of(files: GgufFiles) -> dict[str, Mapping[str, Any]]:
    """The contents of the folder by name.

    Raises:
        CheckpointError, UnsupportedModel: as `folder_of`.
    """
    header, *more = [read_gguf(path, KEPT) for path in files.parts]
    tower = None if files.projector is None else read_gguf(files.projector)
    where, values = header.where, header.values
    images = None if tower is None else tower.values
    tensors = [each for one in (header, *more, *([] if tower is None else [tower])) for each in one.tensors]
    parsed(values, images, tensors, where)
    config = config_of(values, images, tensors, where, _factors([header, *more]))
    parse_config(config, where)
    documents: dict[str, Mapping[str, Any]] = {
        **tokenizer_files(values, where),
        "config.json": config,
        GGUF: {
            "parts": [str(path.resolve()) for path in files.parts],
            "projector": None if files.projector is None else str(files.projector.resolve()),
        },
    }
    pictures = None if images is None else PROJECTORS[projector_of(images)]
    if images is not None and pictures is not None:
        vision = config["vision_config"]
        token = (vision["patch_size"] * vision["spatial_merge_size"]) ** 2
        limits = pictures.least * token, pictures.most * token
        documents["preprocessor_config.json"] = squares(images, config, limits)
    return documents


def read_weights(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint folder by name; those of a folder for a GGUF by our network's names.

    Raises:
        CheckpointError: a file is broken or gone.
    """
    if not (folder / GGUF).is_file():
        return read_tensors(folder)
    places = read_json(folder / GGUF)
    headers = [read_gguf(Path(path)) for path in places["parts"]]
    tower: GgufHeader | None = None if places["projector"] is None else read_gguf(Path(places["projector"]))
    if len({path.name for path in map(Path, places["parts"])}) != len(headers):
        raise CheckpointError(f"{folder / GGUF} names a part twice")
    return entries_of(headers, tower)


def _factors(headers: Sequence[GgufHeader]) -> list[float] | None:
    """The divisors of the rotary frequencies, or None where no file has any."""
    entry = next((each for each in placed(headers) if each.name == FACTORS), None)
    if entry is None:
        return None
    if entry.dtype != "F32" or entry.nbytes > MAX_FACTORS * 4:
        raise CheckpointError(f"{entry.file}: tensor {FACTORS} is {entry.dtype} {list(entry.shape)}")
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return [number for (number,) in struct.iter_unpack("<f", file.read(entry.nbytes))]


def _hash(files: GgufFiles) -> str:
    digest = hashlib.sha256(__version__.encode())
    for path in (*files.parts, *([] if files.projector is None else [files.projector])):
        state = path.stat()
        digest.update(f"\0{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _write(folder: Path, documents: Mapping[str, Mapping[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    for name, values in documents.items():
        (folder / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    (folder / DIGEST).write_text(_digest(folder), encoding="ascii")


def _is_whole(folder: Path) -> bool:
    """Whether the folder is as it was written: a crash of the machine may leave files empty, or zeros."""
    try:
        return (folder / DIGEST).read_bytes() == _digest(folder).encode()
    except OSError:
        return False


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(b"" if path.name == DIGEST else path.name.encode() + path.read_bytes())
    return digest.hexdigest()
