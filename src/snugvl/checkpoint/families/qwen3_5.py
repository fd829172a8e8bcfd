"""Qwen3.5 and 3.6, dense and as mixtures of experts (35B-A3B, 122B-A10B): three layers of gated delta-rule
attention to one with keys and values (`GatedDelta`).

Norms are stored as their distance from 1, a quarter of each head is rotated, and the tower is Qwen3-VL's,
without deepstack levels. Every layer of a mixture has a router, experts and a gated expert that all tokens
share. Source: transformers' models/qwen3_5, models/qwen3_5_moe (configuration, modelling).
"""

from collections.abc import Iterator
from dataclasses import replace

from snugvl.checkpoint.architecture import Mixture, ModelConfig, TextConfig
from snugvl.checkpoint.families.decoder import (
    SIZES,
    Decoder,
    check_delta,
    check_mixture,
    need_silu,
    read_decoder,
    read_delta,
)
from snugvl.checkpoint.families.qwen_tower import (
    check_tower,
    check_width,
    read_tokens,
    read_tower,
    sees,
    tower_facts,
    tower_tensors,
)
from snugvl.checkpoint.families.rotary import read_mrope
from snugvl.checkpoint.families.traits import (
    Expected,
    Family,
    GgufNetwork,
    Network,
    Prompting,
    Traits,
    linear,
    model_config,
    norm,
    ties,
)
from snugvl.checkpoint.section import MAX_LAYERS, Section

DENSE, MIXTURE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
_DEFAULTS = {
    "hidden": 4096, "intermediate": 12288, "layers": 32, "heads": 16, "kv_heads": 4, "head_dim": 256,
    "vocab": 248320, "max_positions": 32768,
}  # fmt: skip
_MIXTURE_DEFAULTS = {
    "hidden": 2048, "layers": 40, "heads": 16, "kv_heads": 2, "head_dim": 256, "vocab": 248320,
    "max_positions": 32768,
}  # fmt: skip


_TRAITS = Traits(mrope=True, rotary_divisor=4, gated_queries=True, recurrent=True)


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Qwen3.5 configuration for the plan.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    mixture = architecture == MIXTURE
    decoder = _decoder(text, mixture=mixture)
    tower = read_tower(vision, [])
    check_width(vision, tower, decoder.hidden)
    tied = ties(root, text)
    predictors = _predictors(text)
    return Network(
        family="qwen3_5_moe" if mixture else "qwen3_5",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower_facts(tower, images, root.where),
        tied=tied,
        tensors=(*tower_tensors(tower), *decoder.tensors("model.language_model", tied)),
        unloaded=tuple(_predictor(decoder, predictors)),
        predictor=decoder.kept() if predictors == 1 else None,
    )


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read a Qwen3.5 configuration for our engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a quantisation or a variant that this engine doesn't run.
    """
    text = root.section("text_config")
    mixture = architecture == MIXTURE
    text.need(*(key for name, key in SIZES.items() if not (mixture and name == "intermediate")))
    config = _text(text, mixture=mixture)
    tower = tokens = None
    if sees(root):
        vision, tokens = root.section("vision_config"), read_tokens(root, 248053)
        tower = read_tower(vision, [])
        check_tower(vision, tower, config)
    return model_config(
        root,
        architecture,
        config,
        tied=ties(root, text),
        inner=text,
        vision=tower,
        tokens=tokens,
        predictor=_predictors(text) == 1,
    )


def _text(section: Section, *, mixture: bool) -> TextConfig:
    need_silu(section)
    decoder = _decoder(section, mixture=mixture)
    check_mixture(section, decoder.experts)
    assert decoder.delta is not None, "read with it"
    check_delta(section, decoder.delta)
    rope = read_mrope(section, decoder.head_dim, (11, 11, 10), 1e4, share=0.25)
    config = decoder.config(rope, section.get("rms_norm_eps", float, 1e-6))
    return replace(config, norm_offset=1.0)


def _decoder(text: Section, *, mixture: bool) -> Decoder:
    bias = text.get("attention_bias", bool, False)
    shared = text.count("shared_expert_intermediate_size", 512) if mixture else 0
    decoder = read_decoder(text, _MIXTURE_DEFAULTS | {"intermediate": shared} if mixture else _DEFAULTS)
    delta = read_delta(text, decoder.layers)
    experts = None
    if mixture:
        experts = Mixture(
            count=text.count("num_experts", 256),
            used=text.count("num_experts_per_tok", 8),
            width=text.count("moe_intermediate_size", 512),
            shared=shared,
            layers=(True,) * decoder.layers,
        )
    return replace(decoder, qkv_bias=bias, o_bias=bias, qk_norm=True, delta=delta, experts=experts)


def _predictors(text: Section) -> int:
    """Number of the multi-token predictor's layers; 0 unless it shares the decoder's embedding."""
    key = "mtp_num_hidden_layers"
    if not text.values.get(key) or text.values.get("mtp_use_dedicated_embeddings"):
        return 0
    return text.count(key, most=MAX_LAYERS)


def _predictor(decoder: Decoder, layers: int) -> Iterator[Expected]:
    """The tensors of the files' multi-token predictor for speculative decoding (`models/networks.py`)."""
    if not layers:
        return
    yield from linear("mtp.fc", decoder.hidden, 2 * decoder.hidden, "other")
    for index in range(layers):
        layer = f"mtp.layers.{index}"
        yield from decoder.attention(f"{layer}.self_attn")
        yield from decoder.mixture(f"{layer}.mlp") if decoder.experts else decoder.mlp(f"{layer}.mlp")
        yield from norm(f"{layer}.input_layernorm", decoder.hidden)
        yield from norm(f"{layer}.post_attention_layernorm", decoder.hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield from norm(f"mtp.{name}", decoder.hidden)


FAMILY = Family(
    architectures=(DENSE, MIXTURE),
    describe=describe,
    native=(DENSE, MIXTURE),
    parse=parse,
    network="snugvl.models.networks:Qwen35",
    traits={
        "qwen3_5": replace(_TRAITS, gguf=("qwen35",)),
        "qwen3_5_moe": replace(_TRAITS, gguf=("qwen35moe",)),
    },
    prompting=dict.fromkeys((DENSE, MIXTURE), Prompting("Qwen3.5")),  # it keeps Qwen3-VL's form
    gguf={
        "qwen35": GgufNetwork(DENSE, DENSE, "qwen3vl_merger", nested=True, recurrent=True),
        "qwen35moe": GgufNetwork(
            MIXTURE, MIXTURE, "qwen3vl_merger", nested=True, recurrent=True, mixture=True
        ),
    },
)
