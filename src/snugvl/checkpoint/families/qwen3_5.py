"""Qwen3.5, dense: three layers of gated delta-rule attention, whose state never grows, to one with KV.

State of a linear layer for one sequence: the recurrent matrix, float32 [value_heads, key_dim, value_dim], and
the last inputs of the convolution, as wide as the cache, [kernel - 1, channels]; transformers keeps one more.
Source: transformers' models/qwen3_5 (configuration, modelling, torch_chunk_gated_delta_rule).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from snugvl.checkpoint.facts import KVLayer, TextFacts
from snugvl.checkpoint.families.decoder import Decoder, read_sizes
from snugvl.checkpoint.families.network import Expected, Network, head, images_of, linear, norm
from snugvl.checkpoint.families.qwen_tower import read_rule, read_tower
from snugvl.checkpoint.section import MAX_LAYERS, Section, shown
from snugvl.errors import CheckpointError

ARCHITECTURES = ("Qwen3_5ForConditionalGeneration",)
_DEFAULTS = {
    "hidden": 4096, "intermediate": 12288, "layers": 32, "heads": 16, "kv_heads": 4, "head_dim": 256,
    "vocab": 248320, "max_positions": 32768,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Delta:
    """Linear attention: sizes of its heads and of its convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side, which the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def layer(self) -> KVLayer:
        """What is kept of one sequence: nothing per token, so it has no heads and no width."""
        matrices = self.value_heads * self.key_dim * self.value_dim * 4
        values = self.value_heads * self.value_dim
        return KVLayer(
            0,
            0,
            state_bytes=matrices,
            state_values=self.channels * (self.kernel - 1),
            projected=self.channels + values,
            values=values,
        )

    def tensors(self, name: str, hidden: int) -> Iterator[Expected]:
        """Every tensor of one layer's linear attention."""
        values = self.value_heads * self.value_dim
        yield Expected(f"{name}.dt_bias", (self.value_heads,), "other")
        yield Expected(f"{name}.A_log", (self.value_heads,), "other")
        yield Expected(f"{name}.conv1d.weight", (self.channels, 1, self.kernel), "other")
        yield from norm(f"{name}.norm", self.value_dim)
        yield from linear(f"{name}.out_proj", hidden, values, "linear")
        yield from linear(f"{name}.in_proj_qkv", self.channels, hidden, "linear")
        yield from linear(f"{name}.in_proj_z", values, hidden, "linear")
        # One row a head: too small to quantise, and what decides how much is forgotten.
        yield from linear(f"{name}.in_proj_b", self.value_heads, hidden, "other")
        yield from linear(f"{name}.in_proj_a", self.value_heads, hidden, "other")


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Qwen3.5 configuration.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    text = root.section("text_config")
    sizes = read_sizes(text, _DEFAULTS)
    bias = text.get("attention_bias", bool, False)
    decoder = Decoder.of(sizes, windows=(None,) * sizes["layers"], o_bias=bias, qkv_bias=bias, qk_norm=True)
    delta = _Delta(
        key_heads=text.count("linear_num_key_heads", 16),
        value_heads=text.count("linear_num_value_heads", 32),
        key_dim=text.count("linear_key_head_dim", 128),
        value_dim=text.count("linear_value_head_dim", 128),
        kernel=text.count("linear_conv_kernel_dim", 4),
    )
    linear_layers = _linear_layers(text, decoder.layers)
    tower = read_tower(root.section("vision_config"), decoder.hidden, deepstack=0)
    rule = read_rule(images_of(images, root.where), tower.patch, tower.merge)
    tied = root.get("tie_word_embeddings", bool, text.values.get("tie_word_embeddings", False))
    key = "mtp_num_hidden_layers"
    predictors = text.count(key, most=MAX_LAYERS) if text.values.get(key) else 0
    return Network(
        family="qwen3_5",
        architecture=architecture,
        text=_facts(decoder, delta, linear_layers),
        vision=tower.facts(rule),
        tied=tied,
        tensors=(
            *tower.tensors("model.visual"),
            *_tensors(decoder, delta, linear_layers, "model.language_model"),
            *head(tied, decoder.vocab, decoder.hidden),
        ),
        unloaded=tuple(_predictor(decoder, predictors)),
        native=True,
    )


def _linear_layers(text: Section, layers: int) -> tuple[bool, ...]:
    interval = text.count("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)]
    types = text.get("layer_types", list, default)
    unknown = [kind for kind in types if kind not in ("linear_attention", "full_attention")]
    if len(types) != layers or unknown:
        raise CheckpointError(
            f"{text.where} has {len(types)} layer_types for {layers} layers"
            + (f", of an unknown kind {shown(unknown[0])}" if unknown else "")
        )
    return tuple(kind == "linear_attention" for kind in types)


def _facts(decoder: Decoder, delta: _Delta, linear_layers: tuple[bool, ...]) -> TextFacts:
    queries = decoder.heads * decoder.head_dim
    projected = 2 * queries + 2 * decoder.kv_heads * decoder.head_dim  # each query with its gate
    full = KVLayer(decoder.kv_heads, decoder.head_dim, projected=projected, values=queries)
    return replace(decoder.facts(), kv_layers=tuple(delta.layer if here else full for here in linear_layers))


def _tensors(
    decoder: Decoder, delta: _Delta, linear_layers: tuple[bool, ...], prefix: str
) -> Iterator[Expected]:
    yield Expected(f"{prefix}.embed_tokens.weight", (decoder.vocab, decoder.hidden), "embedding")
    for index, here in enumerate(linear_layers):
        layer = f"{prefix}.layers.{index}"
        if here:
            yield from delta.tensors(f"{layer}.linear_attn", decoder.hidden)
        else:
            yield from _gated_attention(decoder, f"{layer}.self_attn")
        yield from decoder.mlp(f"{layer}.mlp")
        yield from norm(f"{layer}.input_layernorm", decoder.hidden)
        yield from norm(f"{layer}.post_attention_layernorm", decoder.hidden)
    yield from norm(f"{prefix}.norm", decoder.hidden)


def _predictor(decoder: Decoder, layers: int) -> Iterator[Expected]:
    """The multi-token predictor that the files carry for speculative decoding; transformers ignores it."""
    if not layers:
        return
    yield from linear("mtp.fc", decoder.hidden, 2 * decoder.hidden, "other")
    for index in range(layers):
        layer = f"mtp.layers.{index}"
        yield from _gated_attention(decoder, f"{layer}.self_attn")
        yield from decoder.mlp(f"{layer}.mlp")
        yield from norm(f"{layer}.input_layernorm", decoder.hidden)
        yield from norm(f"{layer}.post_attention_layernorm", decoder.hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield from norm(f"mtp.{name}", decoder.hidden)


def _gated_attention(decoder: Decoder, name: str) -> Iterator[Expected]:
    """Attention whose query matrix also makes the output's gate, so it has twice the rows."""
    doubled = 2 * decoder.heads * decoder.head_dim
    for tensor in decoder.attention(name):
        if tensor.name == f"{name}.q_proj.weight":
            yield Expected(tensor.name, (doubled, decoder.hidden), tensor.role)
        elif tensor.name == f"{name}.q_proj.bias":
            yield Expected(tensor.name, (doubled,), tensor.role)
        else:
            yield tensor
