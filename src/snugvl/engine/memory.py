"""The memory of sequences: allocated, given back when other programs need it, and taken again.

Keys and values are allocated by blocks, recurrent states by slots, with a share of their snapshots each.
`pressure.py` says how much there should be; here it is done:

    drop the CUDA graphs of prompts; if that is not enough:
    preempt all ─► drop graphs and encodings ─► free the KV cache ─► make it anew ─► claim the workspace again

Slots for experts in host memory (`models/expert_cache.py`) are made anew with it, and are empty then.

The cache is one piece of memory, of which no part can be given back alone. Between letting go of it and
having it again in another size another program may be faster; so there are smaller sizes to fall back to.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from snugvl.checkpoint.architecture import no_predictor
from snugvl.core.config import EngineConfig
from snugvl.engine.encoder import Encoder
from snugvl.engine.graphs.cache import SMALL_BYTES
from snugvl.engine.pressure import PressureMonitor, sizes
from snugvl.engine.runner import Runner
from snugvl.engine.scheduler import PREFILL_BESIDE_DECODES, Scheduler
from snugvl.layers.device import pooled_bytes, release
from snugvl.layers.kv_cache import KVCache, StateCache
from snugvl.models.batch import Network
from snugvl.models.decoder import cache_of
from snugvl.models.expert_cache import ExpertCache

logger = logging.getLogger(__name__)

# Small tensors of linear attention more: of short prompts all that it computes with in float32 is small.
STATES_SMALL_BYTES = 16 << 20


def config_for(model: Network, config: EngineConfig) -> EngineConfig:
    """The configuration as a model can use it: with recurrent states no prefix cache without snapshots.

    Raises:
        RequestError: its drafts are to come from a predictor that isn't there.
    """
    if config.speculation == "mtp" and not model.config.text.predictors:
        raise no_predictor(model.config.architecture)
    snapshots = config.state_snapshots if config.prefix_cache and model.config.text.linear else 0
    cached = config.prefix_cache and (model.config.text.linear is None or snapshots > 0)
    return replace(config, prefix_cache=cached, state_snapshots=snapshots)


def prefill_beside_decodes(device: torch.device) -> int:
    """Most tokens of prompts in a step beside decodes: those that take as long as 512 on a small card."""
    if device.type != "cuda":
        return PREFILL_BESIDE_DECODES
    return max(PREFILL_BESIDE_DECODES, 16 * torch.cuda.get_device_properties(device).multi_processor_count)


def allocate(model: Network, config: EngineConfig) -> KVCache:
    """The cache of a model. Layers of linear attention have no keys and values, and others no state."""
    return cache_of(
        model.config.text,
        model.dtype,
        model.device,
        config.num_blocks,
        config.block_size,
        fp8=config.kv_cache == "fp8",
        slots=config.max_num_seqs,
        snapshots=config.snapshots_beside(config.max_num_seqs),
    )


def state_bytes(cache: KVCache) -> int:
    """Bytes of one sequence's recurrent state."""
    return 0 if cache.states is None else cache.states.nbytes // cache.states.rows


def expert_bytes(model: Network, config: EngineConfig) -> Callable[[int], int] | None:
    """Bytes of the slots for experts by the number of KV blocks; None where no experts are in host memory."""
    experts = model.expert_cache
    if experts is None:
        return None
    sizes, whole = [experts.bytes_of(slots) for slots in range(experts.full + 1)], config.num_blocks
    # Numbers alone, as the monitor may outlive a network that was closed. Without blocks there are no slots.
    return [0, *(sizes[experts.part(blocks, whole)] for blocks in range(1, whole + 1))].__getitem__


class MemoryReclaimer:
    """Gives memory that an engine could do without to other programs, and takes it back."""

    def __init__(
        self,
        monitor: PressureMonitor,
        config: EngineConfig,
        scheduler: Scheduler,
        encoder: Encoder,
        runner: Runner,
    ) -> None:
        self._monitor = monitor
        self._config = config
        self._scheduler = scheduler
        self._encoder = encoder
        self._runner = runner
        self._late_bytes = 0  # that were logged
        self._loads = 0  # kernels and graphs at the last look

    @property
    def limit(self) -> int:
        """Most blocks that a new request may need, so that it keeps none that are to be given back."""
        return max(min(self._scheduler.pool.num_blocks, self._monitor.target), self._monitor.least)

    @property
    def most(self) -> int:
        """Number of blocks of the cache where no other program needs memory."""
        return self._monitor.most

    def adapt(self, *, at_once: bool = False) -> None:
        """Look, and give the KV cache the size that it should have. No step may be in flight."""
        blocks = self.poll(at_once=at_once)
        if blocks is not None:
            self.resize_cache(blocks)

    def poll(self, *, at_once: bool) -> int | None:
        """Number of blocks that the KV cache should have, or None where it has them.

        Before it gets smaller the graphs of prompts go, which only save time; they come back after it has
        grown.
        """
        graphs, now = self._runner.graph_cache, self._scheduler.pool.num_blocks
        if graphs.released:
            graphs.released = False
            self.claim_workspace()
        self._monitor.given_bytes = graphs.given_bytes
        loads = self._runner.compilations.loaded + graphs.captures  # the driver takes memory for each
        new, self._loads = loads != self._loads, loads
        blocks = self._monitor.update(now, self._scheduler.needed_blocks, at_once=at_once or new)
        if blocks is None:
            return None
        if self._monitor.target < now and graphs.on:
            logger.warning("other programs need memory: steps with prompts go without CUDA graphs")
            graphs.stop()
            self.claim_workspace()
            return None
        whole = blocks == now == self._monitor.most
        if whole and graphs.given_bytes and self._monitor.room_is_back():
            graphs.start()
        return None if blocks == now and self._slots == self._scheduler.slots else blocks

    @property
    def _slots(self) -> int:
        return self._config.max_num_seqs if self._runner.cache.states is None else self._monitor.slots

    def resize_cache(self, blocks: int) -> None:
        """Resize the KV cache to `blocks` blocks, or to the most that fit. No step may be running."""
        cache, before = self._runner.cache, self._scheduler.pool.num_blocks
        self._scheduler.resize(0, self._scheduler.slots)
        self._encoder.cache_bytes = 0 if blocks < self._monitor.most else self._config.encoder_cache_bytes
        self._encoder.clear()
        self._runner.graph_cache.clear()
        experts = self._runner.model.expert_cache
        reallocate(cache, sizes(blocks), self._config, self._slots, experts)
        self._runner.limit_graphs()
        slots = self._config.max_num_seqs if cache.states is None else cache.states.slots
        self._monitor.slots = slots
        self._scheduler.resize(cache.num_blocks, slots)
        self.claim_workspace()
        tokens, also = cache.num_blocks * cache.block_size, ""
        if experts is not None:
            also = f", and {experts.slots} experts of each layer have copies on the GPU"
        if self._monitor.late_bytes > self._late_bytes:
            self._late_bytes = self._monitor.late_bytes
            logger.warning(
                "the driver's kernels take %d MiB more than planned: the KV cache shrinks to %d tokens",
                *(self._late_bytes >> 20, tokens),
            )
        elif blocks <= before:
            logger.warning("other programs need memory: the KV cache shrinks to %d tokens%s", tokens, also)
            self._monitor.notify()
        else:
            logger.warning("there is memory again: the KV cache grows to %d tokens%s", tokens, also)

    def start(self) -> None:
        """Hold the whole workspace from the first step on, in the thread of all steps.

        Before it comes what cuBLAS works in, which torch gives it once a thread, for good: in the middle of
        the workspace it would leave two halves.
        """
        device = self._runner.model.device
        if device.type == "cuda":
            one = torch.ones(1, 1, dtype=self._runner.model.dtype, device=device)
            torch.mm(one, one)
        self.claim_workspace()

    def claim_workspace(self) -> None:
        """Hold the workspace in one piece, of which torch's allocator cuts what steps need.

        Pieces of their own for every size would leave holes that no other size fits into, and be asked for
        when another program has taken the memory: at the start, and after all went back to the driver.
        """
        device = self._runner.model.device
        if device.type != "cuda":
            return
        small = SMALL_BYTES + (0 if self._runner.cache.states is None else STATES_SMALL_BYTES)
        missing = self._monitor.missing_bytes(self._scheduler.pool.num_blocks, pooled_bytes()) - small
        if missing <= 0:
            return
        try:
            torch.empty(missing, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return  # what is needed of it is asked for when it is needed


def reallocate(
    cache: KVCache,
    sizes: Iterable[int],
    config: EngineConfig,
    slots: int,
    experts: ExpertCache | None = None,
) -> None:
    """Resize a cache to the first of `sizes`, in blocks, that fits, or to none; all blocks are empty.

    States for `slots` sequences, with their snapshots, are allocated first; for one sequence, or none, where
    memory lacks. `experts` get the same share of theirs as the blocks.

    The old memory goes back to the driver before, so nothing may hold views of it, no CUDA graph either.
    """
    device = cache.storage.device
    cache.resize(0)
    if cache.states is not None and slots != cache.states.slots:
        cache.states.resize(0)
    if experts is not None:
        experts.free()
    release(device)
    states = cache.states
    if states is not None and not states.slots and not _allocate_states(states, config, slots):
        return
    for size in sizes:
        try:
            cache.resize(size)
            if experts is not None:
                experts.resize(experts.part(size, config.num_blocks))
        except torch.OutOfMemoryError:
            cache.resize(0)
            continue
        return


def _allocate_states(states: StateCache, config: EngineConfig, slots: int) -> bool:
    """Whether there is memory for some of the slots."""
    for count in (slots, 1):
        try:
            states.resize(count, config.snapshots_beside(count))
        except torch.OutOfMemoryError:
            continue
        return True
    return False
