"""Widths of a model's vectors, which the formulas are written in."""

from dataclasses import dataclass
from functools import lru_cache

from snugvl.planner.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of the decoder's vectors, in values."""

    h: int
    i: int
    q: int
    k: int
    d: int
    heads: int


@lru_cache(maxsize=256)
def widths(model: Inventory) -> Widths:
    """The widest layer counts: Gemma 3's and hybrids' layers differ."""
    text = model.facts.text
    layer = max((layer for layer, _ in model.kv_layers), key=lambda layer: layer.kv_heads * layer.head_dim)
    return Widths(
        text.hidden_size,
        text.intermediate_size,
        text.num_heads * layer.head_dim,
        layer.kv_heads * layer.head_dim,
        layer.head_dim,
        text.num_heads,
    )
