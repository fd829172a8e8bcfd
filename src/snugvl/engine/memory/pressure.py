"""Other programs that take the device's memory while we run: how large the KV cache may be now.

    free    ├─ still to come ─┤├─ slack ────────┤        what a plan leaves: a margin of slack
            ├─ still to come ─┤├ slack ┤│ game ……        below LOW_BYTES the KV cache gets smaller, until
            ├─ still to come ─┤├─ 2 × LOW ─┤             there is twice that again
            ├─ still to come ─┤├─ 2 × LOW ─── … ─┤       with room for PATIENCE_S: it grows back

*Still to come* is what the plan has and torch does not hold yet: workspace that no request has needed, graphs
that are captured on their first use. The cache is what can be given: whatever it held is computed again, but
it never gets too small for one conversation of the whole context, so everything that was admitted can finish.

Only numbers live here, so that a test can stand in for a neighbour; `engine.py` acts on them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from snugvl.config import EngineConfig

LOW_BYTES = 64 << 20  # half of the least margin that a plan leaves
BACK_BYTES = LOW_BYTES * 3 // 2  # left when the cache grows: a plan may leave less than its margin
STEPS = 4  # in which the cache gives its all: each of them stops what runs for a moment
LOOK_S = 0.1  # between two looks
PATIENCE_S = 10.0  # that room must last before the cache takes it back


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What nobody holds on the device, and what torch holds in this process, unused pieces included."""

    free_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Planned:
    """What torch is going to hold in this process, by the plan.

    Attributes:
        total_bytes: of everything: weights, KV cache, encoder outputs, workspace, graphs.
        graph_bytes: of the CUDA graphs among it, which come one by one.
    """

    total_bytes: int
    graph_bytes: int = 0


Read = Callable[[], DeviceMemory]
Told = Callable[[], None]


def reader(device: torch.device) -> Read:
    """Reads a GPU's memory, which takes some microseconds and waits for nothing."""

    def read() -> DeviceMemory:
        return DeviceMemory(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))

    return read


class Watch:
    """Says how many blocks the KV cache should have.

    Attributes:
        full: blocks of the plan.
        least: blocks of one conversation of the whole context.
        given_bytes: what else of the plan is not to come, because it was given up for other programs.
    """

    def __init__(
        self,
        read: Read,
        planned: Planned,
        told: Told | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`told` is called, in the engine's thread, when a neighbour has made the cache smaller."""
        self._told = told
        self._read = read
        self._planned = planned
        self._clock = clock
        self._looked = float("-inf")
        self._roomy_since: float | None = None
        self._spare_since: float | None = None
        self.given_bytes = 0
        self.full = self.least = self._block_bytes = 0

    def begin(self, config: EngineConfig, block_bytes: int) -> None:
        """The cache that it is about."""
        self.full, self._block_bytes = config.num_blocks, block_bytes
        self.least = least_blocks(config)

    def look(self, blocks: int, *, at_once: bool = False) -> int | None:
        """How many blocks there should be where there are `blocks`; None: it isn't time to look yet."""
        now = self._clock()
        if now - self._looked < LOOK_S and not at_once:
            return None
        self._looked = now
        slack = self._slack(blocks)
        if blocks < self.least:  # it couldn't even have that
            return self.least if slack >= (self.least - blocks) * self._block_bytes else blocks
        step = max((self.full - self.least) // STEPS, 1)
        if slack < LOW_BYTES:
            self._roomy_since = None
            short = -(-(2 * LOW_BYTES - slack) // self._block_bytes)
            return max(self.least, blocks - max(short, step))
        given = self.full - blocks
        back = min((slack - BACK_BYTES) // self._block_bytes, given)
        if back < min(max(step // 2, 1), given) or not given:
            self._roomy_since = None
            return blocks
        self._roomy_since = now if self._roomy_since is None else self._roomy_since
        return blocks + back if now - self._roomy_since >= PATIENCE_S else blocks

    def roomy(self) -> bool:
        """Whether there has been room for what was given up beside a whole cache, at looks since a while."""
        now = self._clock()
        if self._slack(self.full) < self.given_bytes + BACK_BYTES:
            self._spare_since = None
            return False
        self._spare_since = now if self._spare_since is None else self._spare_since
        if now - self._spare_since < PATIENCE_S:
            return False
        self._spare_since = None
        return True

    def tell(self) -> None:
        """Say that a neighbour has made the cache smaller."""
        if self._told is not None:
            self._told()

    def missing_bytes(self, blocks: int) -> int:
        """What torch should hold beside a cache of `blocks` and doesn't yet, graphs left out."""
        graphs = max(self._planned.graph_bytes - self.given_bytes, 0)
        return max(self._to_come(blocks, self._read().held_bytes) - graphs, 0)

    def _slack(self, blocks: int) -> int:
        memory = self._read()
        return memory.free_bytes - max(self._to_come(blocks, memory.held_bytes), 0)

    def _to_come(self, blocks: int, held_bytes: int) -> int:
        given = (self.full - blocks) * self._block_bytes
        return self._planned.total_bytes - self.given_bytes - given - held_bytes


def sizes(blocks: int, least: int) -> list[int]:
    """Blocks to have: the first number there is memory for. Somebody may take it while we let go of ours."""
    return [blocks, *(least * quarters // 4 for quarters in (4, 3, 2, 1))]


def least_blocks(config: EngineConfig) -> int:
    """Blocks of one conversation of the whole context, or of the plan where that has fewer."""
    return min(config.num_blocks, -(-config.max_model_len // config.block_size))


class Patience:
    """How long the oldest request has been waiting for memory, in vain."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """It waits no more, or something else does."""
        self._since = None

    def over(self) -> bool:
        """Whether it has waited for long enough; then the next one begins."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since < PATIENCE_S:
            return False
        self._since = None
        return True
