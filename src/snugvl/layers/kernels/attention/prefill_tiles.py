"""In which tiles attention of chunks runs on which hardware.

Registers and shared memory decide, which a multiprocessor has 64 KiB of on Turing, 100 on consumer cards from
Ampere on, 164 on an A100, 228 on an H100. Queries, and the keys and values of `stages` steps (one less before
Hopper), take 2 bytes · dim a token. Two programs at a time hide each other's waits: where they can, each
takes less than half.
"""

from dataclasses import dataclass

from snugvl.layers.kernels.device import Hardware


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tiles of `attend_chunk`; benchmarks/prefill_attention.py compares them.

    Attributes:
        rows: of a program, each a token and a query head; a power of two.
        step: tokens of the cache read at a time, a power of two, 16 or more.
        warps: of a program.
        stages: Triton's; 2 load a step while another is computed, 3 load two.
        few_step, few_stages: of a sequence with one new token.
    """

    rows: int = 64
    step: int = 64
    warps: int = 4
    stages: int = 3
    few_step: int = 64
    few_stages: int = 3


def prefill_tiles(hardware: Hardware, dim: int, shared: int, exact: bool) -> PrefillTiles:
    """Tiles for heads of `dim` values, of which `shared` read the same keys and values.

    `exact`: queries are float32, and products are, too.
    """
    wide = dim > 128
    generation, minor = hardware.capability
    if generation and (exact or generation < 8):  # without tensor cores products are loops over registers
        return PrefillTiles(rows=32 if wide else 64, step=16, warps=8, stages=2, few_step=16, few_stages=2)
    if generation in (8, 12):
        if wide:
            return PrefillTiles(step=16, warps=8, few_step=16)
        stages = 3 if (generation, minor) == (8, 0) else 2  # an A100 has more
        return PrefillTiles(step=32, stages=stages, few_step=32, few_stages=stages)
    if wide:
        return PrefillTiles(step=32, stages=2, few_step=32)
    if shared > 2:  # as many programs as with two heads and half of the rows, and half as much to read
        return PrefillTiles(rows=128, warps=8, few_step=128)
    return PrefillTiles()
