"""What the engine allocates for sequences, once: keys and values by blocks, recurrent states by seats."""

from snugvl.config import EngineConfig
from snugvl.layers.kv_cache import KVCache
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
        dtype=model.dtype,
        device=model.device,
        states=_states(model, config.max_num_seqs),
    )


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
