"""Tiles of the products with stored weights, as `benchmarks/kernel_tiles.py` measured them on an H200.

The three fastest of each shape are in `benchmarks/results/h200/kernel_tiles_*.json`. Those of the lone kernel
have up to three numbers more, for what was slower and is gone: programs that take several tiles, stages of
weights in shared memory, and a norm by a kernel of its own.
"""

import triton

from snugvl.layers.weights import Weights

SMALL = 64  # tokens; up to here a product is bound by its weights
HEAD_OUTPUTS = 65536  # more than any layer has


def fill_slices(weights: Weights) -> bool:
    """Whether four warps with a slice of 512 columns each have all something to do, nearly."""
    slices = -(-weights.columns // 512)
    return bool(8 * slices >= 7 * 4 * -(-slices // 4))


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
    if outputs >= 4096 or (outputs > 2048 and (many or weights.format == "int4")):
        return 32, 4, 8, True
    return 16, 8, 16, True


def int4_tile(outputs: int, weights: Weights, *, swiglu: bool) -> tuple[int, int, int, bool]:
    """Rows of a tile, warps, programs of a unit (0: one a tile), whether the next kernel starts soon.

    As `benchmarks/layer_tiles.py` measured them within layers.
    """
    columns = weights.columns
    if swiglu:
        if columns > 4096 or columns % 4096 == 0:
            return 8, 4, 4, False
        return (16, 2, 6, False) if columns % 2048 == 0 else (4, 1, 8, False)
    if columns <= 2048:
        return 8, 2, 0, True
    if outputs >= 6144:
        return 16, 4, 0, False
    return (8 if columns <= 6144 else 4), 4, 0, True


def bf16_tile(outputs: int, weights: Weights, *, swiglu: bool) -> tuple[int, int, int, bool]:
    """The same of bf16. A thread has 16 bytes of each row in each of a warp's slices of 256 columns."""
    columns = weights.columns
    warps = 8 if columns > 4096 and not swiglu and outputs < 6144 else 4
    slices = -(-columns // (256 * warps))
    if not swiglu and 6144 <= outputs < HEAD_OUTPUTS and slices <= 4:
        return 4, 4, 4, False
    rows = 8 if slices <= 4 and warps == 4 else 4 if slices <= 8 else 2
    return rows, warps, 0, True


def lone_tile(outputs: int, weights: Weights, units: int, *, swiglu: bool) -> tuple[int, int, int]:
    """Rows of a tile, warps, slices at once."""
    if swiglu or outputs >= HEAD_OUTPUTS:
        return 8, 1, 1
    if not fill_slices(weights):
        return 8, 2, 2
    return (16 if _busy(outputs, 16, units) > 0.8 else 8), 4, 4


def _busy(outputs: int, rows: int, places: int) -> float:
    """What share of `places` has a program, on average, if all take equally long."""
    programs = -(-outputs // rows)
    return programs / (-(-programs // places) * places)


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
        warps = 8 if swiglu and (weights.format == "int4" or weights.columns <= 2048) else 4
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
