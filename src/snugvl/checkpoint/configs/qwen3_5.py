"""Dense Qwen3.5. The defaults are those of transformers' `Qwen3_5Config`.

Three layers of linear attention to one of gated full attention; norms are stored as their distance from 1; a
quarter of each head is rotated; the tower is Qwen3-VL's, without deepstack levels.
"""

from typing import Any

from snugvl.checkpoint.architecture import (
    LayerKind,
    LinearAttention,
    ModelConfig,
    Rope,
    TextConfig,
    VisionTokens,
)
from snugvl.checkpoint.configs.qwen3_vl import check_vision, read_vision
from snugvl.checkpoint.configs.shared import (
    check_heads,
    dtype_of,
    quantization_of,
    require,
    rope_values,
    ties,
)
from snugvl.checkpoint.section import MAX_LAYERS, Section, shown
from snugvl.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = ("Qwen3_5ForConditionalGeneration",)
_KINDS: dict[str, LayerKind] = {"linear_attention": "linear", "full_attention": "full"}


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read the configuration of a dense Qwen3.5.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a quantisation or a variant that this engine doesn't run.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    tower = Section({**vision.values, "deepstack_visual_indexes": []}, vision.where)
    config = ModelConfig(
        architecture=architecture,
        text=_text(text),
        vision=read_vision(tower),
        vision_tokens=VisionTokens(
            image=root.get("image_token_id", int, 248056),
            video=root.get("video_token_id", int, 248057),
            start=root.get("vision_start_token_id", int, 248053),
            end=root.get("vision_end_token_id", int, 248054),
        ),
        tie_word_embeddings=ties(root, text),
        dtype=dtype_of(root, text),
        quantization=quantization_of(root),
    )
    assert config.vision is not None
    _check(config.text, root.where)
    check_vision(config.vision, config.text, root.where)
    return config


def _text(section: Section) -> TextConfig:
    for key, only in (("hidden_act", "silu"), ("attn_output_gate", True)):
        value: Any = section.values.get(key, only)
        if value != only:
            raise UnsupportedModel(f"{section.where} has {key} {shown(value)}; only {only!r} is supported")
    heads, layers = section.count("num_attention_heads"), section.count("num_hidden_layers", most=MAX_LAYERS)
    dim = section.count("head_dim", 256)
    bias = section.get("attention_bias", bool, False)
    return TextConfig(
        hidden_size=section.count("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=section.count("num_key_value_heads", heads),
        head_dim=dim,
        intermediate_size=section.count("intermediate_size"),
        vocab_size=section.count("vocab_size"),
        max_position_embeddings=section.count("max_position_embeddings"),
        rms_norm_eps=section.get("rms_norm_eps", float, 1e-6),
        rope=_rope(section, dim),
        kinds=_kinds(section, layers),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        linear=LinearAttention(
            key_heads=section.count("linear_num_key_heads", 16),
            value_heads=section.count("linear_num_value_heads", 32),
            key_dim=section.count("linear_key_head_dim", 128),
            value_dim=section.count("linear_value_head_dim", 128),
            kernel=section.count("linear_conv_kernel_dim", 4),
        ),
        gated=True,
        norm_offset=1.0,
    )


def _rope(section: Section, head_dim: int) -> Rope:
    values = rope_values(section)
    kind = values.get("rope_type", "default")
    if kind not in ("default", "mrope"):
        raise UnsupportedModel(
            f"{section.where} asks for {shown(kind)} rotary scaling; only 'default' is supported"
        )
    if values.get("mrope_interleaved") is False:
        raise UnsupportedModel(f"{section.where} has mrope_interleaved false; Qwen3.5 interleaves")
    sections = values.get("mrope_section", [11, 11, 10])
    if not (
        isinstance(sections, list)
        and len(sections) == 3
        and all(isinstance(n, int) and n >= 0 for n in sections)
    ):
        raise CheckpointError(f"{section.where} has mrope_section {shown(sections)}, expected three counts")
    share = Section({**section.values, **values}, section.where).get("partial_rotary_factor", float, 0.25)
    theta = Section({**section.values, **values}, section.where).get("rope_theta", float, 10000.0)
    dims = int(head_dim * share) if 0 < share < head_dim else 0
    require(
        0 < dims <= head_dim,
        section.where,
        f"partial_rotary_factor {share} leaves {dims} of {head_dim} values to rotate",
    )
    return Rope(theta, dims, (sections[0], sections[1], sections[2]), interleaved=True)


def _kinds(section: Section, layers: int) -> tuple[LayerKind, ...]:
    interval = section.count("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)]
    names = section.get("layer_types", list, default)
    unknown = [name for name in names if not isinstance(name, str) or name not in _KINDS]
    if len(names) != layers or unknown:
        raise CheckpointError(
            f"{section.where} has {len(names)} layer_types for {layers} layers"
            + (f", of an unknown kind {shown(unknown[0])}" if unknown else "")
        )
    return tuple(_KINDS[name] for name in names)


def _check(text: TextConfig, where: str) -> None:
    check_heads(text, where)
    sections = text.rope.sections or (0, 0, 0)
    require(
        2 * sum(sections) == text.rope.dims,
        where,
        f"mrope_section {list(sections)} does not sum to half of the {text.rope.dims} rotated values",
    )
    linear = text.linear
    assert linear is not None
    require(
        linear.value_heads % linear.key_heads == 0,
        where,
        f"linear_num_value_heads {linear.value_heads} is no multiple of "
        f"linear_num_key_heads {linear.key_heads}",
    )
    require(text.kv_layers > 0, where, "no layer has full attention")
