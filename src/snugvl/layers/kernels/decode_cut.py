"""How decode attention cuts a context into splits, one program each, and the counters at which they meet.

The grid is fixed when a CUDA graph is recorded, lengths are not: a graph has `splits` programs for each
sequence and KV head, and as many of them as the context is long for have work.

    tokens of a split = max(⌈context / splits⌉ up to a multiple of `step`, `least`)
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

PROGRAMS = 4  # a multiprocessor: enough loads on their way to fill the memory's latency
FEWEST, MOST = 8, 32  # splits
MERGED_VALUES = 64  # of partial outputs that a thread merges at a time: one register each
COUNTERS = 4096


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """Splits of a context and how a program goes through its own.

    Attributes:
        splits: of a context at most; in two kernels a power of two.
        step: tokens read at a time, a power of two, 16 or more.
        warps: of a program.
        stages: Triton's. A step waits for its block table, then for its keys and values, and Triton gives
            half of the stages to each wait: 3 keep one step in shared memory, 5 load one while another is
            computed, 7 load two. With 2 every wait is waited for.
        least: tokens of a split, unless the context ends; in one kernel only.
        ahead: tokens that a program fetches into the L2 cache before its turn, a power of two; 0 for none.
            In one kernel, where kernels start early (from Hopper on).
    """

    splits: int = 16
    step: int = 64
    warps: int = 4
    stages: int = 2
    least: int = 0
    ahead: int = 0

    @property
    def widest(self) -> int:
        """Splits that one kernel is compiled for: the same for any number up to `MOST`."""
        return int(max(MOST, triton.next_power_of_2(self.splits)))

    def together(self, shared: int, dim: int) -> int:
        """Heads of the `shared` ones of a KV head that are merged at a time, a power of two."""
        most = max(1, MERGED_VALUES * 32 * self.warps // (self.widest * triton.next_power_of_2(dim)))
        return int(min(triton.next_power_of_2(shared), most))


def cut_by_load(rows: int, units: int, step: int) -> DecodeCut:
    """A cut for `rows` (sequences · KV heads) on `units` multiprocessors: none of them idle where it can be.

    Never below `FEWEST`, so that one long context among short ones is not the work of one multiprocessor.
    Sums are rounded in another order where a batch has other splits, as in the products of other batches.
    """
    wanted = triton.next_power_of_2(-(-PROGRAMS * units // rows))
    return DecodeCut(splits=max(FEWEST, min(MOST, wanted)), step=step // 2, stages=5, least=step)


@cache
def _counters(device: torch.device, size: int) -> torch.Tensor:
    recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not recording, "the first launch compiles the kernel, which no recording allows either"
    return torch.zeros(size, dtype=torch.int32, device=device)


def counters(device: torch.device, rows: int) -> torch.Tensor:
    """One counter a row, all 0: each kernel leaves them so. For launches that follow one another in a stream.

    They are never freed, since CUDA graphs hold their address.
    """
    return _counters(device, max(COUNTERS, triton.next_power_of_2(rows)))
