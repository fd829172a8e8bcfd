"""Tiles of the products with stored weights, as `benchmarks/kernels/` measured them on an H200."""

from dataclasses import dataclass, replace

import triton

from snugvl.core.formats import FORMATS
from snugvl.layers.weights import Weights

# Registers of a thread for weights and input.
CODES_REGISTERS, LARGE_REGISTERS, PLANES_REGISTERS, BF16_REGISTERS, BYTE_REGISTERS = 260, 200, 200, 160, 220
SMALL = 64  # tokens; up to here a product is bound by its weights
HEAD_OUTPUTS = 65536  # more than any layer has
FEW_UNITS = 64  # multiprocessors; cards of 24 to 36 have tiles of their own


@dataclass(frozen=True, slots=True)
class Fragments:
    """Tile of a kernel of `fragments.py`.

    Attributes:
        rows: that a program reads at a time, a power of two; of a SwiGLU half are gate's.
        warps: of a program.
        rounds: programs of a unit, each of which goes on to other rows; 0: as many as there are tiles.
        soon: whether the next kernel starts before this one waits.
    """

    rows: int
    warps: int
    rounds: int = 0
    soon: bool = False


def skinny_tile(tokens: int, outputs: int, weights: Weights, *, swiglu: bool) -> tuple[int, int, int, bool]:
    """Rows of weights of a tile, warps, groups at once, early start."""
    columns, wide, many = weights.columns, outputs >= 6144, tokens > 8
    if weights.upper is not None:
        return (32, 4, 4, True) if wide else (16, 8, 8, True)
    if weights.format == "bf16":
        if wide:
            warps = 2 if columns <= 2048 else 4
            return 16, warps, warps, True
        if columns < 6144:
            return 16, 4, 4 if many else 8, True
        return 32 if many and columns > 6144 else 16, 8, 8, True
    if wide:
        return 32, 4, 4, True
    if columns > 6144:
        return 32 if many else 16, 8, 8, True
    if outputs >= 4096 or (outputs > 2048 and (many or FORMATS[weights.format].zero)):
        return 32, 4, 8, True
    return 16, 8, 16, True


def codes_tile(outputs: int, weights: Weights, units: int, *, swiglu: bool) -> Fragments:
    """Tile of `lone_codes`: the fastest of those measured that fits the registers."""
    columns, few = weights.columns, units < FEW_UNITS
    if swiglu:
        tile = Fragments(16, 4 if columns <= 3072 else 8, 2)
    elif outputs >= 6144:
        tile = Fragments(16, 4, 2) if few else Fragments(32, 4)
    else:
        tile = Fragments(16, 4 if columns <= 2048 else 8, soon=columns > 6144 or not few)
    sizes = columns, 4 * weights.group, *_codes_registers(weights)
    if _within(LARGE_REGISTERS, tile, *sizes, fewest=16) != tile:  # more warps would leave more of them idle
        tile = replace(tile, rows=16, rounds=0)
    return _within(CODES_REGISTERS, tile, *sizes, fewest=16)


def widest_codes(weights: Weights) -> int:
    """The most columns that `lone_codes` has registers for."""
    of_row, of_input = _codes_registers(weights)
    return int(CODES_REGISTERS // (16 * of_row + of_input)) * 8 * 4 * weights.group


def _codes_registers(weights: Weights) -> tuple[float, int]:
    """Registers of a thread that a slice of four units takes: of a row, and of the input."""
    return weights.group / 64 + 0.25, weights.group // 16 + 2  # with a scale and a zero point for eight rows


def planes_tile(outputs: int, weights: Weights, units: int, *, swiglu: bool) -> Fragments:
    """Tile of `lone_planes`: the fastest of those measured for int4 by fragments that fits the registers."""
    columns, few = weights.columns, units < FEW_UNITS
    if swiglu:
        tile = Fragments(8, 4, 4)
        if columns <= 3072:
            tile = Fragments(8, 2, 8) if columns == 2048 else Fragments(4, 1, 8)
    elif columns <= 2048:
        tile = Fragments(8, 2, soon=True)
    elif outputs >= 6144:
        tile = Fragments(16, 4)
    else:
        tile = Fragments(8 if columns <= 6144 or few else 4, 4, soon=True)
    words = weights.group // 32
    upper = 0 if weights.upper is None else -(-weights.upper.element_size() * words // 4)
    most = PLANES_REGISTERS + 40 * swiglu  # so tiles that were measured with int4 fit beside a second plane
    return _within(most, tile, columns, 8 * weights.group, words + upper + 2, 4 * words, fewest=4)


def bf16_tile(outputs: int, weights: Weights, *, swiglu: bool) -> Fragments:
    """Tile of `lone_bf16`, as `benchmarks/kernels/layer_tiles.py` measured it within layers of the Qwens."""
    columns = weights.columns
    if not swiglu and 6144 <= outputs < HEAD_OUTPUTS:
        tile = Fragments(4, 4, 4 if columns <= 4096 else 0)
    else:
        tile = Fragments(8, 4, soon=True)
        if columns > 4096 and not swiglu:
            tile = Fragments(4, 8, soon=True)
    return _within(BF16_REGISTERS, tile, columns, 256, 4, 4, fewest=2)


def byte_tile(outputs: int, weights: Weights, units: int, *, swiglu: bool) -> Fragments:
    """Tile of `lone_byte`, as `benchmarks/kernels/layer_tiles.py` measured it within layers of the Qwens."""
    columns, few = weights.columns, units < FEW_UNITS
    if swiglu or outputs >= 6144:
        tile = Fragments(8, 4, 8) if few else Fragments(4, 4, 4)
        if 2048 < columns <= 3072 and (few or swiglu):  # one warp has at most six slices
            tile = Fragments(4, 1, 8)
        elif columns <= 2048:
            tile = Fragments(4, 2, 8) if few else Fragments(16, 4, soon=True)
    elif columns <= 6144:
        tile = Fragments(16 if columns <= 2048 else 8, 4, soon=True)
    else:
        tile = Fragments(4, 4 if columns < 12288 else 8, soon=True)
    return _within(BYTE_REGISTERS, tile, columns, 512, 4, 9, fewest=2)


def _within(
    most: int, tile: Fragments, columns: int, slice_: int, of_row: float, of_input: int, *, fewest: int
) -> Fragments:
    """The tile with fewer rows, then with more warps, then without rounds, until `most` registers are enough.

    `slice_`: its columns; `of_row`, `of_input`: registers that a slice takes of each row, and of the input.
    """
    while True:
        slices = -(-columns // (slice_ * tile.warps))
        rows = tile.rows * of_row * (2 if tile.rounds else 1)  # in rounds the next ones are on their way, too
        if slices * (rows + of_input) <= most:
            return tile
        if tile.rows > fewest:
            tile = replace(tile, rows=tile.rows // 2)
        elif tile.warps < 8:
            tile = replace(tile, warps=2 * tile.warps)
        elif tile.rounds:
            tile = replace(tile, rounds=0)
        else:
            return tile


def vector_tile(weights: Weights, outputs: int) -> tuple[int, int, int]:
    """Rows and groups of a tile, and warps."""
    groups = min(triton.next_power_of_2(weights.columns // weights.group), 16)
    if weights.format == "bf16" and outputs < 4096:
        return 2, groups, 2
    if weights.format == "bf16" and weights.rows > outputs:  # two rows of weights for an output
        return (8, 4, 4) if weights.columns // weights.group % 16 else (4, groups, 4)
    if weights.format == "bf16" and weights.columns // weights.group % 16:
        return 8, 4, 2
    wide = outputs >= 4096 or weights.columns >= 6144
    return (8 if wide else 4), groups, (4 if outputs >= 6144 else 8)


def matrix_tile(
    tokens: int, outputs: int, weights: Weights, units: int, *, swiglu: bool, loops: bool = False
) -> tuple[int, int, int, int, int]:
    """Tokens and rows of a tile, splits of the columns, warps, stages.

    `loops`: without tensor cores, where operands are in registers as a whole (`benchmarks/other_cards.py`).
    """
    if tokens > SMALL and not loops:
        # Two products at once need more registers than four warps have; wide FP8 is quicker all the same.
        warps = 8 if swiglu and (FORMATS[weights.format].zero or weights.columns <= 2048) else 4
        return (128 if outputs >= 4096 else 64), 64, 1, warps, 3
    bm = 16 if tokens <= 16 else 32 if tokens <= 32 or loops else 64
    bn = 32 if loops or (outputs < 6144 and bm != 32) else 64
    enough = 2 * units if bm != 32 else 7 * units // 4
    tiles = -(-outputs // bn)
    groups = weights.columns // weights.group
    split = 1
    while tiles * split < enough and split * 2 <= groups // 2:
        split *= 2
    return bm, bn, split, (8 if loops else 4), 3
