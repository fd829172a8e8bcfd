"""GGUF's quantised matrices as they are in memory: the file's bytes, sorted by what they mean.

A file stores a block of 32 or 256 neighbours of a row together: scales, then codes of the first half, each
beside one of the second. Here the bytes of a matrix stand in planes, each `[rows, bytes of a row]`:

| type | bits | codes, low 4 (or 8) bits | high bits | scales |
|---|---|---|---|---|
| Q4_0 | 4.5 | eight a word | | d: f16 for 32 |
| Q4_1 | 5 | eight a word | | d, m: f16 for 32 |
| Q8_0 | 8.5 | a byte each | | d: f16 for 32 |
| Q4_K | 4.5 | eight a word | | eight scales and minima of 6 bits in 12 bytes, d, dmin: f16 for 256 |
| Q5_K | 5.5 | eight a word | a byte for eight | the same |
| Q6_K | 6.5625 | eight a word | two bytes for eight | int8 for 16, d: f16 for 256 |

A word has eight neighbours, the first in its lowest bits, as our own int4 (`layers/weights.py`). A value is

    a · code + b        a = d, b = −8 d | m | 0        K: a = d · scale, b = −dmin · minimum | −32 a

in float32 and rounded where ggml rounds: equal to the reference (`gguf.quants`) to the bit. The kernels read
the same planes (`layers/kernels/products/ggml.py`).

Source: ggml, `ggml-quants.c` and `ggml-common.h` (MIT).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

GgmlType = Literal["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SUPER: Final = 256  # neighbours of a K type's block


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a ggml type.

    Attributes:
        block: neighbours of a block.
        nbytes: bytes of a block in the file.
        group: neighbours that share a scale.
        planes: bytes of each plane that a block is sorted into.
    """

    block: int
    nbytes: int
    group: int
    planes: tuple[int, ...]


LAYOUTS: Final[dict[GgmlType, Layout]] = {
    "Q4_0": Layout(32, 18, 32, (16, 2)),
    "Q4_1": Layout(32, 20, 32, (16, 4)),
    "Q8_0": Layout(32, 34, 32, (32, 2)),
    "Q4_K": Layout(SUPER, 144, 32, (128, 12, 4)),
    "Q5_K": Layout(SUPER, 176, 32, (128, 32, 12, 4)),
    "Q6_K": Layout(SUPER, 210, 16, (128, 64, 16, 2)),
}


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Rows of a matrix that are of one type.

    Attributes:
        start: the first of them.
        offset: where their planes begin, in bytes of the whole matrix.
    """

    type: GgmlType
    start: int
    rows: int
    offset: int

    @property
    def layout(self) -> Layout:
        """That of its type."""
        return LAYOUTS[self.type]

    def nbytes(self, columns: int) -> int:
        """Bytes of its rows, as in the file."""
        return self.rows * (columns // self.layout.block) * self.layout.nbytes

    def planes(self, data: torch.Tensor, columns: int) -> list[torch.Tensor]:
        """Views of `data` `[bytes]`, each `[rows, bytes of a row]`."""
        blocks, at, found = columns // self.layout.block, self.offset, []
        for each in self.layout.planes:
            size = self.rows * blocks * each
            found.append(data[at : at + size].view(self.rows, blocks * each))
            at += size
        return found


def ggml_type(dtype: str) -> GgmlType | None:
    """A dtype of a file as one of these types, or None."""
    return next((kind for kind in LAYOUTS if kind == dtype), None)


def parts_of(rows: Sequence[tuple[GgmlType, int]], columns: int) -> tuple[TypedRows, ...]:
    """Parts of a matrix whose rows are so many of each type, in order; equal neighbours are one.

    Raises:
        ValueError: the columns don't divide into blocks.
    """
    made: list[TypedRows] = []
    start = offset = 0
    for kind, count in rows:
        if columns % LAYOUTS[kind].block:
            raise ValueError(f"{columns} columns don't divide into blocks of {LAYOUTS[kind].block} ({kind})")
        if made and made[-1].type == kind:
            made[-1] = TypedRows(kind, made[-1].start, made[-1].rows + count, made[-1].offset)
        else:
            made.append(TypedRows(kind, start, count, offset))
        start += count
        offset = made[-1].offset + made[-1].nbytes(columns)
    return tuple(made)


def sort_bytes(raw: torch.Tensor, kind: GgmlType) -> list[torch.Tensor]:
    """Rows as the file has them, `[n, bytes]` uint8, as planes `[n, bytes of a row]`."""
    layout = LAYOUTS[kind]
    blocks = raw.view(len(raw), -1, layout.nbytes)
    made = _SORTERS[kind](blocks)
    return [plane.reshape(len(raw), -1) for plane in made]


def wide(data: torch.Tensor, part: TypedRows, columns: int, start: int, end: int) -> torch.Tensor:
    """Rows `start … end` of a part, counted from its first: `[end − start, columns]` float32."""
    planes = [plane[start:end] for plane in part.planes(data, columns)]
    return wide_planes(planes, part.type)


def wide_planes(planes: Sequence[torch.Tensor], kind: GgmlType) -> torch.Tensor:
    """The values that planes of whole rows mean: `[n, columns]` float32."""
    layout = LAYOUTS[kind]
    rows = len(planes[0])
    if kind == "Q8_0":
        codes = planes[0].view(torch.int8)
    else:
        codes = _low(planes[0])
        if kind == "Q5_K":
            codes = codes | (_high(planes[1], 1) << 4)
        elif kind == "Q6_K":
            codes = codes | (_high(planes[1], 2) << 4)
    values = codes.view(rows, -1, layout.group).float()
    if kind == "Q6_K":
        values -= 32
    scale, offset = _affine(planes, kind)
    values *= scale[..., None]
    if offset is not None:
        values += offset[..., None]
    return values.flatten(1)


def _affine(planes: Sequence[torch.Tensor], kind: GgmlType) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Factor and addend of each group, `[n, groups]` float32."""
    halves = planes[-1].view(torch.float16).float()
    if kind == "Q8_0":
        return halves, None
    if kind == "Q4_0":
        return halves, -8 * halves
    if kind == "Q4_1":
        return halves[:, ::2], halves[:, 1::2]
    if kind == "Q6_K":
        scales = planes[2].view(torch.int8).float().view(len(halves), -1, SUPER // 16)
        return (halves[..., None] * scales).flatten(1), None
    scales, minima = six_bits(planes[-2])
    d, least = halves[:, ::2, None], halves[:, 1::2, None]
    return (d * scales).flatten(1), (-least * minima).flatten(1)


def six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of 6 bits from each 12 bytes; both `[n, blocks, 8]` float32.

    Bytes 0 to 3: the low bits of the first four scales, above them the high bits of the last four; 4 to 7 the
    same of the minima; 8 to 11: the low bits of the last four of both.
    """
    bytes_ = packed.view(len(packed), -1, 12)
    scale, least, rest = bytes_[..., :4], bytes_[..., 4:8], bytes_[..., 8:]
    scales = torch.cat((scale & 63, (rest & 15) | (scale >> 6 << 4)), -1)
    minima = torch.cat((least & 63, (rest >> 4) | (least >> 6 << 4)), -1)
    return scales.float(), minima.float()


def _low(plane: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, `[n, columns]`, of `[n, columns / 2]`."""
    return torch.stack((plane & 15, plane >> 4), -1).flatten(1)


def _high(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """High bits, `[n, columns]`, of `[n, columns · bits / 8]`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    return ((plane[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _neighbours(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[n, blocks, m]` below 16 as bytes `[n, blocks, m / 2]`."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[n, blocks, m]` of so few bits as bytes, the first in the lowest."""
    each = 8 // bits
    made = codes[..., ::each].clone()
    for place in range(1, each):
        made |= codes[..., place::each] << place * bits
    return made


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Bytes `[n, blocks, k, m]` of which the low nibbles come first: `[n, blocks, k · 2 m]`."""
    return torch.cat((codes & 15, codes >> 4), -1).flatten(2)


def _rows(codes: torch.Tensor, count: int) -> torch.Tensor:
    """Bytes `[n, blocks, m]` as `[n, blocks, count, m / count]`."""
    return codes.reshape(*codes.shape[:2], count, -1)


def _sort_4(blocks: torch.Tensor) -> list[torch.Tensor]:
    beside = blocks.shape[-1] - 16
    return [_neighbours(_halves(blocks[..., None, beside:])), blocks[..., :beside]]


def _sort_8(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [blocks[..., 2:], blocks[..., :2]]


def _sort_4_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    codes = _rows(blocks[..., 16:], 4)
    return [_neighbours(_halves(codes)), blocks[..., 4:16], blocks[..., :4]]


def _sort_5_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    """Bit k of a byte of `high` is of group k."""
    codes, high = _rows(blocks[..., 48:], 4), blocks[..., 16:48]
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = ((high[..., None, :] >> shifts[:, None]) & 1).flatten(2)
    return [_neighbours(_halves(codes)), _bits(bits, 1), blocks[..., 4:16], blocks[..., :4]]


def _sort_6_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    """Planes of Q6_K. Each 128 have 64 bytes of low nibbles and 32 of high bits, two for each quarter."""
    low = _rows(blocks[..., :128], 2)
    high = _rows(blocks[..., 128:192], 2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    bits = ((high[..., None, :] >> shifts[:, None]) & 3).flatten(2)
    return [_neighbours(_halves(low)), _bits(bits, 2), blocks[..., 192:208], blocks[..., 208:]]


_SORTERS: Final = {
    "Q4_0": _sort_4, "Q4_1": _sort_4, "Q8_0": _sort_8, "Q4_K": _sort_4_k, "Q5_K": _sort_5_k,
    "Q6_K": _sort_6_k,
}  # fmt: skip
