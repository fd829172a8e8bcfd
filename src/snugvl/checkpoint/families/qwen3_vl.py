"""Qwen3-VL, dense (2B, 4B, 8B, 32B) and as a mixture of experts (30B-A3B, 235B-A22B).

The defaults are those of transformers' `Qwen3VLConfig`.
"""

from dataclasses import replace

from snugvl.checkpoint.architecture import Mixture, ModelConfig
from snugvl.checkpoint.families.decoder import SIZES, Decoder, check_mixture, need_silu, read_decoder
from snugvl.checkpoint.families.qwen_tower import (
    GGUF_TOKENS,
    LEVELS,
    check_tower,
    check_width,
    read_tokens,
    read_tower,
    sees,
    tower_facts,
    tower_tensors,
)
from snugvl.checkpoint.families.rotary import read_mrope
from snugvl.checkpoint.families.text import QWEN3
from snugvl.checkpoint.families.traits import (
    Family,
    GgufNetwork,
    Network,
    Prompting,
    Traits,
    model_config,
    ties,
)
from snugvl.checkpoint.section import Section

DENSE = "Qwen3VLForConditionalGeneration"
MIXTURE = "Qwen3VLMoeForConditionalGeneration"
_DENSE_DEFAULTS = {
    "hidden": 4096, "intermediate": 22016, "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128,
    "vocab": 151936, "max_positions": 128000,
}  # fmt: skip
_MIXTURE_DEFAULTS = {
    "hidden": 2048, "intermediate": 5632, "layers": 24, "heads": 16, "kv_heads": 16,
    "vocab": 151936, "max_positions": 128000,
}  # fmt: skip


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Qwen3-VL configuration for the plan.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    decoder = _decoder(text, mixture=architecture == MIXTURE)
    tower = read_tower(vision, vision.get(LEVELS, list, [8, 16, 24]))
    check_width(vision, tower, decoder.hidden)
    tied = ties(root, text)
    return Network(
        family="qwen3_vl_moe" if architecture == MIXTURE else "qwen3_vl",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower_facts(tower, images, root.where),
        tied=tied,
        tensors=(*tower_tensors(tower), *decoder.tensors("model.language_model", tied)),
    )


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read a Qwen3-VL configuration for our engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a quantisation or a variant that this engine doesn't run.
    """
    text = root.section("text_config")
    text.need(*SIZES.values())
    need_silu(text)
    decoder = _decoder(text, mixture=architecture == MIXTURE)
    check_mixture(text, decoder.experts)
    rope = read_mrope(text, decoder.head_dim, (24, 20, 20), None)
    config = decoder.config(rope, text.get("rms_norm_eps", float, 1e-6))
    tower = tokens = None
    if sees(root):
        vision, tokens = root.section("vision_config"), read_tokens(root, 151652)
        tower = read_tower(vision, vision.get(LEVELS, list))
        check_tower(vision, tower, config)
    return model_config(
        root, architecture, config, tied=ties(root, text), inner=text, vision=tower, tokens=tokens
    )


def _decoder(text: Section, *, mixture: bool = False) -> Decoder:
    decoder = read_decoder(text, _MIXTURE_DEFAULTS if mixture else _DENSE_DEFAULTS)
    bias = text.get("attention_bias", bool, False)
    experts = _experts(text, decoder.layers) if mixture else None
    return replace(decoder, qkv_bias=bias, o_bias=bias, qk_norm=True, experts=experts)


def _experts(text: Section, layers: int) -> Mixture:
    dense = {index for index in text.get("mlp_only_layers", list, []) if isinstance(index, int)}
    step = text.count("decoder_sparse_step", 1)
    return Mixture(
        count=text.count("num_experts", text.values.get("num_local_experts") or 60),
        used=text.count("num_experts_per_tok", 4),
        width=text.count("moe_intermediate_size", 1408),
        shared=0,
        layers=tuple(index not in dense and (index + 1) % step == 0 for index in range(layers)),
    )


FAMILY = Family(
    architectures=(DENSE, MIXTURE),
    describe=describe,
    native=(DENSE, MIXTURE),
    parse=parse,
    network="snugvl.models.networks:Qwen3VL",
    traits={
        "qwen3_vl": Traits(gguf=("qwen3vl", "qwen3vlmoe"), mrope=True),
        "qwen3_vl_moe": Traits(mrope=True),
    },
    # Its cookbooks: spatial_understanding.ipynb, 2d_grounding.ipynb.
    prompting=dict.fromkeys((DENSE, MIXTURE), Prompting("Qwen3-VL")),
    # Text alone turns all three axes by the same position: without its tower it is a Qwen3.
    gguf={
        "qwen3vl": GgufNetwork(QWEN3, DENSE, "qwen3vl_merger"),
        "qwen3vlmoe": GgufNetwork(MIXTURE, MIXTURE, "qwen3vl_merger", nested=True, mixture=True),
    },
    projectors={"qwen3vl_merger": GGUF_TOKENS},
)
