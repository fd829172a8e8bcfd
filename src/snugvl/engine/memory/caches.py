"""What the engine allocates for sequences: keys and values by blocks, recurrent states by seats."""

from collections.abc import Iterable

import torch

from snugvl.config import EngineConfig
from snugvl.engine.memory.shortage import release
from snugvl.layers.kv_cache import E4M3, KVCache
from snugvl.layers.state_cache import StateCache
from snugvl.models.batch import Network


def allocate(model: Network, config: EngineConfig) -> KVCache:
    """The cache of a model. Layers of linear attention have no keys and values, and others no state."""
    text = model.config.text
    return KVCache(
        num_layers=text.kv_layers,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        dtype=E4M3 if config.kv_cache == "fp8" else model.dtype,
        device=model.device,
        states=_states(model, config.max_num_seqs),
    )


def refit(cache: KVCache, sizes: Iterable[int], seats: int) -> None:
    """Give a cache the first number of blocks that there is memory for, or none; all of them empty.

    States of so many `seats` come before them, or of one, or of none where not even that is to be had.

    What it had goes back to the driver before, so nothing may hold views of it, a CUDA graph neither.
    """
    device = cache.storage.device
    cache.resize(0)
    if cache.states is not None and seats != cache.states.seats:
        cache.states.resize(0)
    release(device)
    if cache.states is not None and not cache.states.seats and not _seated(cache.states, seats):
        return
    for size in sizes:
        try:
            cache.resize(size)
        except torch.OutOfMemoryError:
            continue
        return


def seat_bytes(cache: KVCache) -> int:
    """Of one sequence's recurrent state."""
    return 0 if cache.states is None else cache.states.nbytes // (cache.states.seats + 1)


def _seated(states: StateCache, seats: int) -> bool:
    """Whether there is memory for some of the seats."""
    for count in (seats, 1):
        try:
            states.resize(count)
        except torch.OutOfMemoryError:
            continue
        return True
    return False


def _states(model: Network, seats: int) -> StateCache | None:
    text, linear = model.config.text, model.config.text.linear
    if linear is None:
        return None
    return StateCache(
        num_layers=text.num_layers - text.kv_layers,
        seats=seats,
        heads=(linear.value_heads, linear.key_dim, linear.value_dim),
        inputs=(linear.kernel - 1, linear.channels),
        dtype=model.dtype,
        device=model.device,
    )
