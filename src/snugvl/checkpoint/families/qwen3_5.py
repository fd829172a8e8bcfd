"""Qwen3.5, dense: three layers of gated delta-rule attention, whose state never grows, to one with KV.

Norms are stored as their distance from 1, a quarter of each head is rotated, and the tower is Qwen3-VL's,
without deepstack levels. State of a linear layer for one sequence: the recurrent matrix, float32
[value_heads, key_dim, value_dim], and the last inputs of the convolution, as wide as the cache,
[kernel - 1, channels]; transformers keeps one more. Source: transformers' models/qwen3_5 (configuration,
modelling, torch_chunk_gated_delta_rule).
"""

from collections.abc import Iterator
from dataclasses import replace

from snugvl.checkpoint.architecture import LayerKind, LinearAttention, ModelConfig, TextConfig
from snugvl.checkpoint.facts import KVLayer, TextFacts
from snugvl.checkpoint.families.decoder import SIZES, Decoder, layer_types, need_silu, read_decoder
from snugvl.checkpoint.families.network import Expected, Network, linear, model_config, norm, ties
from snugvl.checkpoint.families.qwen_tower import (
    check_tower,
    check_width,
    read_tokens,
    read_tower,
    tower_facts,
    tower_tensors,
)
from snugvl.checkpoint.families.rotary import read_mrope
from snugvl.checkpoint.families.traits import Family, Prompting, Traits
from snugvl.checkpoint.section import MAX_LAYERS, Section, require, shown
from snugvl.errors import UnsupportedModel

DENSE, MIXTURE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
_DEFAULTS = {
    "hidden": 4096, "intermediate": 12288, "layers": 32, "heads": 16, "kv_heads": 4, "head_dim": 256,
    "vocab": 248320, "max_positions": 32768,
}  # fmt: skip
_KINDS: dict[str, LayerKind] = {"linear_attention": "linear", "full_attention": "full"}


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Qwen3.5 configuration for the plan.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    decoder, delta = _decoder(text), _delta(text)
    kinds = _kinds(text, decoder.layers)
    tower = read_tower(vision, [])
    check_width(vision, tower, decoder.hidden)
    tied = ties(root, text)
    predictors = _predictors(text)

    def attention(index: int, layer: str) -> Iterator[Expected]:
        if kinds[index] == "linear":
            return _linear_attention(delta, f"{layer}.linear_attn", decoder.hidden)
        return decoder.attention(f"{layer}.self_attn", gated=True)

    return Network(
        family="qwen3_5",
        architecture=architecture,
        text=_facts(decoder, delta, kinds),
        vision=tower_facts(tower, images, root.where),
        tied=tied,
        tensors=(
            *tower_tensors(tower),
            *decoder.tensors("model.language_model", tied, attention=attention),
        ),
        unloaded=tuple(_predictor(decoder, predictors)),
        predictor=_full(decoder) if predictors == 1 else None,
    )


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read the configuration of a dense Qwen3.5 for our engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a quantisation or a variant that this engine doesn't run.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    text.need(*SIZES.values())
    config = _text(text)
    tower = read_tower(vision, [])
    check_tower(vision, tower, config)
    return model_config(
        root,
        architecture,
        config,
        tied=ties(root, text),
        inner=text,
        vision=tower,
        tokens=read_tokens(root, 248053),
        predictor=_predictors(text) == 1,
    )


def _text(section: Section) -> TextConfig:
    need_silu(section)
    gate = section.values.get("attn_output_gate", True)
    if gate is not True:
        raise UnsupportedModel(f"{section.where} has attn_output_gate {shown(gate)}; only True is supported")
    decoder, delta = _decoder(section), _delta(section)
    require(
        delta.value_heads % delta.key_heads == 0,
        section.where,
        f"linear_num_value_heads {delta.value_heads} is no multiple of "
        f"linear_num_key_heads {delta.key_heads}",
    )
    kinds = _kinds(section, decoder.layers)
    require("full" in kinds, section.where, "no layer has full attention")
    rope = read_mrope(section, decoder.head_dim, (11, 11, 10), 1e4, share=0.25)
    config = decoder.config(rope, section.get("rms_norm_eps", float, 1e-6))
    return replace(config, kinds=kinds, linear=delta, gated=True, norm_offset=1.0)


def _decoder(text: Section) -> Decoder:
    bias = text.get("attention_bias", bool, False)
    return replace(read_decoder(text, _DEFAULTS), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _delta(text: Section) -> LinearAttention:
    return LinearAttention(
        key_heads=text.count("linear_num_key_heads", 16),
        value_heads=text.count("linear_num_value_heads", 32),
        key_dim=text.count("linear_key_head_dim", 128),
        value_dim=text.count("linear_value_head_dim", 128),
        kernel=text.count("linear_conv_kernel_dim", 4),
    )


def _kinds(text: Section, layers: int) -> tuple[LayerKind, ...]:
    interval = text.count("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)]
    return tuple(_KINDS[name] for name in layer_types(text, default, tuple(_KINDS)))


def _facts(decoder: Decoder, delta: LinearAttention, kinds: tuple[LayerKind, ...]) -> TextFacts:
    """What is kept of one sequence: of a linear layer nothing per token, so it has no heads and no width."""
    full = _full(decoder)
    recurrent = KVLayer(
        0,
        0,
        state_bytes=delta.values * delta.key_dim * 4,
        state_values=delta.channels * (delta.kernel - 1),
        projected=delta.channels + delta.values,
        value_heads=delta.value_heads,
        values=delta.values,
    )
    return replace(
        decoder.facts(), kv_layers=tuple(recurrent if kind == "linear" else full for kind in kinds)
    )


def _full(decoder: Decoder) -> KVLayer:
    """What a layer with keys and values keeps of a token."""
    queries = decoder.heads * decoder.head_dim
    projected = 2 * queries + 2 * decoder.kv_heads * decoder.head_dim  # each query with its gate
    return KVLayer(decoder.kv_heads, decoder.head_dim, projected=projected, values=queries)


def _linear_attention(delta: LinearAttention, name: str, hidden: int) -> Iterator[Expected]:
    """Every tensor of one layer's linear attention."""
    yield Expected(f"{name}.dt_bias", (delta.value_heads,), "other")
    yield Expected(f"{name}.A_log", (delta.value_heads,), "other")
    yield Expected(f"{name}.conv1d.weight", (delta.channels, 1, delta.kernel), "other")
    yield from norm(f"{name}.norm", delta.value_dim)
    yield from linear(f"{name}.out_proj", hidden, delta.values, "linear")
    yield from linear(f"{name}.in_proj_qkv", delta.channels, hidden, "linear")
    yield from linear(f"{name}.in_proj_z", delta.values, hidden, "linear")
    # One row a head: too small to quantise, and what decides how much is forgotten.
    yield from linear(f"{name}.in_proj_b", delta.value_heads, hidden, "other")
    yield from linear(f"{name}.in_proj_a", delta.value_heads, hidden, "other")


def _predictors(text: Section) -> int:
    """Layers of the multi-token predictor. Our engine runs one that shares the decoder's embedding."""
    key = "mtp_num_hidden_layers"
    if not text.values.get(key) or text.values.get("mtp_use_dedicated_embeddings"):
        return 0
    return text.count(key, most=MAX_LAYERS)


def _predictor(decoder: Decoder, layers: int) -> Iterator[Expected]:
    """The multi-token predictor that the files carry for speculative decoding (`models/predictor.py`)."""
    if not layers:
        return
    yield from linear("mtp.fc", decoder.hidden, 2 * decoder.hidden, "other")
    for index in range(layers):
        layer = f"mtp.layers.{index}"
        yield from decoder.attention(f"{layer}.self_attn", gated=True)
        yield from decoder.mlp(f"{layer}.mlp")
        yield from norm(f"{layer}.input_layernorm", decoder.hidden)
        yield from norm(f"{layer}.post_attention_layernorm", decoder.hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield from norm(f"mtp.{name}", decoder.hidden)


FAMILY = Family(
    architectures=(DENSE,),
    describe=describe,
    native=(DENSE,),
    parse=parse,
    network="snugvl.models.networks:Qwen35",
    traits={
        "qwen3_5": Traits(
            gguf=("qwen35", "qwen35moe"), mrope=True, rotary_divisor=4, gated_queries=True, recurrent=True
        )
    },
    prompting=dict.fromkeys((DENSE, MIXTURE), Prompting("Qwen3.5")),  # it keeps Qwen3-VL's form
)
