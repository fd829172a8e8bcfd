"""A checkpoint's files, written beside where they shall be and moved there when all of them are whole.

A shard for each decoder layer, one for all that stays as it is, which is copied a piece at a time, an index,
`config.json`, whatever else the folder has beside weights (tokenizer, chat template, image settings), and the
SHA-256 of all of them, as `sha256sum --check` reads it.
"""

import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from snugvl.checkpoint.architecture import Fp8Blocks, PackedInt4
from snugvl.checkpoint.listing import INDEX, SINGLE
from snugvl.checkpoint.quantized import OWN, own_settings
from snugvl.checkpoint.safetensors import TensorEntry
from snugvl.checkpoint.section import read_json
from snugvl.core.folders import named
from snugvl.core.sizes import format_size
from snugvl.errors import DoesNotFit, InputError
from snugvl.models import own_format
from snugvl.models.tensor_files import SCALE_SUFFIX, TensorFiles, dequantise
from snugvl.quantize.passes import Factors, Rounds
from snugvl.quantize.rounding import Rounded

CONFIG: Final = "config.json"
SUMS: Final = "SHA256SUMS"
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
PIECE_BYTES: Final = 8 << 20
HEADERS_BYTES: Final = 4 << 20  # of all files, with index and configuration


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when all went well, else is gone.

    Raises:
        InputError: there is something already.
        OSError: nothing can be written there; with the name of `out`.
    """
    check_new(out)
    with named(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            yield work
            _write_sums(work)
            work.chmod(0o755)  # mkdtemp's are the owner's alone
            work.rename(out)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _write_sums(folder: Path) -> None:
    lines = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_new(out: Path) -> None:
    """
    Raises:
        InputError: there is something already.
    """
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} is there already; name a folder that isn't, or remove it")


def check_room(out: Path, source: Path, weights: int) -> int:
    """Most bytes that `out` will take on the disk; `weights`: bytes of its tensors.

    Raises:
        OSError: nothing can be written there.
        DoesNotFit: too little is free there.
    """
    others = sum(path.stat().st_size for path in other_files(source))
    disk, free = weights + others + HEADERS_BYTES, free_bytes(out)
    if free < disk:
        raise DoesNotFit(
            f"{out} takes {format_size(disk)} of disk space, and only {format_size(free)} are free there; "
            "free some, or write to another disk"
        )
    return disk


def free_bytes(out: Path) -> int:
    """Free bytes on the disk where `out` will be.

    Raises:
        OSError: nothing can be written there.
    """
    place = out.absolute().parent
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, f"{place} is not a folder that may be written to", str(out))
    return shutil.disk_usage(place).free


def copied_bytes(entries: Mapping[str, TensorEntry], replaced: set[str]) -> int:
    """Bytes, as written, of the tensors that aren't replaced."""
    return sum(_nbytes(entry) for entry in _stay(entries, replaced))


class Shards:
    """Weights as they are written; not thread-safe."""

    def __init__(self, folder: Path, count: int) -> None:
        """`count`: number of files there will be."""
        self._folder, self._count = folder, count
        self._places: dict[str, str] = {}
        self._bytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write `tensors` to the next file."""
        path = self._next(tensors)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(0o644)  # it makes them the owner's alone

    def copy(
        self,
        entries: Mapping[str, TensorEntry],
        replaced: set[str],
        blocks: Fp8Blocks | None,
        told: Callable[[int], None],
    ) -> None:
        """Write the next file, with every tensor that isn't `replaced`; FP8 becomes bf16."""
        stay = list(_stay(entries, replaced))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in stay:
            kind, nbytes = ("BF16" if entry.dtype.startswith("F8") else entry.dtype), _nbytes(entry)
            header[entry.name] = {
                "dtype": kind, "shape": list(entry.shape), "data_offsets": [start, start + nbytes],
            }  # fmt: skip
            start += nbytes
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        path = self._next([entry.name for entry in stay])
        with path.open("wb") as file, closing(TensorFiles(entries, blocks, torch.device("cpu"))) as files:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for entry in stay:
                for piece in _bytes_of(entry, files, blocks):
                    file.write(piece)
                    told(len(piece))
        self._bytes += start

    def finish(self) -> None:
        """Write the index of all files."""
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))

    def _next(self, names: Sequence[str] | Mapping[str, torch.Tensor]) -> Path:
        number = len(set(self._places.values())) + 1
        name = f"model-{number:05}-of-{self._count:05}.safetensors"
        self._places |= dict.fromkeys(names, name)
        return self._folder / name


class OwnWriter:
    """A checkpoint in our own format, as its layers are rounded."""

    def __init__(
        self,
        source: Path,
        work: Path,
        entries: Mapping[str, TensorEntry],
        blocks: Fp8Blocks | None,
        rounds: Rounds,
    ) -> None:
        self._source, self._work, self._entries, self._blocks = source, work, entries, blocks
        self._rounds = rounds
        self._shards = Shards(work, len({number for number, _ in rounds.grids}) + 1)

    def layer(self, index: int, made: Mapping[str, Rounded], factors: Factors) -> None:
        """Write a layer's rounded matrices, and the norms that their factors change."""
        tensors: dict[str, torch.Tensor] = {}
        for name, whole in made.items():
            tensors |= own_format.tensors_of(self._rounds.matrices[index, name].parts, whole.weights())
        with closing(TensorFiles(self._entries, None, torch.device("cpu"))) as files:
            for name, each in factors.items():
                norm = self._rounds.norms[index, name]
                weight = files.whole(self._entries[norm])
                tensors[norm] = (weight.float() / each.cpu()).to(weight)
        if tensors:
            self._shards.add(tensors)

    def finish(self, told: Callable[[int], None]) -> None:
        """Copy all other tensors, calling `told` with the bytes of each piece, and write the other files."""
        replaced = self._rounds.replaced | {*self._rounds.norms.values()}
        self._shards.copy(self._entries, replaced, self._blocks, told)
        self._shards.finish()
        least = min(grid.bits for grid in self._rounds.grids.values())
        write_rest(self._source, self._work, own_settings(PackedInt4(OWN, 0, bits=least).weights))

    def close(self) -> None:
        """Do nothing: each file is closed when it is written."""


def write_rest(source: Path, target: Path, quantization: Mapping[str, Any]) -> None:
    """Write `config.json` with the weights' quantisation, and copy all other files."""
    config = read_json(source / CONFIG)
    config.pop("compression_config", None)
    config["quantization_config"] = dict(quantization)
    (target / CONFIG).write_text(json.dumps(config, indent=2))
    for path in other_files(source):
        shutil.copyfile(path, target / path.name)


def other_files(source: Path) -> list[Path]:
    """The files of a checkpoint beside weights and configuration."""
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.suffix not in WEIGHTS
        and path.name not in (INDEX, SINGLE, CONFIG, SUMS)
        and not path.name.startswith(".")
    ]


def _stay(entries: Mapping[str, TensorEntry], replaced: set[str]) -> Iterator[TensorEntry]:
    for name, entry in entries.items():
        scale = name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in entries
        if name not in replaced and not scale:
            yield entry


def _nbytes(entry: TensorEntry) -> int:
    return 2 * entry.numel if entry.dtype.startswith("F8") else entry.nbytes


def _bytes_of(entry: TensorEntry, files: TensorFiles, blocks: Fp8Blocks | None) -> Iterator[bytes]:
    if entry.dtype.startswith("F8"):
        for piece in files.pieces(entry):
            assert piece.scale is not None, "the loader has checked it"
            assert blocks is not None
            wide = dequantise(piece.values, piece.scale, blocks).bfloat16().contiguous()
            yield wide.view(torch.uint8).numpy().tobytes()
        return
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        for start in range(0, entry.nbytes, PIECE_BYTES):
            yield file.read(min(PIECE_BYTES, entry.nbytes - start))
