"""Headers of GGUF files: metadata and tensors, read piece by piece, without reading a weight.

    4 + 4 bytes  "GGUF", version (2 or 3), little-endian like all that follows
    8 + 8 bytes  number of tensors, number of metadata pairs
    the pairs    key, type, value; strings and arrays have their length before them
    the tensors  name, dimensions (innermost first), type, offset from the start of the data
    the rest     the data, after padding to `general.alignment`

A header has no length: its end is where the last tensor's entry ends. Most of it is the vocabulary, millions
of bytes, so it is read in pieces that grow, from a file or by range requests alike. The package `gguf` reads
files on a disk, whole. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from snugvl.checkpoint.facts import Stored
from snugvl.checkpoint.safetensors import check_number
from snugvl.checkpoint.section import foreign, plain, shown
from snugvl.errors import CheckpointError, UnsupportedModel

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER_BYTES: Final = 96 << 20  # the largest vocabularies make 20 MiB of it
MAX_PAIRS: Final = 16_384
MAX_KEY: Final = 65_535  # the format's own limit
MAX_NAME: Final = 256  # of a tensor; llama.cpp takes 63
MAX_STRING: Final = 4 << 20  # the longest are chat templates, a hundredth of it
MAX_ITEMS: Final = 1 << 23  # of an array, and of all arrays together: each costs time
MAX_KEPT: Final = 4096  # numbers of an array that is kept: of layers, not of the vocabulary
MAX_DIMENSIONS: Final = 4
MAX_NUMBER: Final = 2**62
DEFAULT_ALIGNMENT: Final = 32
FIRST_BYTES: Final = 1 << 20

# ggml's types by number: name, values of a block, bytes of it.
TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_NUMBERS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"
}  # fmt: skip
_STRING, _ARRAY = 8, 9

Read = Callable[[int, int], bytes]
"""Bytes from an offset on, at most so many; fewer only at the end of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        values: metadata by key; a long array, such as the vocabulary, is only its length (`Items`).
        tensors: tensors in the file's order, rows first as elsewhere; dtypes as ggml calls them.
        offsets: byte at which the data of each tensor begins, from the start of the file.
    """

    where: str
    values: Mapping[str, Any]
    tensors: tuple[Stored, ...]
    offsets: tuple[int, ...] = ()


class Items(int):
    """Number of items of an array that was skipped."""


def read_gguf(path: Path, keep: Collection[str] = ()) -> GgufHeader:
    """Read the header of a file on this machine. `keep`: keys of arrays that are wanted whole, however long.

    Raises:
        CheckpointError: names the file, and what is wrong.
        UnsupportedModel: a version or a type that isn't known.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)

            def read(offset: int, count: int) -> bytes:
                file.seek(offset)
                return file.read(count)

            return parse_gguf(str(path), size, read, keep)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None


def parse_gguf(where: str, size: int, read: Read, keep: Collection[str] = ()) -> GgufHeader:
    """Parse the header of a file of `size` bytes that `read` reads, every entry checked against that size.

    Raises:
        CheckpointError, UnsupportedModel: as `read_gguf`.
    """
    return _Parser(where, size, read, keep).header()


class _Parser:
    """A position in a header, which is read on as it is needed."""

    def __init__(self, where: str, size: int, read: Read, keep: Collection[str]) -> None:
        self.where, self.size, self.read, self.keep = where, size, read, keep
        self.data, self.at, self.items = b"", 0, 0

    def header(self) -> GgufHeader:
        if not self.size:
            raise CheckpointError(f"{self.where} {foreign(b'')}")
        if self.take(4) != MAGIC:
            what = foreign(self.data[:12]) or f"is not a GGUF file: it begins with {shown(self.data[:4])}"
            raise CheckpointError(f"{self.where} {what}")
        version = self.number("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big") in VERSIONS
            kind = "for big-endian machines" if swapped else f"of version {version}"
            raise UnsupportedModel(f"{self.where} is a GGUF file {kind}; versions 2 and 3 are read")
        tensors, pairs = self.number("<Q"), self.number("<Q")
        check_number(tensors, self.where)
        if pairs > MAX_PAIRS:
            raise CheckpointError(f"{self.where} announces {pairs:,} keys; {MAX_PAIRS:,} are read at most")
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text(MAX_KEY)
            if key in values:
                raise CheckpointError(f"{self.where}: {shown(key)} is in it twice")
            values[key] = self.value(key, self.number("<I"))
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.where} has general.alignment {shown(alignment)}; it must be a power of two"
            )
        placed = [self.tensor() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        self.check_places(placed, start)
        found = tuple(tensor for tensor, _ in placed)
        if len({tensor.name for tensor in found}) != len(found):
            raise CheckpointError(f"{self.where} has a tensor twice")
        return GgufHeader(self.where, values, found, tuple(start + offset for _, offset in placed))

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.at + count
        if end > len(self.data):
            self.more(end)
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def more(self, end: int) -> None:
        """Read on, twice as far as before, at least to `end`."""
        if end > min(self.size, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.where} has a header beyond byte {end:,}, in a file of {self.size:,}; "
                "it is truncated or corrupt, download it again"
            )
        upto = min(max(end, 2 * len(self.data), FIRST_BYTES), self.size, MAX_HEADER_BYTES)
        self.data += self.read(len(self.data), upto - len(self.data))
        if len(self.data) < end:
            raise CheckpointError(f"{self.where} ended after {len(self.data):,} bytes of {self.size:,}")

    def number(self, form: str) -> Any:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def length(self, most: int) -> int:
        length: int = self.number("<Q")
        if length > most:
            raise CheckpointError(
                f"{self.where}: a length of {length:,} at byte {self.at - 8:,}; {most:,} is the limit"
            )
        return length

    def text(self, most: int = MAX_STRING) -> str:
        return self.take(self.length(most)).decode("utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        """Skip `count` strings, quicker than `text` reads them: vocabularies have hundreds of thousands."""
        read, at, data = struct.Struct("<Q").unpack_from, self.at, self.data
        for _ in range(count):
            if at + 8 > len(data):
                self.more(at + 8)
                data = self.data
            (length,) = read(data, at)
            at += 8 + length
            if length > MAX_STRING:
                raise CheckpointError(
                    f"{self.where}: a string of {length:,} bytes; {MAX_STRING:,} is the limit"
                )
        self.at = at

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(self.form(key, kind))
        kind, count = self.number("<I"), self.length(MAX_ITEMS)
        self.items += count
        if self.items > MAX_ITEMS:
            raise CheckpointError(f"{self.where}: its arrays have over {MAX_ITEMS:,} items at {shown(key)}")
        if kind == _STRING:
            if key in self.keep:
                return [self.text() for _ in range(count)]
            self.skip_texts(count)
            return Items(count)
        form = self.form(key, kind)
        raw = self.take(count * struct.calcsize(form))
        if count > MAX_KEPT and key not in self.keep:
            return Items(count)
        return [each for (each,) in struct.iter_unpack(form, raw)]

    def form(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise UnsupportedModel(
                f"{self.where}: {shown(key)} is of type {kind}, which GGUF lacks, or can't nest"
            )
        return _NUMBERS[kind]

    def tensor(self) -> tuple[Stored, int]:
        """Read a tensor's entry: (the tensor, the byte where its data begins, from the start of the data)."""
        name = self.text(MAX_NAME)
        where = f"{self.where}: tensor {plain(name)}"
        dimensions = self.number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(
                f"{where} has {dimensions:,} dimensions; 1 to {MAX_DIMENSIONS} are possible"
            )
        shape = tuple(reversed([self.number("<Q") for _ in range(dimensions)]))
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in TYPES:
            raise UnsupportedModel(f"{where} is of type {kind}, which snugvl doesn't know yet")
        dtype, block, nbytes = TYPES[kind]
        if max(math.prod(shape), offset) > MAX_NUMBER or 0 in shape:
            raise CheckpointError(f"{where} has shape {shape} at byte {offset:,}, which no file can hold")
        if shape[-1] % block:
            raise CheckpointError(f"{where} has rows of {shape[-1]:,} values; {dtype} has blocks of {block}")
        return Stored(name, dtype, shape, math.prod(shape) // block * nbytes), offset

    def check_places(self, placed: list[tuple[Stored, int]], start: int) -> None:
        """Refuse tensors beyond the file's end, and those that share bytes: a small file could claim any."""
        end, before = 0, ""
        for tensor, offset in sorted(placed, key=lambda each: each[1]):
            if offset < end:
                raise CheckpointError(
                    f"{self.where}: tensors {plain(before)} and {plain(tensor.name)} share bytes"
                )
            end, before = offset + tensor.nbytes, tensor.name
        if start + end > self.size:
            raise CheckpointError(
                f"{self.where}: tensor {plain(before)} ends at byte {start + end:,} but the file has "
                f"{self.size:,}; the file is truncated, download it again"
            )
