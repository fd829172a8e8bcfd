"""GGUF's quantised matrices as they are in memory: the file's bytes, sorted by what they mean.

A file stores a block of 32 or 256 values of a row together: scales, then codes of the first half, each
beside one of the second. Here the bytes of a matrix stand in planes, each `[rows, bytes of a row]`:

| type | bits | codes, low bits | high bits | scales |
|---|---|---|---|---|
| Q4_0, IQ4_NL | 4.5 | four: eight a word | | d: f16 for 32 |
| Q4_1 | 5 | four | | d, m: f16 for 32 |
| Q5_0, Q5_1 | 5.5, 6 | four | a byte for eight | as Q4_0, Q4_1 |
| Q8_0 | 8.5 | a byte each | | d: f16 for 32 |
| MXFP4 | 4.25 | four | | an exponent for 32 |
| Q2_K | 2.625 | two: two bytes for eight | | for 16 a scale and a minimum of 4 bits, d, dmin: f16 for 256 |
| Q3_K | 3.4375 | two | a byte for eight | 16 scales of 6 bits in 12 bytes, d: f16 for 256 |
| Q4_K | 4.5 | four | | eight scales and minima of 6 bits in 12 bytes, d, dmin: f16 for 256 |
| Q5_K | 5.5 | four | a byte for eight | the same |
| Q6_K | 6.5625 | four | two bytes for eight | int8 for 16, d: f16 for 256 |
| IQ4_XS | 4.25 | four | | eight scales of 6 bits: four low in 4 bytes, two high in 2; d: f16 for 256 |

A word has eight neighbours, the first in its lowest bits, as our own int4 (`layers/weights.py`). A value is

    a · code + b        a = d, b = −8 d | −16 d | m | 0
                        K: a = d · scale, b = −dmin · minimum | −32 a | −4 a

in float32 and rounded where ggml rounds: equal to the reference (`gguf.quants`) to the bit. IQ4_NL's, IQ4_XS'
and MXFP4's codes are numbers of a table (`TABLES`), which is looked up in place of the code. The kernels read
the same planes (`layers/kernels/products/ggml.py`).

Source: ggml, `ggml-quants.c` and `ggml-common.h` (MIT).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

GgmlType = Literal[
    "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS",
    "MXFP4",
]  # fmt: skip
SUPER: Final = 256  # values of a K type's block


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a ggml type.

    Attributes:
        block: number of values in a block.
        nbytes: bytes of a block in the file.
        group: number of values that share a scale.
        planes: bytes of each plane that a block is sorted into.
        low, high: bits of a code in the first and in the second plane.
    """

    block: int
    nbytes: int
    group: int
    planes: tuple[int, ...]
    low: int = 4
    high: int = 0


LAYOUTS: Final[dict[GgmlType, Layout]] = {
    "Q4_0": Layout(32, 18, 32, (16, 2)),
    "Q4_1": Layout(32, 20, 32, (16, 4)),
    "Q8_0": Layout(32, 34, 32, (32, 2), low=8),
    "Q4_K": Layout(SUPER, 144, 32, (128, 12, 4)),
    "Q5_K": Layout(SUPER, 176, 32, (128, 32, 12, 4), high=1),
    "Q6_K": Layout(SUPER, 210, 16, (128, 64, 16, 2), high=2),
    "Q5_0": Layout(32, 22, 32, (16, 4, 2), high=1),
    "Q5_1": Layout(32, 24, 32, (16, 4, 4), high=1),
    "Q2_K": Layout(SUPER, 84, 16, (64, 16, 4), low=2),
    "Q3_K": Layout(SUPER, 110, 16, (64, 32, 12, 2), low=2, high=1),
    "IQ4_NL": Layout(32, 18, 32, (16, 2)),
    "IQ4_XS": Layout(SUPER, 136, 32, (128, 4, 2, 2)),
    "MXFP4": Layout(32, 17, 32, (16, 1)),
}
_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the number
TABLES: Final[dict[GgmlType, tuple[int, ...]]] = {"IQ4_NL": _LEVELS, "IQ4_XS": _LEVELS, "MXFP4": _E2M1}


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Rows of a matrix that are of one type. `start`: the first of them; `offset`: where their planes begin,
    in bytes of the whole matrix."""

    type: GgmlType
    start: int
    rows: int
    offset: int

    @property
    def layout(self) -> Layout:
        """Layout of its type."""
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
    """Parts of a matrix, given (type, number of rows) of each in order; equal neighbours are one.

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
    codes = planes[0].view(torch.int8) if layout.low == 8 else _codes(planes[0], layout.low)
    if layout.high:
        codes = codes | (_codes(planes[1], layout.high) << layout.low)
    if kind in TABLES:
        codes = torch.tensor(TABLES[kind], dtype=torch.int8, device=codes.device)[codes.int()]
    values = codes.view(rows, -1, layout.group).float()
    if kind in ("Q3_K", "Q6_K"):
        values -= 4 if kind == "Q3_K" else 32
    scale, offset = _affine(planes, kind)
    values *= scale[..., None]
    if offset is not None:
        values += offset[..., None]
    return values.flatten(1)


def _affine(planes: Sequence[torch.Tensor], kind: GgmlType) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Factor and addend of each group, `[n, groups]` float32."""
    if kind == "MXFP4":  # half of 2 to the exponent, as codes count halves
        ones = torch.ones(planes[1].shape, device=planes[1].device)
        return torch.ldexp(ones, planes[1].int() - 128), None
    halves = planes[-1].view(torch.float16).float()
    if kind in ("Q8_0", "IQ4_NL"):
        return halves, None
    if kind in ("Q4_0", "Q5_0"):
        return halves, (-8 if kind == "Q4_0" else -16) * halves
    if kind in ("Q4_1", "Q5_1"):
        return halves[:, ::2], halves[:, 1::2]
    if kind in ("Q4_K", "Q5_K", "Q2_K"):
        scales, minima = six_bits(planes[-2]) if kind != "Q2_K" else _four_bits(planes[1])
        d, least = halves[:, ::2, None], halves[:, 1::2, None]
        return (d * scales).flatten(1), (-least * minima).flatten(1)
    made = {"Q6_K": _signed, "Q3_K": _sixteen, "IQ4_XS": _eight}[kind](planes[1:-1])
    return (halves[..., None] * made).flatten(1), None


def _four_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of Q2_K, `[n, blocks, 16]` float32."""
    each = packed.view(len(packed), -1, 16)
    return (each & 15).float(), (each >> 4).float()


def _signed(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scales of Q6_K, `[n, blocks, 16]` float32."""
    return planes[-1].view(torch.int8).float().view(len(planes[-1]), -1, SUPER // 16)


def _sixteen(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scales of Q3_K, `[n, blocks, 16]` float32: low bits in 8 bytes, of the first eight scales in the lower
    half of a byte; the upper two of scale k in byte k mod 4 of the last 4."""
    bytes_ = planes[-1].view(len(planes[-1]), -1, 12)
    low = torch.cat((bytes_[..., :8] & 15, bytes_[..., :8] >> 4), -1)
    high = torch.cat([(bytes_[..., 8:] >> shift) & 3 for shift in range(0, 8, 2)], -1)
    return (low | (high << 4)).float() - 32


def _eight(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scales of IQ4_XS, `[n, blocks, 8]` float32."""
    rows = len(planes[-1])
    low, high = _codes(planes[-2], 4).view(rows, -1, 8), _codes(planes[-1], 2).view(rows, -1, 8)
    return (low | (high << 4)).float() - 32


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


def _codes(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` bits, `[n, columns]`, unpacked from bytes `[n, columns · bits / 8]`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    return ((plane[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _neighbours(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[n, blocks, m]` below 16 as bytes `[n, blocks, m / 2]`."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[n, blocks, m]` of `bits` bits packed into bytes, the first in the lowest bits."""
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


def _sort_5(blocks: torch.Tensor) -> list[torch.Tensor]:
    """The high bit of each code stands in its place of 32."""
    beside = blocks.shape[-1] - 20
    low = _neighbours(_halves(blocks[..., None, beside + 4 :]))
    return [low, blocks[..., beside : beside + 4], blocks[..., :beside]]


def _quarters(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits of Q2_K and Q3_K, `[n, blocks, 64]`: each 128 have 32 bytes, two bits for each quarter.

    As bytes of four neighbours, `[n, blocks, 64]`.
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    return _bits(((_rows(codes, 2)[..., None, :] >> shifts[:, None]) & 3).flatten(2), 2)


def _sort_2_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [_quarters(blocks[..., 16:80]), blocks[..., :16], blocks[..., 80:]]


def _sort_3_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    """Bit k of a byte of the mask is of the 32 codes of group k."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = ((blocks[..., None, :32] >> shifts[:, None]) & 1).flatten(2)
    return [_quarters(blocks[..., 32:96]), _bits(bits, 1), blocks[..., 96:108], blocks[..., 108:]]


def _sort_4_xs(blocks: torch.Tensor) -> list[torch.Tensor]:
    codes = _neighbours(_halves(_rows(blocks[..., 8:], 8)))
    return [codes, blocks[..., 4:8], blocks[..., 2:4], blocks[..., :2]]


_SORTERS: Final = {
    "Q4_0": _sort_4, "Q4_1": _sort_4, "Q8_0": _sort_8, "Q4_K": _sort_4_k, "Q5_K": _sort_5_k,
    "Q6_K": _sort_6_k, "Q5_0": _sort_5, "Q5_1": _sort_5, "Q2_K": _sort_2_k, "Q3_K": _sort_3_k,
    "IQ4_NL": _sort_4, "IQ4_XS": _sort_4_xs, "MXFP4": _sort_4,
}  # fmt: skip


# How codes lie in a block: so many runs of so many parts of so many neighbours; equal places of a run's parts
# share a byte, the first part's in its lowest bits.
_LOW: Final[dict[GgmlType, tuple[int, int, int]]] = {
    "Q4_0": (1, 2, 16), "Q4_1": (1, 2, 16), "Q5_0": (1, 2, 16), "Q5_1": (1, 2, 16), "Q8_0": (1, 1, 32),
    "Q3_K": (2, 4, 32), "Q4_K": (4, 2, 32), "Q5_K": (4, 2, 32), "Q6_K": (2, 2, 64),
}  # fmt: skip
_HIGH: Final[dict[GgmlType, tuple[int, int, int]]] = {
    "Q3_K": (1, 8, 32), "Q5_K": (1, 8, 32), "Q6_K": (2, 4, 32),
}  # fmt: skip


def to_blocks(
    kind: GgmlType,
    codes: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    unit: torch.Tensor | None = None,
    low_unit: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows as the file has them, `[rows, bytes of a row]` uint8.

    Args:
        kind: one of `_LOW`.
        codes: uint8 `[rows, columns]`, from 0 on.
        scale, low: of each group, `[rows, groups]` float32, as the type can store them. A value is
            code · scale − low.
        unit, low_unit: what they are whole multiples of, `[rows, groups]`; of the K types alone.
    """
    layout, rows = LAYOUTS[kind], len(codes)
    if kind in ("Q4_1", "Q5_1"):
        halves = torch.stack((scale, -low), -1)
    elif unit is None:
        halves = scale[..., None]
    else:
        every = layout.block // layout.group
        halves = torch.stack([each[:, ::every] for each in (unit, low_unit) if each is not None], -1)
    ends = halves.half().view(rows, -1, halves.shape[-1]).view(torch.uint8)
    blocks = codes.view(rows, -1, layout.block)
    if kind == "Q8_0":
        return torch.cat((ends, blocks ^ 128), -1).flatten(1)
    parts = [_beside(blocks & ((1 << layout.low) - 1), _LOW[kind], layout.low)]
    if layout.high:
        upper = blocks >> layout.low
        parts.append(_beside(upper, _HIGH[kind], layout.high) if kind in _HIGH else _bits(upper, 1))
    if unit is not None:
        counts = (scale / unit).round().view(rows, -1, layout.block // layout.group)
        if kind == "Q3_K":
            packed = _packed_sixteen((counts + 32).to(torch.uint8))
            return torch.cat((*reversed(parts), packed, ends), -1).flatten(1)
        if low_unit is None:  # Q6_K: its scales stand at the end
            return torch.cat((*parts, counts.to(torch.int8).view(torch.uint8), ends), -1).flatten(1)
        minima = (low / low_unit).round().view(counts.shape)
        parts.append(_packed_six(counts.to(torch.uint8), minima.to(torch.uint8)))
    return torch.cat((ends, *reversed(parts)), -1).flatten(1)


def _beside(codes: torch.Tensor, shape: tuple[int, int, int], bits: int) -> torch.Tensor:
    """Codes `[n, blocks, m]` of `bits` bits packed into bytes in the order of `_LOW`."""
    parts = codes.view(*codes.shape[:2], *shape)
    made = parts[..., 0, :].clone()
    for place in range(1, shape[1]):
        made |= parts[..., place, :] << place * bits
    return made.flatten(2)


def _packed_six(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """The reverse of `six_bits`, of uint8 `[n, blocks, 8]`: `[n, blocks, 12]`."""
    first = [each[..., :4] | (each[..., 4:] >> 4 << 6) for each in (scales, minima)]
    return torch.cat((*first, (scales[..., 4:] & 15) | (minima[..., 4:] << 4)), -1)


def _packed_sixteen(scales: torch.Tensor) -> torch.Tensor:
    """The reverse of `_sixteen`, of uint8 `[n, blocks, 16]` below 64: `[n, blocks, 12]`."""
    low = scales & 15
    return torch.cat((low[..., :8] | (low[..., 8:] << 4), _beside(scales >> 4, (1, 4, 4), 2)), -1)
