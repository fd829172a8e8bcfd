"""Decoders of gated delta-rule attention, whose state never grows, and some layers of full attention with
gated queries; and the multi-token predictor of one such layer of full attention.

State of a linear layer for one sequence: the recurrent matrix, float32 [value_heads, key_dim, value_dim], and
the last inputs of the convolution, as wide as the cache, [kernel - 1, channels]; transformers keeps one more.
Source: transformers' models/qwen3_5 (torch_chunk_gated_delta_rule).
"""

from collections.abc import Iterator
from dataclasses import replace

from snugvl.checkpoint.architecture import LayerKind, LinearAttention
from snugvl.checkpoint.facts import KVLayer, TextFacts
from snugvl.checkpoint.families.decoder import Decoder, layer_types
from snugvl.checkpoint.families.network import Expected, linear, norm
from snugvl.checkpoint.section import MAX_LAYERS, Section, require, shown
from snugvl.errors import UnsupportedModel

Kinds = tuple[LayerKind, ...]
_KINDS: dict[str, LayerKind] = {"linear_attention": "linear", "full_attention": "full"}


def read_hybrid(text: Section, decoder: Decoder) -> tuple[LinearAttention, Kinds]:
    """Sizes of the linear layers, and which layers they are.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    return _delta(text), _kinds(text, decoder.layers)


def check_hybrid(text: Section, decoder: Decoder) -> tuple[LinearAttention, Kinds]:
    """As `read_hybrid`, for our own engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: queries of full attention without a gate.
    """
    gate = text.values.get("attn_output_gate", True)
    if gate is not True:
        raise UnsupportedModel(f"{text.where} has attn_output_gate {shown(gate)}; only True is supported")
    delta, kinds = read_hybrid(text, decoder)
    require(
        delta.value_heads % delta.key_heads == 0,
        text.where,
        f"linear_num_value_heads {delta.value_heads} is no multiple of "
        f"linear_num_key_heads {delta.key_heads}",
    )
    require("full" in kinds, text.where, "no layer has full attention")
    return delta, kinds


def hybrid_facts(decoder: Decoder, delta: LinearAttention, kinds: Kinds) -> TextFacts:
    """What is kept of one sequence: of a linear layer nothing per token, so it has no heads and no width."""
    full = gated_layer(decoder)
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


def gated_layer(decoder: Decoder) -> KVLayer:
    """What a layer of full attention with gated queries keeps of a token."""
    queries = decoder.heads * decoder.head_dim
    projected = 2 * queries + 2 * decoder.kv_heads * decoder.head_dim  # each query with its gate
    return KVLayer(decoder.kv_heads, decoder.head_dim, projected=projected, values=queries)


def hybrid_tensors(
    decoder: Decoder, delta: LinearAttention, kinds: Kinds, prefix: str, tied: bool
) -> Iterator[Expected]:
    """Every tensor of the decoder, as `Decoder.tensors`."""

    def attention(index: int, layer: str) -> Iterator[Expected]:
        if kinds[index] == "linear":
            return _linear_attention(delta, f"{layer}.linear_attn", decoder.hidden)
        return decoder.attention(f"{layer}.self_attn", gated=True)

    return decoder.tensors(prefix, tied, attention=attention)


def count_predictors(text: Section) -> int:
    """Layers of the multi-token predictor. Our engine runs one that shares the decoder's embedding."""
    key = "mtp_num_hidden_layers"
    if not text.values.get(key) or text.values.get("mtp_use_dedicated_embeddings"):
        return 0
    return text.count(key, most=MAX_LAYERS)


def predictor_tensors(decoder: Decoder, layers: int) -> Iterator[Expected]:
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


def _delta(text: Section) -> LinearAttention:
    return LinearAttention(
        key_heads=text.count("linear_num_key_heads", 16),
        value_heads=text.count("linear_num_value_heads", 32),
        key_dim=text.count("linear_key_head_dim", 128),
        value_dim=text.count("linear_value_head_dim", 128),
        kernel=text.count("linear_conv_kernel_dim", 4),
    )


def _kinds(text: Section, layers: int) -> Kinds:
    interval = text.count("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)]
    return tuple(_KINDS[name] for name in layer_types(text, default, tuple(_KINDS)))


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
