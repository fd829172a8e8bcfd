"""The decoder that nearly all families share: attention with grouped keys, a gated MLP, RMS norms; and the
kinds of its layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from snugvl.checkpoint.architecture import LayerKind, LinearAttention, Mixture, Rope, TextConfig
from snugvl.checkpoint.facts import KVLayer, TextFacts
from snugvl.checkpoint.families.traits import Expected, layer_types, linear, norm
from snugvl.checkpoint.section import MAX_COUNT, MAX_LAYERS, Section, shown
from snugvl.errors import UnsupportedModel

TILED = "linear_value_heads_tiled"  # ours, in what a GGUF's metadata becomes
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Layers of gated delta-rule attention among layers of full attention with gated queries.

    Their state never grows: for one sequence the recurrent matrix, float32 `[value_heads, key_dim,
    value_dim]`, and the last inputs of the convolution, as wide as the cache, `[kernel - 1, channels]`;
    transformers keeps one more. Source: transformers' models/qwen3_5 (torch_chunk_gated_delta_rule).

    Attributes:
        linear: which of the decoder's layers they are.
    """

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
    no_multiple = f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
    text.require(values % keys == 0, no_multiple)
    text.require(not all(delta.linear), "no layer has full attention")


SIZES = {
    "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "vocab": "vocab_size", "max_positions": "max_position_embeddings",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder and its switches.

    Attributes:
        windows: window of each layer in tokens; None for all tokens.
        fused: whether queries, keys and values are one matrix, gate and up another.
        delta: layers of gated delta-rule attention; the other layers' queries then come with a gate.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    experts: Mixture | None = None
    delta: GatedDelta | None = None

    def kept(self, window: int | None = None) -> KVLayer:
        """The keys and values that a layer with this window keeps of a token."""
        if self.delta is None:
            return KVLayer(self.kv_heads, self.head_dim, window)
        queries = self.heads * self.head_dim
        projected = 2 * queries + 2 * self.kv_heads * self.head_dim  # each query with its gate
        return KVLayer(self.kv_heads, self.head_dim, window, projected=projected, values=queries)

    def facts(self) -> TextFacts:
        """The decoder's facts for the planner."""
        kv = tuple(
            self.delta.kept() if self.delta and self.delta.linear[index] else self.kept(window)
            for index, window in enumerate(self.windows)
        )
        return TextFacts(
            self.hidden, self.intermediate, self.layers, self.heads, self.vocab, self.max_positions, kv,
            self.experts.used if self.experts else 0, self.experts,
        )  # fmt: skip

    def config(self, rope: Rope, epsilon: float, limit: int | None = None) -> TextConfig:
        """Our engine's configuration. `epsilon`: of norms; `limit`: tokens, where rotary settings have it."""
        limit = limit or self.max_positions
        # A window that no context outgrows is none.
        windows = [None if each is None or each >= limit else each for each in self.windows]
        kinds: list[LayerKind] = ["full" if each is None else "sliding" for each in windows]
        if self.delta is not None:
            kinds = ["linear" if is_linear else "full" for is_linear in self.delta.linear]
        return TextConfig(
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=limit,
            rms_norm_eps=epsilon,
            rope=rope,
            kinds=tuple(kinds),
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
            window=next((each for each in windows if each is not None), None),
            fused=self.fused,
            linear=self.delta.sizes if self.delta else None,
            gated=self.delta is not None,
            mixture=self.experts,
        )

    def tensors(
        self, prefix: str, tied: bool, *, norms: Sequence[str] = ("input", "post_attention")
    ) -> Iterator[Expected]:
        """The tensors of embedding, layers and final norm under `prefix`, and of lm_head unless tied."""
        yield Expected(f"{prefix}.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        for index in range(self.layers):
            layer = f"{prefix}.layers.{index}"
            if self.delta and self.delta.linear[index]:
                yield from self.delta.tensors(f"{layer}.linear_attn", self.hidden)
            else:
                yield from self.attention(f"{layer}.self_attn")
            sparse = self.experts is not None and self.experts.layers[index]
            yield from self.mixture(f"{layer}.mlp") if sparse else self.mlp(f"{layer}.mlp")
            for place in norms:
                yield from norm(f"{layer}.{place}_layernorm", self.hidden)
        yield from norm(f"{prefix}.norm", self.hidden)
        if not tied:
            yield Expected("lm_head.weight", (self.vocab, self.hidden), "lm_head")

    def attention(self, name: str) -> Iterator[Expected]:
        """The tensors of projections, and of norms of queries and keys. A gate doubles the queries' rows."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = (("q", 2 * queries if self.delta else queries), ("k", keys), ("v", keys))
        for part, rows in (("qkv", queries + 2 * keys),) if self.fused else parts:
            yield from linear(f"{name}.{part}_proj", rows, self.hidden, "linear", bias=self.qkv_bias)
        yield from linear(f"{name}.o_proj", self.hidden, queries, "linear", bias=self.o_bias)
        if self.qk_norm:
            yield from norm(f"{name}.q_norm", self.head_dim)
            yield from norm(f"{name}.k_norm", self.head_dim)

    def mlp(self, name: str) -> Iterator[Expected]:
        """The tensors of an MLP: gate, up and down."""
        width, bias = self.intermediate, self.mlp_bias
        for part, rows in (("gate_up", 2 * width),) if self.fused else (("gate", width), ("up", width)):
            yield from linear(f"{name}.{part}_proj", rows, self.hidden, "linear", bias=bias)
        yield from linear(f"{name}.down_proj", self.hidden, width, "linear", bias=bias)

    def mixture(self, name: str) -> Iterator[Expected]:
        """Tensors of a mixture as transformers names them: one for gate and up of all experts, one for down;
        the router, which stays 16-bit; the shared expert with its gate."""
        experts, hidden = self.experts, self.hidden
        assert experts is not None, "a mixture has experts"
        yield Expected(f"{name}.experts.gate_up_proj", (experts.count, 2 * experts.width, hidden), "expert")
        yield Expected(f"{name}.experts.down_proj", (experts.count, hidden, experts.width), "expert")
        yield Expected(f"{name}.gate.weight", (experts.count, hidden), "other")
        if experts.shared:
            yield from replace(self, intermediate=experts.shared).mlp(f"{name}.shared_expert")
            yield from linear(f"{name}.shared_expert_gate", 1, hidden, "other")


def check_mixture(section: Section, experts: Mixture | None) -> None:
    """Refuse routing that our engine doesn't do.

    Raises:
        CheckpointError: a token would pass more experts than there are.
        UnsupportedModel: shares of the chosen experts that aren't normalised.
    """
    if experts is None:
        return
    more = f"num_experts_per_tok {experts.used} is more than the {experts.count} experts"
    section.require(experts.used <= experts.count, more)
    normed = section.values.get("norm_topk_prob", True)
    if normed is not True:
        raise UnsupportedModel(
            f"{section.where} has norm_topk_prob {shown(normed)}; our engine's routers normalise the weights "
            "of the experts that they choose"
        )


def read_decoder(section: Section, defaults: Mapping[str, int]) -> Decoder:
    """Read the sizes that every decoder has, its switches off. `defaults`: those of transformers' class.

    Raises:
        CheckpointError: one is missing, no positive number, or heads can't be grouped.
    """

    def size(name: str, *, most: int = MAX_COUNT) -> int:
        return section.count(SIZES[name], defaults.get(name), most=most)

    hidden, heads, layers = size("hidden"), size("heads"), size("layers", most=MAX_LAYERS)
    kv_heads = section.count("num_key_value_heads", defaults.get("kv_heads", heads))
    section.require(
        heads % kv_heads == 0,
        f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
    )
    return Decoder(
        hidden=hidden,
        intermediate=size("intermediate"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=section.count("head_dim", defaults.get("head_dim", hidden // heads)),
        vocab=size("vocab"),
        max_positions=size("max_positions"),
        windows=(None,) * layers,
    )


def need_silu(section: Section) -> None:
    """Raise UnsupportedModel for an activation other than SiLU, the only one of our engine's gated MLPs."""
    act = section.values.get("hidden_act")
    if act not in (None, "silu"):
        raise UnsupportedModel(f"{section.where} has hidden_act {shown(act)}; only 'silu' is supported")


def windows_by_type(section: Section, window: int, default: Sequence[str]) -> tuple[int | None, ...]:
    """Windows from `layer_types`, or from `default` where the file has none.

    Raises:
        CheckpointError: as `layer_types`.
    """
    types = layer_types(section, default, ("full_attention", "sliding_attention"))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def sliding(slides: Sequence[bool]) -> list[str]:
    """Kinds of layers, as `layer_types` calls them, from whether each has a window."""
    return ["sliding_attention" if each else "full_attention" for each in slides]
