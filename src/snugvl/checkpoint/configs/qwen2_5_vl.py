"""Qwen2.5-VL. The defaults are those of transformers' `Qwen2_5_VLConfig`.

Files of before transformers 4.52, and so the Hub's, have the decoder's fields at the top level.
"""

from snugvl.checkpoint.architecture import LayerKind, ModelConfig, Rope, TextConfig, VisionConfig
from snugvl.checkpoint.configs.qwen3_vl import read_tokens
from snugvl.checkpoint.configs.shared import (
    check_heads,
    dtype_of,
    quantization_of,
    require,
    rope_values,
    theta_of,
    vision_theta_of,
)
from snugvl.checkpoint.section import MAX_LAYERS, Section, shown
from snugvl.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)
THETA, VISION_THETA = 1e6, 1e4


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read the configuration of a Qwen2.5-VL.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a quantisation or a variant that this engine doesn't run.
    """
    text = root.section("text_config") if root.values.get("text_config") else root
    vision = root.section("vision_config")
    config = ModelConfig(
        architecture=architecture,
        text=_text(text),
        vision=_vision(vision),
        vision_tokens=read_tokens(root),
        # Either place counts; in a flat file they are the same one.
        tie_word_embeddings=any(part.get("tie_word_embeddings", bool, False) for part in (root, text)),
        dtype=dtype_of(root, text),
        quantization=quantization_of(root),
    )
    _check(config, text.where, vision.where)
    return config


def _text(section: Section) -> TextConfig:
    if section.get("use_sliding_window", bool, False):
        raise UnsupportedModel(
            f"{section.where} has use_sliding_window true; only false, as published, is supported"
        )
    act = section.values.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModel(f"{section.where} has hidden_act {shown(act)}; only 'silu' is supported")
    heads, hidden, layers = (
        section.count(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    section.count("num_hidden_layers", most=MAX_LAYERS)
    dim = section.count("head_dim", hidden // heads)
    full: LayerKind = "full"
    return TextConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=section.count("num_key_value_heads", heads),
        head_dim=dim,
        intermediate_size=section.count("intermediate_size"),
        vocab_size=section.count("vocab_size"),
        max_position_embeddings=section.count("max_position_embeddings"),
        rms_norm_eps=section.get("rms_norm_eps", float, 1e-5),
        rope=_rope(section, dim),
        kinds=(full,) * layers,
        qkv_bias=True,
    )


def _rope(section: Section, dim: int) -> Rope:
    """Older files say "type": "mrope"."""
    values = rope_values(section)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise UnsupportedModel(
            f"{section.where} asks for {shown(kind)} rotary scaling; only 'default' is supported"
        )
    sections = values.get("mrope_section", [16, 24, 24])
    if not (
        isinstance(sections, list)
        and len(sections) == 3
        and all(isinstance(n, int) and n >= 0 for n in sections)
    ):
        raise CheckpointError(f"{section.where} has mrope_section {shown(sections)}, expected three counts")
    theta = theta_of(section, values, THETA)
    return Rope(theta, dim, (sections[0], sections[1], sections[2]))


def _vision(section: Section) -> VisionConfig:
    act = section.get("hidden_act", str, "silu")
    if act != "silu":
        raise UnsupportedModel(f"{section.where} has hidden_act {shown(act)}; only 'silu' is supported")
    blocks = section.get("fullatt_block_indexes", list, [7, 15, 23, 31])
    if not all(isinstance(n, int) for n in blocks):
        raise CheckpointError(
            f"{section.where} has fullatt_block_indexes {shown(blocks)}, expected block numbers"
        )
    patch, merge = section.count("patch_size", 14), section.count("spatial_merge_size", 2)
    window = section.count("window_size", 112)
    require(
        window % (patch * merge) == 0,
        section.where,
        f"window_size {window} is no multiple of patch_size {patch} x spatial_merge_size {merge}",
    )
    return VisionConfig(
        depth=section.count("depth", 32, most=MAX_LAYERS),
        hidden_size=section.count("hidden_size", 3584),
        intermediate_size=section.count("intermediate_size", 3420),
        num_heads=section.count("num_heads", 16),
        in_channels=section.count("in_channels", 3),
        patch_size=patch,
        temporal_patch_size=section.count("temporal_patch_size", 2),
        spatial_merge_size=merge,
        out_hidden_size=section.count("out_hidden_size", 3584),
        num_position_embeddings=0,
        deepstack_layers=(),
        hidden_act=act,
        rope_theta=vision_theta_of(section, VISION_THETA),
        window=window // patch,
        full_blocks=tuple(blocks),
        tokens_per_second=section.count("tokens_per_second", 4),
    )


def _check(config: ModelConfig, text_where: str, vision_where: str) -> None:
    text, vision = config.text, config.vision
    assert vision is not None
    sections = text.rope.sections or (0, 0, 0)
    check_heads(text, text_where)
    require(
        2 * sum(sections) == text.head_dim,
        text_where,
        f"mrope_section {list(sections)} does not sum to half of head_dim {text.head_dim}",
    )
    require(
        vision.hidden_size % (4 * vision.num_heads) == 0,
        vision_where,
        f"hidden_size {vision.hidden_size} is no multiple of 4 x num_heads {vision.num_heads}",
    )
    require(
        vision.out_hidden_size == text.hidden_size,
        vision_where,
        f"out_hidden_size {vision.out_hidden_size} differs from the text's hidden_size {text.hidden_size}",
    )
    require(
        all(0 <= block < vision.depth for block in vision.full_blocks),
        vision_where,
        f"fullatt_block_indexes {list(vision.full_blocks)} name blocks beyond {vision.depth - 1}",
    )
