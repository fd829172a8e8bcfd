"""What the configurations of several families say in the same words."""

from collections.abc import Mapping
from typing import Any

from snugvl.checkpoint.architecture import Fp8Blocks, PackedInt4, TextConfig
from snugvl.checkpoint.configs.ready_made import read_awq, read_compressed, read_gptq
from snugvl.checkpoint.section import Section, shown
from snugvl.errors import CheckpointError, UnsupportedModel


def require(right: bool, where: str, problem: str) -> None:
    """Refuse contradictions here, with both numbers, instead of as a shape error deep in the network."""
    if not right:
        raise CheckpointError(f"{where}: {problem}")


def check_heads(text: TextConfig, where: str) -> None:
    """Queries share keys in equal groups."""
    require(
        text.num_heads % text.num_kv_heads == 0,
        where,
        f"num_attention_heads {text.num_heads} is no multiple of num_key_value_heads {text.num_kv_heads}",
    )


def rope_values(section: Section) -> dict[str, Any]:
    """transformers < 5 writes rope_scaling and rope_theta, later versions rope_parameters."""
    rope = section.values.get("rope_parameters") or section.values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{section.where} has rope settings {shown(rope)}, expected an object")
    return rope


def theta_of(section: Section, rope: Mapping[str, Any], default: float | None = None) -> float:
    """The base of the frequencies, from the rotary settings or from beside them."""
    inside = bool(rope.get("rope_theta"))
    where = Section(rope, f"{section.where}: rotary settings") if inside else section
    theta: float = where.get("rope_theta", float, default)
    require(theta > 0, where.where, f"rope_theta {theta:g} is not a positive number")
    return theta


def vision_theta_of(section: Section, default: float) -> float:
    """The same of a vision tower."""
    rope: dict[str, Any] = section.get("rope_parameters", dict, {})
    return theta_of(Section({}, section.where), rope, default)


def dtype_of(root: Section, text: Section) -> str:
    """What the weights were saved as, by the name the file calls it."""
    values = (root.values.get("dtype"), text.values.get("dtype"), root.values.get("torch_dtype"))
    return str(next((value for value in values if value), "bfloat16"))


def ties(root: Section, text: Section) -> bool:
    """Whether lm_head is the embedding. transformers ≥ 5 reads the top level; older files the text's."""
    tied: bool = root.get("tie_word_embeddings", bool, text.values.get("tie_word_embeddings", False))
    return tied


def quantization_of(root: Section) -> Fp8Blocks | PackedInt4 | None:
    """The official FP8 layout, a ready-made 4-bit one, or None for plain weights.

    Raises:
        UnsupportedModel: another quantisation.
    """
    values = root.values.get("quantization_config") or root.values.get("compression_config")
    if values is None:
        return None
    section = Section(values, f"{root.where}: quantization_config")
    method = section.get("quant_method", str)
    if method == "awq":
        return read_awq(section)
    if method == "gptq":
        return read_gptq(section)
    if method in ("compressed-tensors", "compressed_tensors"):
        return read_compressed(section)
    block = section.values.get("weight_block_size")
    if method != "fp8" or not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) for n in block)
    ):
        raise UnsupportedModel(
            f"{section.where} is {shown(method)} with weight_block_size {shown(block)}; this version "
            "reads bf16, fp16, fp32, the official FP8 checkpoints with 128x128 blocks, AWQ, GPTQ and "
            "compressed-tensors"
        )
    return Fp8Blocks(rows=block[0], columns=block[1])
