"""Rotary settings of `config.json`: which frequencies, which scaling. Equal to transformers'.

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
from snugvl.checkpoint.section import Section, finite, shown
from snugvl.errors import CheckpointError, UnsupportedModel

DEFAULT_THETA = 10000.0
SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")


def read_rope(section: Section, head_dim: int, *, partial: bool = False) -> Rope:
    """Read plain rotary positions, scaled or not. `partial`: whether the family may rotate a part of a head.

    Raises:
        CheckpointError: a number is missing or nonsense.
        UnsupportedModel: a scaling that this engine doesn't run.
    """
    values = _settings(section)
    share = _share(section, values, 1.0)
    if not partial and share != 1.0:
        raise UnsupportedModel(
            f"{section.where} has partial_rotary_factor {share:g}; this family rotates whole heads"
        )
    dims = int(head_dim * share) if abs(share) < 1000 else 0
    section.require(
        dims > 0 and dims % 2 == 0 and dims <= head_dim,
        f"partial_rotary_factor {share:g} of head_dim {head_dim} rotates {dims} values, which is no "
        "even number of them",
    )
    return Rope(_theta(section, values, DEFAULT_THETA), dims, scaling=_scaling(section, values, dims))


def read_mrope(
    section: Section,
    head_dim: int,
    sections: tuple[int, int, int],
    theta: float | None,
    *,
    share: float | None = None,
    interleaved: bool = True,
) -> Rope:
    """Read rotary positions on three axes (M-RoPE).

    Args:
        sections, theta: transformers' defaults where the file has none; None: the file must have it.
        share: default of the part of a head that is rotated; None: this family rotates whole heads.
        interleaved: whether the family's sections alternate.

    Raises:
        CheckpointError: the sections are not three counts, or don't sum to half of what is rotated.
        UnsupportedModel: a scaling, or another order of the sections.
    """
    values, where = _settings(section), section.where
    kind = _kind(values)
    if kind not in ("default", "mrope"):  # older files of Qwen2.5-VL say "mrope"
        raise UnsupportedModel(f"{where} asks for {shown(kind)} rotary scaling; only 'default' is supported")
    if interleaved and values.values.get("mrope_interleaved") is False:
        raise UnsupportedModel(f"{where} has mrope_interleaved false; only true, as published, is supported")
    counts: Any = values.values.get("mrope_section", list(sections))
    if not (
        isinstance(counts, list)
        and len(counts) == 3
        and all(isinstance(count, int) and count >= 0 for count in counts)
    ):
        raise CheckpointError(f"{where} has mrope_section {shown(counts)}, expected three counts")
    dims, whole = head_dim, f"head_dim {head_dim}"
    if share is not None:
        share = _share(section, values, share)
        dims = int(head_dim * share) if 0 < share < head_dim else 0
        whole = f"the {dims} rotated values"
        left = f"partial_rotary_factor {share} leaves {dims} of {head_dim} values to rotate"
        section.require(0 < dims <= head_dim, left)
    section.require(2 * sum(counts) == dims, f"mrope_section {shown(counts)} does not sum to half of {whole}")
    first, second, third = counts
    return Rope(_theta(section, values, theta), dims, (first, second, third), interleaved)


def read_vision_theta(section: Section) -> float:
    """Read the base of a vision tower's rotary frequencies."""
    values = Section(section.get("rope_parameters", dict, {}), f"{section.where}: rotary settings")
    return _theta(Section({}, section.where), values, DEFAULT_THETA)


def read_limit(section: Section, rope: Rope, positions: int) -> int:
    """Number of tokens that our engine runs: `positions`, but for LongRoPE its original context.

    The catalogue's configurations have no rotary settings; there Phi-3's own field has the number.
    """
    named = section.values.get("original_max_position_embeddings") is not None
    long = isinstance(rope.scaling, LongRope) or (rope.scaling is None and named)
    return min(positions, _original(section, _settings(section))) if long else positions


def _settings(section: Section) -> Section:
    """The rotary settings: rope_parameters, or rope_scaling of transformers before 5."""
    rope = section.values.get("rope_parameters") or section.values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{section.where} has rope settings {shown(rope)}, expected an object")
    return Section(rope, f"{section.where}: rotary settings")


def _theta(section: Section, values: Section, default: float | None) -> float:
    """The base of the frequencies, from the rotary settings or from beside them."""
    place = values if values.values.get("rope_theta") else section
    theta: float = place.get("rope_theta", float, default)
    place.require(theta > 0, f"rope_theta {theta:g} is not a positive number")
    return theta


def _share(section: Section, values: Section, default: float) -> float:
    key = "partial_rotary_factor"
    share = values.values.get(key, section.values.get(key))
    return default if share is None else _number(share, key, section.where)


def _kind(values: Section) -> str:
    """The name of the scaling; Phi-3's first files call LongRoPE "su"."""
    kinds = (values.values.get("rope_type"), values.values.get("type"))
    kind = str(next((each for each in kinds if each is not None), "default"))
    return "longrope" if kind == "su" else kind


def _scaling(section: Section, values: Section, dims: int) -> RopeScaling | None:
    match _kind(values):
        case "default":
            return None
        case "linear":
            return LinearScaling(_positive(values, "factor"))
        case "llama3":
            low, high = _positive(values, "low_freq_factor"), _positive(values, "high_freq_factor")
            values.require(low < high, f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
            return Llama3Scaling(_positive(values, "factor"), low, high, _original(section, values))
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
    original = _original(section, values)
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
    values.require(
        len(factors) == dims // 2, f"short_factor has {len(factors)} numbers for {dims // 2} frequencies"
    )
    divisors = tuple(_number(each, "short_factor", values.where) for each in factors)
    values.require(all(each > 0 for each in divisors), "short_factor has numbers that aren't positive")
    original = _original(section, values)
    factor = _positive(values, "factor", section.count("max_position_embeddings") / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(divisors, _positive(values, "attention_factor", magnitude))


def _original(section: Section, values: Section) -> int:
    """Tokens of the context before scaling; Phi-3 writes it beside the rotary settings."""
    key = "original_max_position_embeddings"
    if section.values.get(key) is not None:
        return section.count(key)
    return values.count(key, section.count("max_position_embeddings"))


def _positive(values: Section, key: str, default: float | None = None) -> float:
    number: float = values.get(key, float, default)
    values.require(math.isfinite(number) and number > 0, f"{key} {number:g} is not a positive number")
    return number


def _number(value: Any, key: str, where: str) -> float:
    number = finite(value)
    if number is None:
        raise CheckpointError(f"{where} has {key} {shown(value)}, expected a number")
    return number
