"""The size that the KV cache may have now, as other programs take the device's memory while we run.

    free    ├─ still to come ─┤├─ slack ────────┤        what a plan leaves: a margin of slack
            ├─ still to come ─┤├ slack ┤│ game ……        below LOW_BYTES the KV cache gets smaller, until
            ├─ still to come ─┤├─ 2 × LOW ─┤             there is twice that again, or more for who takes more
            ├─ still to come ─┤├─ 2 × LOW ─── … ─┤       with room for PATIENCE_S: it grows back

*Still to come* is what the plan has and torch does not hold yet: workspace that no request has needed, graphs
that are captured on their first use. The cache is what can be given: whatever it held is computed again.

    blocks  ├─ least ─┤├─ what admitted requests need ─┤├─ given at once ─┤
                       └─ given as they end: what comes new must fit into `target`, or is refused

Recurrent states and slots for a mixture's experts go with the blocks, in proportion.

So everything that was admitted can finish, and a hungry neighbour is fed as fast as answers end.

Our own process can also be the neighbour: the driver takes memory when kernels load late, of which torch's
cap knows nothing. A plan leaves LATE_BYTES for that. When less than KEPT_BYTES of them are left, torch's cap
comes down and the cache gives what is missing, so that there is always room for the kernels of the next step:

    cap     ├─ driver ──────┤├─ torch ────────────────────┤├─ kept ─┤
            ├─ driver, late kernels ─┤├─ torch, less ─────┤├─ kept ─┤

Kernels are loaded by steps of a kind that is new; so there is a look after each of those, and not only when
it is time for one (`memory.py`). Where the driver doesn't say what a process holds, as under WSL2, what is
lost between two looks is taken for the driver's if kernels were loaded there (`CountedDriver`).

Only numbers live here, so that a test can stand in for a neighbour; `memory.py` acts on them.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from snugvl.core.config import EngineConfig

LOW_BYTES = 64 << 20  # half of the least margin that a plan leaves
BACK_BYTES = LOW_BYTES * 3 // 2  # left when the cache grows: a plan may leave less than its margin
KEPT_BYTES = 16 << 20  # half of what a plan leaves for late kernels (`footprint.native.LATE_BYTES`)
MOST_LOADED_BYTES = 64 << 20  # that the driver takes between two looks; what is more, others took
STEPS = 4  # in which the cache gives its all: each of them stops what runs for a moment
LEAST_PARTS = 4  # of one whole conversation: the cache always keeps one part
POLL_S = 0.1  # between two looks
AGAIN_S = 2.0  # a program that took memory so lately may be growing
MOST_AGAIN_BYTES = 4 * LOW_BYTES  # that stay free for a program that just took as much
PATIENCE_S = 10.0  # that room must last before the cache takes it back


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that are free on the device, and that torch holds in this process, unused pieces included.

    `process_bytes`: all that this process holds, as the driver counts it; None where it doesn't tell.
    """

    free_bytes: int
    held_bytes: int
    process_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """Bytes that torch will hold in this process, by the plan.

    Attributes:
        total_bytes: bytes of everything: weights, KV cache, encoder outputs, workspace, graphs.
        graph_bytes: bytes of the CUDA graphs among it, which come one by one.
        cap_bytes: most bytes that the whole process ever takes, or None without a cap.
    """

    total_bytes: int
    graph_bytes: int = 0
    cap_bytes: int | None = None


Read = Callable[[], DeviceMemory]
OnShrink = Callable[[], None]
OnCap = Callable[[int], None]


class CountedDriver:
    """Counts the driver's memory in this process, in bytes, where it doesn't report it.

    It is what the driver held at the start, and all that the card lost while kernels were loaded.

    Others may have taken it, but only within a tenth of a second; then the cache is smaller by it, for good.
    """

    def __init__(self, driver_bytes: int, loads: Callable[[], int]) -> None:
        """`driver_bytes`: at the start; `loads`: how many kernels and graphs were loaded until now."""
        self.nbytes = driver_bytes
        self._loads = loads
        self._before = loads(), 0  # at the look before, with the bytes that were free or torch's then

    def process_bytes(self, free_bytes: int, held_bytes: int) -> int:
        """Bytes that this process holds, as far as a look at the card shows."""
        loads, left = self._loads(), free_bytes + held_bytes
        loads_before, left_before = self._before
        self._before = loads, left
        if loads != loads_before and left_before:
            self.nbytes += min(max(left_before - left, 0), MOST_LOADED_BYTES)
        return held_bytes + self.nbytes


def memory_reader(
    device: torch.device,
    process_bytes: Callable[[], int | None] = lambda: None,
    counted: CountedDriver | None = None,
) -> Read:
    """Reads a GPU's memory, which takes some microseconds and waits for nothing.

    `counted`: in place of `process_bytes`, where that says nothing.
    """

    def read() -> DeviceMemory:
        free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
        process = process_bytes()
        if process is None and counted is not None:
            process = counted.process_bytes(free, held)
        return DeviceMemory(free, held, process)

    return read


class PressureMonitor:
    """Says how many blocks the KV cache should have.

    Attributes:
        full: number of blocks of the plan.
        most: most blocks that there will ever be: those of the plan, less the memory of late kernels.
        least: number of blocks that the cache always keeps.
        slots: sequences that may run at once; fewer where recurrent states were given up as well.
        target: number of blocks that it should have, if requests admitted before don't need more.
        given_bytes: bytes of the plan beside blocks that were given up for other programs.
        late_bytes: bytes of the cache that late kernels took.
    """

    def __init__(
        self,
        read: Read,
        planned: PlannedBytes,
        on_shrink: OnShrink | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_cap: OnCap | None = None,
    ) -> None:
        """`on_shrink` is called, in the engine's thread, when a neighbour has made the cache smaller.

        `on_cap` is called with the most bytes that torch may hold from now on; it lowers its limit, never
        raises it.
        """
        self._on_shrink = on_shrink
        self._on_cap = on_cap
        self._read = read
        self._planned = planned
        self._clock = clock
        self._updated = float("-inf")
        self._slack_then = 0  # at the look before
        self._taken, self._taken_at = 0, float("-inf")
        self._room_since: float | None = None
        self._back = 0  # blocks that there has been room for since then
        self._spare_since: float | None = None
        self._allowed: int | None = None  # for torch
        self.given_bytes = self.late_bytes = 0
        self.full = self.most = self.least = self.target = self._block_bytes = self._state_bytes = 0
        self.slots = self._all_slots = 0
        self._snapshots_beside: Callable[[int], int] = _nothing
        self._beside: Callable[[int], int] = _nothing

    def begin(
        self,
        config: EngineConfig,
        block_bytes: int,
        state_bytes: int = 0,
        beside: Callable[[int], int] | None = None,
    ) -> None:
        """Set the cache that is watched.

        Args:
            state_bytes: of one sequence's recurrent state.
            beside: bytes of what shrinks and grows with the cache, by the number of its blocks.
        """
        self._snapshots_beside, self._beside = config.snapshots_beside, beside or _nothing
        self.full = self.most = self.target = config.num_blocks
        self.slots = self._all_slots = config.max_num_seqs
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self.least = least_blocks(config)

    def update(self, blocks: int, needed: int = 0, *, at_once: bool = False) -> int | None:
        """Number of blocks there should be where there are `blocks`; None: it isn't time to look yet.

        `needed`: blocks of the largest request that was admitted. `slots` may change with them.
        """
        now = self._clock()
        if now - self._updated < POLL_S and not at_once:
            return None
        self._updated = now
        memory = self._read()
        slack = self._slack(memory, blocks)
        taken = self._taken_lately(now, slack)
        kept = max(self.least, min(needed, self.full))
        if blocks < kept:  # it couldn't even have that
            self.target = max(blocks, self.least)
            self.slots = max(self.slots, 1)
            more = (kept - blocks) * self._block_bytes + self._beside(kept) - self._beside(blocks)
            return kept if slack >= more else blocks
        short = self._late(memory, blocks, kept)
        if slack < max(LOW_BYTES, min(taken, MOST_AGAIN_BYTES)):
            short = max(short, self._short(slack, taken))
        if short:
            return self._shrink(blocks, short, needed)
        self.target = blocks
        return self._grow(now, blocks, slack)

    def _taken_lately(self, now: float, slack: int) -> int:
        """The most that a neighbour took between two looks: it may want as much again."""
        fallen, self._slack_then = self._slack_then - slack, slack
        if now - self._taken_at >= AGAIN_S:
            self._taken = 0
        if fallen > self._taken:
            self._taken, self._taken_at = fallen, now
        return self._taken

    def _short(self, slack: int, taken: int) -> int:
        """Bytes to give to a neighbour: a step, or more for one that takes more at a time."""
        return max(max(2 * LOW_BYTES, taken + LOW_BYTES) - slack, self._step_bytes)

    def _late(self, memory: DeviceMemory, blocks: int, kept: int) -> int:
        """Bytes to give because the driver holds more in this process than was planned."""
        cap, process = self._planned.cap_bytes, memory.process_bytes
        if cap is None or process is None:
            return 0
        allowed = cap - KEPT_BYTES - (process - memory.held_bytes)
        if self._allowed is None or allowed < self._allowed:
            self._allowed = allowed
            if self._on_cap is not None:
                self._on_cap(allowed)
        over = memory.held_bytes + max(self._to_come(blocks, memory.held_bytes), 0) - allowed
        if over <= 0:
            return 0
        short = over + KEPT_BYTES  # so that it needn't be again so soon
        most = max(self._less(blocks, short), kept)
        self.late_bytes += max(self.most - most, 0) * self._block_bytes
        self.most = min(self.most, most)
        return short

    def _shrink(self, blocks: int, short: int, needed: int) -> int:
        self._room_since = None
        self.target = self._less(blocks, short)
        possible = max(self.target, min(needed, blocks))
        slots = min(self.slots, self._slots_for(self.target))
        freed = self._bytes(blocks, self.slots) - self._bytes(possible, slots)
        if possible > self.target and freed < min(self._step_bytes, short):
            return blocks  # nearly all of it is needed: not worth a stop until those requests have ended
        if freed:
            self._slack_then += freed
            self.slots = slots
        return possible

    def _grow(self, now: float, blocks: int, slack: int) -> int:
        given = self._more_bytes(blocks, max(self.most, blocks))
        back = min(slack - BACK_BYTES, given)
        if back < min(self._step_bytes // 2, given) or not given:
            self._room_since = None
            return blocks
        if self._room_since is None or back >= self._back + self._step_bytes:  # much more since now
            self._room_since, self._back = now, back
        self._back = min(self._back, back)  # what was there all the time: a flicker gives nothing back
        if now - self._room_since < PATIENCE_S:
            return blocks
        self._room_since = None
        every = range(blocks, max(self.most, blocks) + 1)
        more = bisect_right(every, self._back, key=lambda count: self._more_bytes(blocks, count))
        self.target = every[max(more - 1, 0)]
        if more:
            self._slack_then -= self._more_bytes(blocks, self.target)
            self.slots = max(self.slots, self._slots_for(self.target))
        return self.target

    @property
    def _step_bytes(self) -> int:
        whole = self._bytes(self.full, self._all_slots)
        return max((whole - self._bytes(self.least, self._slots_for(self.least))) // STEPS, self._block_bytes)

    def _bytes(self, blocks: int, slots: int) -> int:
        states = (slots + self._snapshots_beside(slots)) * self._state_bytes
        return blocks * self._block_bytes + states + self._beside(blocks)

    def _slots_for(self, blocks: int) -> int:
        """Sequences that may run with `blocks` blocks; where states take memory, in proportion to them."""
        if not self._state_bytes:
            return self._all_slots
        return max(-(-self._all_slots * blocks // max(self.full, 1)), 1)

    def _more_bytes(self, blocks: int, count: int) -> int:
        """Bytes that `count` blocks take beyond `blocks`, with the slots of both."""
        return self._bytes(count, max(self.slots, self._slots_for(count))) - self._bytes(blocks, self.slots)

    def _less(self, blocks: int, short: int) -> int:
        """The most blocks that leave `short` bytes more free, or the fewest that there may be."""
        whole = self._bytes(blocks, self.slots)
        every = range(min(self.least, blocks), blocks + 1)
        fewer = bisect_right(
            every, whole - short, key=lambda n: self._bytes(n, min(self.slots, self._slots_for(n)))
        )
        return every[max(fewer - 1, 0)]

    def room_is_back(self) -> bool:
        """Whether all looks of late found room for what was given up, beside a whole cache."""
        now = self._clock()
        if self._slack(self._read(), self.most) < self.given_bytes + BACK_BYTES:
            self._spare_since = None
            return False
        self._spare_since = now if self._spare_since is None else self._spare_since
        if now - self._spare_since < PATIENCE_S:
            return False
        self._spare_since = None
        return True

    def notify(self) -> None:
        """Call `on_shrink`: a neighbour has made the cache smaller."""
        if self._on_shrink is not None:
            self._on_shrink()

    def missing_bytes(self, blocks: int, graphs_held: int = 0) -> int:
        """Bytes that torch should hold beside a cache of `blocks` and doesn't yet, without graphs.

        `graphs_held`: what it holds for graphs already.
        """
        graphs = max(self._planned.graph_bytes - self.given_bytes - graphs_held, 0)
        return max(self._to_come(blocks, self._read().held_bytes) - graphs, 0)

    def _slack(self, memory: DeviceMemory, blocks: int) -> int:
        return memory.free_bytes - max(self._to_come(blocks, memory.held_bytes), 0)

    def _to_come(self, blocks: int, held_bytes: int) -> int:
        given = self._bytes(self.full, self._all_slots) - self._bytes(blocks, self.slots)
        return self._planned.total_bytes - self.given_bytes - given - held_bytes


def _nothing(_: int) -> int:
    return 0


def sizes(blocks: int) -> list[int]:
    """Numbers of blocks, of which the first that there is memory for is taken: others may be faster."""
    return [blocks, *(blocks * quarters // 4 for quarters in (3, 2, 1))]


def least_blocks(config: EngineConfig) -> int:
    """A quarter of one conversation of the whole context, or the plan where that has less."""
    return min(config.num_blocks, -(-config.max_model_len // (LEAST_PARTS * config.block_size)))
