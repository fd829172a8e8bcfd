"""Rotary settings of `config.json`: which scaling, with which numbers. Equal to transformers'.

What changes with the length of a conversation ("dynamic") is refused: a prefix that is in the cache would
have been rotated by other frequencies than what follows. LongRoPE is run within its original context.

Source: Hugging Face transformers, `modeling_rope_utils.py` (Apache-2.0).
"""

import math
from typing import Any

from snugvl.checkpoint.architecture import (
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Rope,
    RopeScaling,
    YarnScaling,
)
from snugvl.checkpoint.configs.shared import require, rope_values, theta_of
from snugvl.checkpoint.section import Section, shown
from snugvl.errors import CheckpointError, UnsupportedModel

DEFAULT_THETA = 10000.0
SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")


def read_rope(section: Section, head_dim: int, *, partial: bool = False) -> Rope:
    """Plain rotary positions, scaled or not. `partial`: whether the family may rotate a part of a head.

    Raises:
        CheckpointError: a number is missing or nonsense.
        UnsupportedModel: a scaling that this engine doesn't run.
    """
    values = Section(rope_values(section), f"{section.where}: rotary settings")
    share = values.values.get("partial_rotary_factor", section.values.get("partial_rotary_factor"))
    share = 1.0 if share is None else _number(share, "partial_rotary_factor", section.where)
    if not partial and share != 1.0:
        raise UnsupportedModel(
            f"{section.where} has partial_rotary_factor {share:g}; this family rotates whole heads"
        )
    dims = int(head_dim * share) if abs(share) < 1000 else 0
    require(
        dims > 0 and dims % 2 == 0 and dims <= head_dim,
        section.where,
        f"partial_rotary_factor {share:g} of head_dim {head_dim} rotates {dims} values, which is no "
        "even number of them",
    )
    theta = theta_of(section, values.values, DEFAULT_THETA)
    return Rope(theta, dims, scaling=_scaling(section, values, dims))


def read_limit(section: Section, rope: Rope, positions: int) -> int:
    """Tokens that our engine runs: `positions`, but for LongRoPE those it was trained with first.

    The catalogue's configurations have no rotary settings; there the number of Phi-3's own field says it.
    """
    named = section.values.get("original_max_position_embeddings") is not None
    long = isinstance(rope.scaling, LongRope) or (rope.scaling is None and named)
    return min(positions, _original(section)) if long else positions


def kind_of(section: Section) -> str:
    """The name of the scaling; "su" is what Phi-3's first files call LongRoPE."""
    values = rope_values(section)
    kind = str(values.get("rope_type") or values.get("type") or "default")
    return "longrope" if kind == "su" else kind


def _scaling(section: Section, values: Section, dims: int) -> RopeScaling | None:
    match kind_of(section):
        case "default":
            return None
        case "linear":
            return LinearScaling(_positive(values, "factor"))
        case "llama3":
            low, high = _positive(values, "low_freq_factor"), _positive(values, "high_freq_factor")
            require(
                low < high, values.where, f"low_freq_factor {low:g} is not below high_freq_factor {high:g}"
            )
            return Llama3Scaling(_positive(values, "factor"), low, high, _original(section))
        case "yarn":
            return _yarn(section, values)
        case "longrope":
            return _longrope(section, values, dims)
        case other:
            raise UnsupportedModel(
                f"{section.where} asks for {shown(other)} rotary scaling; "
                f"our engine runs {', '.join(SCALINGS)}"
            )


def _yarn(section: Section, values: Section) -> YarnScaling:
    if values.values.get("mscale") or values.values.get("mscale_all_dim"):
        raise UnsupportedModel(f"{values.where} has mscale; our own engine runs YaRN without it")
    original = _original(section)
    factor = _positive(values, "factor", section.count("max_position_embeddings", original) / original)
    magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return YarnScaling(
        factor=factor,
        original=original,
        fast=_positive(values, "beta_fast", 32.0),
        slow=_positive(values, "beta_slow", 1.0),
        truncate=values.get("truncate", bool, True),
        magnitude=_positive(values, "attention_factor", magnitude),
    )


def _longrope(section: Section, values: Section, dims: int) -> LongRope:
    factors = values.get("short_factor", list)
    require(
        len(factors) == dims // 2,
        values.where,
        f"short_factor has {len(factors)} numbers for {dims // 2} frequencies",
    )
    divisors = tuple(_number(each, "short_factor", values.where) for each in factors)
    require(all(each > 0 for each in divisors), values.where, "short_factor has numbers that aren't positive")
    original = _original(section)
    factor = _positive(values, "factor", section.count("max_position_embeddings") / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(divisors, _positive(values, "attention_factor", magnitude))


def _original(section: Section) -> int:
    """Tokens of the context before scaling; Phi-3 writes it beside the rotary settings."""
    key = "original_max_position_embeddings"
    if section.values.get(key) is not None:
        return section.count(key)
    inside = Section(rope_values(section), f"{section.where}: rotary settings")
    return inside.count(key, section.count("max_position_embeddings"))


def _positive(values: Section, key: str, default: float | None = None) -> float:
    number: float = values.get(key, float, default)
    require(math.isfinite(number) and number > 0, values.where, f"{key} {number:g} is not a positive number")
    return number


def _number(value: Any, key: str, where: str) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # JSON has whole numbers that no float holds
        pass
    raise CheckpointError(f"{where} has {key} {shown(value)}, expected a number")
