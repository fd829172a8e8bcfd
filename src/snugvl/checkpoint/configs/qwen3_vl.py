"""Dense Qwen3-VL. The defaults are those of transformers' `Qwen3VLConfig`."""

from snugvl.checkpoint.architecture import (
    LayerKind,
    ModelConfig,
    Rope,
    TextConfig,
    VisionConfig,
    VisionTokens,
)
from snugvl.checkpoint.configs.shared import (
    check_heads,
    dtype_of,
    quantization_of,
    require,
    rope_values,
    theta_of,
    ties,
    vision_theta_of,
)
from snugvl.checkpoint.section import MAX_LAYERS, Section, shown
from snugvl.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read the configuration of a dense Qwen3-VL.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a quantisation or a variant that this engine doesn't run.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    config = ModelConfig(
        architecture=architecture,
        text=_text(text),
        vision=read_vision(vision),
        vision_tokens=read_tokens(root),
        tie_word_embeddings=ties(root, text),
        dtype=dtype_of(root, text),
        quantization=quantization_of(root),
    )
    _check(config, root.where)
    return config


def read_tokens(root: Section) -> VisionTokens:
    """The control tokens around and for pictures."""
    return VisionTokens(
        image=root.get("image_token_id", int, 151655),
        video=root.get("video_token_id", int, 151656),
        start=root.get("vision_start_token_id", int, 151652),
        end=root.get("vision_end_token_id", int, 151653),
    )


def _text(section: Section) -> TextConfig:
    rope = rope_values(section)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "mrope"):
        raise UnsupportedModel(
            f"{section.where} asks for {shown(kind)} rotary scaling; only 'default' is supported"
        )
    if rope.get("mrope_interleaved") is False:
        raise UnsupportedModel(f"{section.where} has mrope_interleaved false; Qwen3-VL interleaves")
    act = section.values.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModel(f"{section.where} has hidden_act {shown(act)}; only 'silu' is supported")
    heads, hidden = section.count("num_attention_heads"), section.count("hidden_size")
    mrope = rope.get("mrope_section", [24, 20, 20])
    if not (
        isinstance(mrope, list) and len(mrope) == 3 and all(isinstance(n, int) and n >= 0 for n in mrope)
    ):
        raise CheckpointError(f"{section.where} has mrope_section {shown(mrope)}, expected three counts")
    layers, dim = (
        section.count("num_hidden_layers", most=MAX_LAYERS),
        section.count("head_dim", hidden // heads),
    )
    theta = theta_of(section, rope)
    bias = section.get("attention_bias", bool, False)
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
        rms_norm_eps=section.get("rms_norm_eps", float, 1e-6),
        rope=Rope(theta, dim, (mrope[0], mrope[1], mrope[2]), interleaved=True),
        kinds=(full,) * layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def read_vision(section: Section) -> VisionConfig:
    """The tower of Qwen3-VL and Qwen3.5."""
    levels = section.get("deepstack_visual_indexes", list)
    if not all(isinstance(n, int) for n in levels):
        raise CheckpointError(
            f"{section.where} has deepstack_visual_indexes {shown(levels)}, expected layer numbers"
        )
    return VisionConfig(
        depth=section.count("depth", most=MAX_LAYERS),
        hidden_size=section.count("hidden_size"),
        intermediate_size=section.count("intermediate_size"),
        num_heads=section.count("num_heads"),
        in_channels=section.count("in_channels", 3),
        patch_size=section.count("patch_size", 16),
        temporal_patch_size=section.count("temporal_patch_size", 2),
        spatial_merge_size=section.count("spatial_merge_size", 2),
        out_hidden_size=section.count("out_hidden_size"),
        num_position_embeddings=section.count("num_position_embeddings", 2304),
        deepstack_layers=tuple(levels),
        hidden_act=section.get("hidden_act", str, "gelu_pytorch_tanh"),
        rope_theta=vision_theta_of(section, 10000.0),
    )


def _check(config: ModelConfig, where: str) -> None:
    text, vision = config.text, config.vision
    assert vision is not None
    sections = text.rope.sections or (0, 0, 0)
    check_heads(text, where)
    require(
        2 * sum(sections) == text.head_dim,
        where,
        f"mrope_section {list(sections)} does not sum to half of head_dim {text.head_dim}",
    )
    check_vision(vision, text, where)


def check_vision(vision: VisionConfig, text: TextConfig, where: str) -> None:
    """Refuse a tower that contradicts itself or the decoder."""
    require(
        vision.hidden_size % (4 * vision.num_heads) == 0,
        where,
        f"vision hidden_size {vision.hidden_size} is no multiple of 4 x num_heads {vision.num_heads}",
    )
    require(
        vision.out_hidden_size == text.hidden_size,
        where,
        f"vision out_hidden_size {vision.out_hidden_size} differs from the text's {text.hidden_size}",
    )
    require(
        vision.position_grid**2 == vision.num_position_embeddings,
        where,
        f"num_position_embeddings {vision.num_position_embeddings} is not a square",
    )
    require(
        all(0 <= level < vision.depth for level in vision.deepstack_layers),
        where,
        f"deepstack_visual_indexes {list(vision.deepstack_layers)} name layers beyond {vision.depth - 1}",
    )
