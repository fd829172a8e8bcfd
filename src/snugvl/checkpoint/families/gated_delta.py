"""Layers of gated delta-rule attention, whose state never grows, among layers of full attention with gated
queries.

State of one layer for one sequence: the recurrent matrix, float32 [value_heads, key_dim, value_dim], and the
last inputs of the convolution, as wide as the cache, [kernel - 1, channels]; transformers keeps one more.
Source: transformers' models/qwen3_5 (torch_chunk_gated_delta_rule).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from snugvl.checkpoint.architecture import LinearAttention
from snugvl.checkpoint.facts import KVLayer
from snugvl.checkpoint.families.traits import Expected, layer_types, linear, norm
from snugvl.checkpoint.section import Section, require, shown
from snugvl.errors import UnsupportedModel

TILED = "linear_value_heads_tiled"  # ours, in what a GGUF's metadata becomes
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Sizes of such layers, and which of the decoder's layers they are (`linear`)."""

    sizes: LinearAttention
    linear: tuple[bool, ...]

    def kept(self) -> KVLayer:
        """The state that a layer keeps of a sequence: nothing per token, so it has no heads and no width."""
        sizes = self.sizes
        return KVLayer(
            0,
            0,
            state_bytes=sizes.values * sizes.key_dim * 4,
            state_values=sizes.channels * (sizes.kernel - 1),
            projected=sizes.channels + sizes.values,
            value_heads=sizes.value_heads,
            values=sizes.values,
        )

    def tensors(self, name: str, hidden: int) -> Iterator[Expected]:
        """Every tensor of one layer's attention."""
        delta = self.sizes
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


def read_delta(text: Section, layers: int) -> GatedDelta:
    """Read the sizes of such layers from the decoder's section.

    Raises:
        CheckpointError: a field is nonsense, or contradicts another one.
    """
    interval = text.count("full_attention_interval", 4)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    sizes = LinearAttention(
        key_heads=text.count("linear_num_key_heads", 16),
        value_heads=text.count("linear_num_value_heads", 32),
        key_dim=text.count("linear_key_head_dim", 128),
        value_dim=text.count("linear_value_head_dim", 128),
        kernel=text.count("linear_conv_kernel_dim", 4),
        tiled=text.get(TILED, bool, False),
    )
    return GatedDelta(sizes, tuple(kind == LINEAR for kind in layer_types(text, default, (LINEAR, FULL))))


def check_delta(text: Section, delta: GatedDelta) -> None:
    """Refuse sizes of such layers that our engine doesn't run.

    Raises:
        CheckpointError: heads that can't be grouped, or no layer of full attention.
        UnsupportedModel: queries of full attention without a gate.
    """
    gate = text.values.get("attn_output_gate", True)
    if gate is not True:
        raise UnsupportedModel(f"{text.where} has attn_output_gate {shown(gate)}; only True is supported")
    values, keys = delta.sizes.value_heads, delta.sizes.key_heads
    no_multiple = f"linear_num_value_heads {values} is no multiple of linear_num_key_heads {keys}"
    require(values % keys == 0, text.where, no_multiple)
    require(not all(delta.linear), text.where, "no layer has full attention")
