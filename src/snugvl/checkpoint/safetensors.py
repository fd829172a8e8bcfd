"""Headers of safetensors files: names, dtypes, shapes and places, without reading a weight.

    8 bytes      header length n, little-endian
    n bytes      JSON: name → {dtype, shape, data_offsets: [begin, end]}
    the rest     the tensors; offsets count from here

Read by our own code, because the plan needs it without torch and later over range requests. The format:
https://github.com/huggingface/safetensors#format
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from snugvl.checkpoint.listing import INDEX, SINGLE, shards_of
from snugvl.checkpoint.section import adapter_words, foreign, read_json, shown
from snugvl.errors import CheckpointError, UnsupportedModel

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 1_000_000  # of a checkpoint; the largest have a tenth of it
MAX_DIMENSIONS = 16
MAX_NUMBER = 2**62  # in shapes and offsets


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor's data is. `offset` counts bytes from the start of `file`.

    Attributes:
        heads: number of heads whose two halves' rows alternate in a GGUF; 0 where they follow one another.
        frames: tensors of a GGUF that together are its third dimension, in order.
        turned: the file has its rows and columns exchanged.
        meant: "plus one": the file has one more than what is meant; "minus exp": it has −exp of that.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    heads: int = 0
    frames: "tuple[TensorEntry, ...]" = ()
    turned: bool = False
    meant: Literal["", "plus one", "minus exp"] = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint folder, of one file or of the shards that its index names.

    Raises:
        CheckpointError: no weights, a shard is missing, truncated or corrupt, or a tensor is there twice.
    """
    tensors: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        for name, entry in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {shown(name)} is also in {tensors[name].file.name}")
            tensors[name] = entry
        check_number(len(tensors), str(path))
    return _with_fp8_scales(tensors)


def _with_fp8_scales(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors with compressed-tensors' scales of FP8 weights by the name that Qwen's own files have."""
    apart = [name for name in tensors if name.endswith(".weight_scale")]
    for name in apart:
        weight = tensors.get(name.removesuffix("_scale"))
        if weight is not None and weight.dtype == "F8_E4M3":
            tensors[f"{name}_inv"] = replace(tensors.pop(name), name=f"{name}_inv")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint."""
    if (folder / INDEX).is_file():
        names = shards_of(read_json(folder / INDEX), str(folder / INDEX))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {missing[0]} ({len(missing)} of {len(names)} weight files are missing); "
                "finish the download"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if adapter := adapter_words(folder):
        raise UnsupportedModel(adapter)
    if stray := sorted(path.name for path in folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has {stray[0]}, but {_unnamed(stray[0])}")
    others = sorted(
        path.name for pattern in ("*.bin", "*.gguf", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if others:
        raise UnsupportedModel(
            f"{folder} has {others[0]} but no {SINGLE}; only safetensors weights are read; save "
            "it again with transformers (save_pretrained)"
        )
    raise CheckpointError(f"{folder} has no weights ({SINGLE} or {INDEX}); finish the download")


def _unnamed(name: str) -> str:
    """The clause about weights whose file isn't called as a checkpoint's are, with the way out."""
    if name.startswith("consolidated"):
        return f"those are in Mistral's own form; download {SINGLE}, or {INDEX} with its shards, instead"
    if "-of-" in name:
        return f"no {INDEX}, which says what is in which shard; download it, too"
    return f"weights are read from {SINGLE}; if that file is the whole model, call it so"


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The header of one file, every entry checked against the file's size.

    Raises:
        CheckpointError: names the file, the tensor where one is to blame, and what is wrong.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is only {size} bytes; it is truncated, download it again")
            length = struct.unpack("<Q", prefix)[0]
            if length > MAX_HEADER_BYTES or 8 + length > size:
                announced = (
                    f"announces a header of {length:,} bytes in a file of {size:,}; "
                    "it is truncated or not a safetensors file"
                )
                raise CheckpointError(f"{path} {foreign(prefix) or announced}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
    return parse_header(raw, path, size)


def parse_header(raw: bytes, path: Path, size: int) -> dict[str, TensorEntry]:
    """Entries of a header's JSON `raw`; `size` is the whole file's in bytes."""
    try:
        header = json.loads(raw, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a corrupt header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a corrupt header: it is not a JSON object")
    start = 8 + len(raw)
    header.pop("__metadata__", None)
    check_number(len(header), str(path))
    entries = {name: _entry(name, value, path, start, size) for name, value in header.items()}
    _check_apart(entries.values(), path)
    return entries


def check_number(tensors: int, where: str) -> None:
    """Refuse more tensors than any checkpoint has: each costs memory, here and in the plan."""
    if tensors > MAX_TENSORS:
        raise CheckpointError(f"{where} brings the tensors to {tensors:,}; {MAX_TENSORS:,} are read at most")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, refusing a name that is there twice: two readers might take different values."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{shown(twice)} is in it twice")
    return values


def _entry(name: str, value: Any, path: Path, start: int, size: int) -> TensorEntry:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(value, Mapping) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{where} has a corrupt header entry")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise UnsupportedModel(
            f"{where} is of dtype {shown(dtype)}, which snugvl doesn't read; use a checkpoint in one of "
            f"{', '.join(DTYPE_BYTES)}"
        )
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has shape {shown(shape)} and offsets {shown(offsets)}, expected whole numbers"
        )
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where} of shape {shape} and dtype {dtype} needs {nbytes:,} bytes, "
            f"its header gives it {offsets[1] - offsets[0]:,}"
        )
    if start + offsets[1] > size:
        raise CheckpointError(
            f"{where} ends at byte {start + offsets[1]:,} but the file has {size:,}; "
            "the file is truncated, download it again"
        )
    return TensorEntry(name, dtype, tuple(shape), path, start + offsets[0], nbytes)


def _check_apart(entries: Iterable[TensorEntry], path: Path) -> None:
    """Refuse tensors that share bytes: a small file could claim any number of large ones."""
    placed = sorted((entry.offset, entry.nbytes, entry.name) for entry in entries if entry.nbytes)
    for (begin, nbytes, first), (following, _, second) in pairwise(placed):
        if following < begin + nbytes:
            raise CheckpointError(f"{path}: tensors {shown(first)} and {shown(second)} share bytes")


def _counts(values: object) -> bool:
    """Whether `values` are a few whole numbers, none larger than any file: they are multiplied and shown."""
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMENSIONS
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_NUMBER for n in values)
    )
