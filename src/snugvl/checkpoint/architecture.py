"""`config.json` as frozen, checked values.

An architecture we don't know is refused with its name; a field that is missing is named together with
the file. Nothing is guessed: the few defaults are those of Hugging Face's own Qwen3-VL configuration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugvl.checkpoint.section import Section, read_json
from snugvl.errors import CheckpointError, UnsupportedModel

SUPPORTED = ("Qwen3VLForConditionalGeneration",)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder. `mrope_section` counts rotary frequencies for time, height and width."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    attention_bias: bool

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token occupies over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. Sizes in pixels for `patch_size`, in patches for `spatial_merge_size`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_layers: tuple[int, ...]
    hidden_act: str
    rope_theta: float

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch: channels × frames × height × width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def position_grid(self) -> int:
        """Side of the square grid of learned position embeddings."""
        return math.isqrt(self.num_position_embeddings)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """The official FP8 layout: one `weight_scale_inv` per block of `rows` × `columns` weights."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the network needs to be built, as the checkpoint says it."""

    architecture: str
    text: TextConfig
    vision: VisionConfig
    tie_word_embeddings: bool
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    dtype: str
    quantization: Fp8Blocks | None

    @property
    def encoder_width(self) -> int:
        """Values the vision encoder hands over per image token: its output and each deepstack level."""
        return self.text.hidden_size * (1 + len(self.vision.deepstack_layers))


def read_config(folder: Path) -> ModelConfig:
    """Parse and check `config.json` of a checkpoint folder.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: an architecture or a quantisation this engine doesn't run.
    """
    path = folder / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The same from an object that is read already; `where` names it in errors."""
    root = Section(values, where)
    architecture = _architecture(root)
    text, vision = root.section("text_config"), root.section("vision_config")
    config = ModelConfig(
        architecture=architecture,
        text=_text(text),
        vision=_vision(vision),
        # transformers ≥ 5 reads the top level; older files repeat the text model's value there.
        tie_word_embeddings=root.get(
            "tie_word_embeddings", bool, text.values.get("tie_word_embeddings", False)
        ),
        image_token_id=root.get("image_token_id", int, 151655),
        video_token_id=root.get("video_token_id", int, 151656),
        vision_start_token_id=root.get("vision_start_token_id", int, 151652),
        vision_end_token_id=root.get("vision_end_token_id", int, 151653),
        dtype=str(
            root.values.get("dtype")
            or text.values.get("dtype")
            or root.values.get("torch_dtype")
            or "bfloat16"
        ),
        quantization=_quantization(root),
    )
    _check(config, where)
    return config


def _architecture(root: Section) -> str:
    names = root.values.get("architectures") or [f"model_type {root.values.get('model_type')!r}"]
    name = str(names[0]) if isinstance(names, list) else str(names)
    if name not in SUPPORTED:
        raise UnsupportedModel(
            f"{root.where} is a {name}; this version runs {', '.join(SUPPORTED)} (the dense Qwen3-VL family)"
        )
    return name


def _text(section: Section) -> TextConfig:
    # transformers < 5 writes rope_scaling and rope_theta, later versions rope_parameters.
    rope = section.values.get("rope_parameters") or section.values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{section.where} has rope settings {rope!r}, expected an object")
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "mrope"):
        raise UnsupportedModel(
            f"{section.where} asks for {kind!r} rotary scaling; only 'default' is supported"
        )
    if rope.get("mrope_interleaved") is False:
        raise UnsupportedModel(f"{section.where} has mrope_interleaved false; Qwen3-VL interleaves")
    act = section.values.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModel(f"{section.where} has hidden_act {act!r}; only 'silu' is supported")
    heads, hidden = section.count("num_attention_heads"), section.count("hidden_size")
    mrope = rope.get("mrope_section", [24, 20, 20])
    if not (
        isinstance(mrope, list) and len(mrope) == 3 and all(isinstance(n, int) and n >= 0 for n in mrope)
    ):
        raise CheckpointError(f"{section.where} has mrope_section {mrope!r}, expected three counts")
    return TextConfig(
        hidden_size=hidden,
        num_layers=section.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=section.count("num_key_value_heads", heads),
        head_dim=section.count("head_dim", hidden // heads),
        intermediate_size=section.count("intermediate_size"),
        vocab_size=section.count("vocab_size"),
        max_position_embeddings=section.count("max_position_embeddings"),
        rms_norm_eps=section.get("rms_norm_eps", float, 1e-6),
        rope_theta=float(rope.get("rope_theta") or section.get("rope_theta", float)),
        mrope_section=(mrope[0], mrope[1], mrope[2]),
        attention_bias=section.get("attention_bias", bool, False),
    )


def _vision(section: Section) -> VisionConfig:
    levels = section.get("deepstack_visual_indexes", list)
    if not all(isinstance(n, int) for n in levels):
        raise CheckpointError(
            f"{section.where} has deepstack_visual_indexes {levels!r}, expected layer numbers"
        )
    return VisionConfig(
        depth=section.count("depth"),
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
        rope_theta=float((section.values.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
    )


def _quantization(root: Section) -> Fp8Blocks | None:
    values = root.values.get("quantization_config")
    if values is None:
        return None
    section = Section(values, f"{root.where}: quantization_config")
    method = section.get("quant_method", str)
    block = section.values.get("weight_block_size")
    if method != "fp8" or not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) for n in block)
    ):
        raise UnsupportedModel(
            f"{section.where} is {method!r} with weight_block_size {block!r}; this version reads bf16, fp16, "
            "fp32 and the official FP8 checkpoints with 128x128 blocks"
        )
    return Fp8Blocks(rows=block[0], columns=block[1])


def _check(config: ModelConfig, where: str) -> None:
    """Refuse contradictions here, with both numbers, instead of as a shape error deep in the network."""

    def require(right: bool, problem: str) -> None:
        if not right:
            raise CheckpointError(f"{where}: {problem}")

    text, vision = config.text, config.vision
    require(
        text.num_heads % text.num_kv_heads == 0,
        f"num_attention_heads {text.num_heads} is no multiple of num_key_value_heads {text.num_kv_heads}",
    )
    require(
        2 * sum(text.mrope_section) == text.head_dim,
        f"mrope_section {list(text.mrope_section)} does not sum to half of head_dim {text.head_dim}",
    )
    require(
        vision.hidden_size % (4 * vision.num_heads) == 0,
        f"vision hidden_size {vision.hidden_size} is no multiple of 4 x num_heads {vision.num_heads}",
    )
    require(
        vision.out_hidden_size == text.hidden_size,
        f"vision out_hidden_size {vision.out_hidden_size} differs from the text's {text.hidden_size}",
    )
    require(
        vision.position_grid**2 == vision.num_position_embeddings,
        f"num_position_embeddings {vision.num_position_embeddings} is not a square",
    )
    require(
        all(0 <= level < vision.depth for level in vision.deepstack_layers),
        f"deepstack_visual_indexes {list(vision.deepstack_layers)} name layers beyond {vision.depth - 1}",
    )
