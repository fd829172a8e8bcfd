"""Rows of a `DynamicCache`: joined, picked, shortened. What a batch needs for rows to come and go.

    columns →  0 … … … … … T          rows are aligned at the right: a shorter one has zeros at the left,
    row 0      k k k k k k k          which the attention mask hides
    row 1      · · · k k k k
    row 2      · k k k k k k

Only layers whose tensors we know are touched (`joinable`): full attention, sliding windows, and linear
attention, whose states have no columns. A cache with any other layer belongs to one row.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, LinearAttentionLayer

# By name: older versions lack some of them.
_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")


def joinable(cache: object) -> bool:
    """Whether rows of this cache may be joined and picked."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer).__name__ in _KNOWN for layer in cache.layers)
    )


def join(cache: Any, other: Any, columns: int) -> None:
    """Put the rows of `other` below those of `cache`. `columns`: of the longer one; `other` is used up."""
    for ours, theirs in zip(cache.layers, other.layers, strict=True):
        if isinstance(ours, LinearAttentionLayer):
            _join_states(ours, theirs)
        elif ours.keys is not None and theirs.keys is not None:
            length = columns
            if isinstance(ours, DynamicSlidingWindowLayer):
                ours.cumulative_length = columns
                length = min(columns, ours.sliding_window - 1)
            ours.keys = torch.cat([_widened(ours.keys, length), _widened(theirs.keys, length)])
            ours.values = torch.cat([_widened(ours.values, length), _widened(theirs.values, length)])
            theirs.keys = theirs.values = None  # layer by layer, so that both are never held twice


def pick(cache: Any, rows: list[int]) -> None:
    """Keep `rows`, in this order; one may be named several times."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            for states in (layer.conv_states, layer.recurrent_states):
                states |= {i: state[rows] for i, state in states.items() if state is not None}
        elif layer.keys is not None:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def shorten(cache: Any, columns: int) -> None:
    """Drop the first `columns`, which no row uses."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer) or layer.keys is None:
            continue
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= columns
            cut = max(layer.keys.shape[-2] - layer.cumulative_length, 0)
        else:
            cut = columns
        if cut:  # copied: a view would keep what was dropped
            layer.keys = layer.keys[..., cut:, :].clone()
            layer.values = layer.values[..., cut:, :].clone()


def cache_bytes(cache: object) -> int:
    """Bytes that a cache of any kind holds."""
    return sum(tensor.nbytes for tensor in _tensors(cache))


def _join_states(ours: Any, theirs: Any) -> None:
    for mine, yours in (
        (ours.conv_states, theirs.conv_states),
        (ours.recurrent_states, theirs.recurrent_states),
    ):
        mine |= {i: torch.cat([state, yours[i]]) for i, state in mine.items() if state is not None}


def _widened(states: torch.Tensor, length: int) -> torch.Tensor:
    """`[rows, heads, tokens, head_dim]` with zeros before the tokens, `length` in all."""
    return pad(states, (0, 0, length - states.shape[-2], 0))


def _tensors(cache: object) -> Iterator[torch.Tensor]:
    """Every tensor inside, each once."""
    seen: set[int] = set()
    stack = [cache]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        elif type(item).__module__.startswith("transformers.") and hasattr(item, "__dict__"):
            stack += vars(item).values()
