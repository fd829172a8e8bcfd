"""In which tiles attention of chunks runs on which hardware.

Shared memory decides. A stage more holds a step of keys and values more, and Triton keeps the queries there:

    ROWS · dim + buffers · 2 · STEP · dim values     buffers: STAGES on Hopper, one less before

A multiprocessor has 64 KiB on Turing, 100 on consumer cards from Ampere on, 164 on an A100, 228 from Hopper on.
Two programs on each hide each other's waits, so each takes less than half of that where it can.
"""

from dataclasses import dataclass

from snugvl.layers.kernels.device import Hardware


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tiles of `attend_chunk`; all but warps and stages powers of two.

    Attributes:
        rows: of a program, each a token and a query head.
        step: tokens of the cache read at a time.
        warps: of a program.
        stages: Triton's; 2 load a step while another is computed, 3 load two.
        apart: steps that need no masks have a loop of their own.
        few_step, few_stages: of a sequence with one new token.
    """

    rows: int = 64
    step: int = 64
    warps: int = 4
    stages: int = 2
    apart: bool = False
    few_step: int = 64
    few_stages: int = 3


def prefill_tiles(hardware: Hardware, dim: int, exact: bool) -> PrefillTiles:
    """Tiles for heads of `dim` values; `exact`: products are float32's, loops over registers."""
    wide = dim > 128
    major = hardware.capability[0]
    if major == 0:  # interpreted
        return PrefillTiles()
    if exact or major < 8:
        return PrefillTiles(
            rows=32 if wide else 64, step=16 if wide else 32, few_step=16 if wide else 32, few_stages=2
        )
    if major in (9, 10):
        if wide:
            return PrefillTiles(step=32, few_step=32)
        return PrefillTiles()
    return PrefillTiles(
        step=16 if wide else 32, stages=3, few_step=16 if wide else 32
    )
