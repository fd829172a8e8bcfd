"""vLLM's pool of KV blocks: how large a block is, and how many a sequence takes.

Read in vLLM 0.32, `v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py` and `platforms/interface.py`, and
checked against published logs (`benchmarks/published_vllm.py`). Layers of a kind (full attention, a window,
recurrent states) are dealt into groups of equally many layers, and every group takes blocks of one pool:

    layers of a group   the rarest kind's layers; the commonest's where those are fewer than 1.5 times as many
    block               layers of a group · page of a layer
    page                tokens of a block · 2 · kv_heads · head_dim · bytes
    tokens of a block   16; with states the next multiple of 16 whose page holds a layer's states, which are
                        padded to it: 528 for Qwen3.5-4B and -9B, 544 for -2B

A sequence of `context` tokens takes, of every group:

    full attention      ⌈context / tokens of a block⌉
    window              ⌈min(window - 1 + tokens in flight, context) / tokens of a block⌉ + 1
    states              2 with prefix caching (vLLM's default: the running state and the last one that can be
                        shared), 1 without

Tokens in flight are those of two steps, as scheduling overlaps with the step that runs. The log's "GPU KV
cache size" is context · blocks / blocks of a sequence; before 0.21 or so it was blocks / groups · tokens of a
block.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import BLOCK_TOKENS, Settings

ASYNC_STEPS: Final = 2
STATES_WITH_PREFIX_CACHE: Final = 2
SIMILAR: Final = 1.5  # kinds with fewer than so many times the rarest's layers are filled up, not split


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that take blocks together. `window`: tokens they look back, or None; `states`: recurrent."""

    window: int | None
    states: bool


@dataclass(frozen=True, slots=True)
class Pages:
    """The pool of one GPU.

    Attributes:
        block_tokens: tokens of a block of attention.
        block_bytes: bytes of a block, for all layers of a group.
        groups: each takes blocks of its own for a sequence.
    """

    block_tokens: int
    block_bytes: int
    groups: tuple[Group, ...]

    def blocks(self, context: int, batched_tokens: int, states: int = STATES_WITH_PREFIX_CACHE) -> int:
        """Blocks that vLLM keeps ready for one sequence of `context` tokens.

        `batched_tokens`: `max_num_batched_tokens`; `states`: blocks of a group with states.
        """
        return sum(self._blocks(group, context, batched_tokens, states) for group in self.groups)

    def _blocks(self, group: Group, context: int, batched_tokens: int, states: int) -> int:
        if group.states:
            return states
        if group.window is None:
            return -(-context // self.block_tokens)
        seen = min(group.window - 1 + ASYNC_STEPS * batched_tokens, context)
        return -(-seen // self.block_tokens) + 1

    def logged_tokens(self, pool_bytes: int, context: int, blocks: int) -> int:
        """The log's "GPU KV cache size" of a pool. `blocks`: of one sequence of `context` tokens."""
        return pool_bytes // self.block_bytes * context // blocks


def pages(model: Inventory, settings: Settings) -> Pages:
    """The pool's layout for `settings`."""
    return _pages(
        model,
        settings.kv_itemsize,
        settings.itemsize,
        settings.tensor_parallel,
        settings.pipeline_parallel,
    )


@lru_cache(maxsize=256)
def _pages(model: Inventory, kv_itemsize: int, itemsize: int, gpus: int, stages: int) -> Pages:
    kinds: dict[Group, int] = {}
    token = state = 0
    for layer, count in model.kv_layers:
        group = Group(layer.window, states=layer.recurrent)
        kinds[group] = kinds.get(group, 0) + -(-count // stages)
        token = max(token, layer.token_values(gpus) * kv_itemsize)
        state = max(state, -(-layer.state(itemsize) // gpus))
    rarest, commonest = min(kinds.values()), max(kinds.values())
    layers = commonest if commonest < SIMILAR * rarest else rarest
    groups = tuple(group for group, count in kinds.items() for _ in range(-(-count // layers)))
    if not token:  # states alone
        return Pages(BLOCK_TOKENS, layers * state, groups)
    block_tokens = BLOCK_TOKENS * max(1, -(-state // (BLOCK_TOKENS * token)))
    return Pages(block_tokens, layers * block_tokens * token, groups)


def sequence_bytes(model: Inventory, settings: Settings, tokens: int) -> int:
    """What one sequence of `tokens` tokens takes of the pool."""
    pool = pages(model, settings)
    return pool.blocks(tokens, settings.chunk) * pool.block_bytes
