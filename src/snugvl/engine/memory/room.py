"""Gives memory back that other programs need, and takes it again: what `pressure.py` says, done.

    drop recordings of prompts, if that is not enough:
    preempt all ─► drop graphs and encodings ─► free the KV cache ─► make it anew ─► claim the workspace again

The cache is one piece of memory, of which no part can be given back alone. Between letting go of it and
having it again in another size somebody else may be faster; so there are smaller sizes to fall back to.
"""

import logging

import torch

from snugvl.config import EngineConfig
from snugvl.engine.encoder import Encoder
from snugvl.engine.graphs.recordings import SMALL_BYTES
from snugvl.engine.memory.caches import refit
from snugvl.engine.memory.pressure import Watch, sizes
from snugvl.engine.memory.shortage import pooled_bytes
from snugvl.engine.runner import Runner
from snugvl.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Small tensors of linear attention more: of short prompts all that it computes with in float32 is small.
STATES_SMALL_BYTES = 16 << 20


class Room:
    """The memory that one engine could do without."""

    def __init__(
        self, watch: Watch, config: EngineConfig, scheduler: Scheduler, encoder: Encoder, runner: Runner
    ) -> None:
        self._watch = watch
        self._config = config
        self._scheduler = scheduler
        self._encoder = encoder
        self._runner = runner
        self._late_bytes = 0  # that were told

    @property
    def limit(self) -> int:
        """Blocks that a new request may need: it must not keep those that are to be given back."""
        return max(min(self._scheduler.pool.num_blocks, self._watch.target), self._watch.least)

    @property
    def most(self) -> int:
        """Blocks of the cache where no other program needs memory."""
        return self._watch.most

    def wanted(self, *, at_once: bool) -> int | None:
        """How many blocks the KV cache should have, where that is another number than now.

        Before it gets smaller the recordings go, which only save time; they come back after it has grown.
        """
        if self._runner.graphs.released:
            self._runner.graphs.released = False
            self.claim()
        now, recordings = self._scheduler.pool.num_blocks, self._runner.recordings
        if recordings is not None:
            self._watch.given_bytes = 0 if recordings.on else self._config.step_graph_bytes
        blocks = self._watch.look(now, self._scheduler.needed_blocks, at_once=at_once)
        if blocks is None:
            return None
        if recordings is None:
            return None if blocks == now and self._seats == self._scheduler.seats else blocks
        if self._watch.target < now and recordings.on:
            logger.warning("other programs need memory: steps with prompts go without CUDA graphs")
            self._runner.do_without()
            self.claim()
            return None
        if blocks == now == self._watch.most and not recordings.on and self._watch.roomy():
            recordings.start()
        return None if blocks == now and self._seats == self._scheduler.seats else blocks

    @property
    def _seats(self) -> int:
        return self._config.max_num_seqs if self._runner.cache.states is None else self._watch.seats

    def refit(self, blocks: int) -> None:
        """Have so many blocks, or the most that there is memory for. No step may be running."""
        cache, before = self._runner.cache, self._scheduler.pool.num_blocks
        self._scheduler.resize(0, self._scheduler.seats)
        self._encoder.cache_bytes = 0 if blocks < self._watch.most else self._config.encoder_cache_bytes
        self._encoder.clear()
        self._runner.clear()
        refit(cache, sizes(blocks), self._seats)
        seats = self._config.max_num_seqs if cache.states is None else cache.states.seats
        self._watch.seats = seats
        self._scheduler.resize(cache.num_blocks, seats)
        self.claim()
        tokens = cache.num_blocks * cache.block_size
        if self._watch.late_bytes > self._late_bytes:
            self._late_bytes = self._watch.late_bytes
            logger.warning(
                "the driver's kernels take %d MiB more than planned: the KV cache shrinks to %d tokens",
                *(self._late_bytes >> 20, tokens),
            )
        elif blocks <= before:
            logger.warning("other programs need memory: the KV cache shrinks to %d tokens", tokens)
            self._watch.tell()
        else:
            logger.warning("there is memory again: the KV cache grows to %d tokens", tokens)

    def begin(self) -> None:
        """Hold the whole workspace from the first step on, in the thread of all steps.

        Before it comes what cuBLAS works in, which torch gives it once a thread, for good: in the middle of
        the workspace it would leave two halves.
        """
        device = self._runner.model.device
        if device.type == "cuda":
            one = torch.ones(1, 1, dtype=self._runner.model.dtype, device=device)
            torch.mm(one, one)
        self.claim()

    def claim(self) -> None:
        """Hold the workspace in one piece, of which torch's allocator cuts what steps need.

        Pieces of their own for every size would leave holes that no other size fits into, and be asked for
        when somebody else has taken the memory: at the start, and after all went back to the driver.
        """
        device = self._runner.model.device
        if device.type != "cuda":
            return
        small = SMALL_BYTES + (0 if self._runner.cache.states is None else STATES_SMALL_BYTES)
        missing = self._watch.missing_bytes(self._scheduler.pool.num_blocks, pooled_bytes()) - small
        if missing <= 0:
            return
        try:
            torch.empty(missing, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return  # what is needed of it is asked for when it is needed
