"""The decoder that nearly all families share: attention with grouped keys, a gated MLP, RMS norms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from snugvl.checkpoint.facts import KVLayer, TextFacts
from snugvl.checkpoint.families.network import Expected, linear, norm
from snugvl.checkpoint.section import MAX_LAYERS, Section, shown
from snugvl.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: `count` gated MLPs of `intermediate`, in the layers that `sparse` says."""

    count: int
    intermediate: int
    sparse: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder and its switches. `windows`: of each layer, None for all tokens."""

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
    experts: Experts | None = None

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int],
        *,
        windows: tuple[int | None, ...],
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        experts: Experts | None = None,
    ) -> "Decoder":
        """From what `read_sizes` returns."""
        return cls(
            hidden=sizes["hidden"],
            intermediate=sizes["intermediate"],
            layers=sizes["layers"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            head_dim=sizes["head_dim"],
            vocab=sizes["vocab"],
            max_positions=sizes["max_positions"],
            windows=windows,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            experts=experts,
        )

    def facts(self) -> TextFacts:
        """The same as the planner's nouns."""
        kv = tuple(KVLayer(self.kv_heads, self.head_dim, window) for window in self.windows)
        return TextFacts(
            self.hidden, self.intermediate, self.layers, self.heads, self.vocab, self.max_positions, kv
        )

    def tensors(self, prefix: str) -> Iterator[Expected]:
        """Embedding, layers and final norm under `prefix`."""
        yield Expected(f"{prefix}.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        for index in range(self.layers):
            layer = f"{prefix}.layers.{index}"
            yield from self.attention(f"{layer}.self_attn")
            if self.experts and self.experts.sparse[index]:
                yield from _mixture(f"{layer}.mlp", self.hidden, self.experts)
            else:
                yield from self.mlp(f"{layer}.mlp")
            yield from norm(f"{layer}.input_layernorm", self.hidden)
            yield from norm(f"{layer}.post_attention_layernorm", self.hidden)
        yield from norm(f"{prefix}.norm", self.hidden)

    def attention(self, name: str) -> Iterator[Expected]:
        """Four projections, and the norms of queries and keys where the family has them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield from linear(f"{name}.{part}_proj", rows, self.hidden, "linear", bias=self.qkv_bias)
        yield from linear(f"{name}.o_proj", self.hidden, queries, "linear", bias=self.o_bias)
        if self.qk_norm:
            yield from norm(f"{name}.q_norm", self.head_dim)
            yield from norm(f"{name}.k_norm", self.head_dim)

    def mlp(self, name: str) -> Iterator[Expected]:
        """Gate, up and down."""
        for part in ("gate", "up"):
            yield from linear(
                f"{name}.{part}_proj", self.intermediate, self.hidden, "linear", bias=self.mlp_bias
            )
        yield from linear(f"{name}.down_proj", self.hidden, self.intermediate, "linear", bias=self.mlp_bias)


def _mixture(name: str, hidden: int, experts: Experts) -> Iterator[Expected]:
    """Experts as one tensor each way, as Qwen3-VL's files have them, and the router, which stays 16-bit."""
    yield Expected(
        f"{name}.experts.gate_up_proj", (experts.count, 2 * experts.intermediate, hidden), "expert"
    )
    yield Expected(f"{name}.experts.down_proj", (experts.count, hidden, experts.intermediate), "expert")
    yield Expected(f"{name}.gate.weight", (experts.count, hidden), "other")


def read_sizes(section: Section, defaults: Mapping[str, int]) -> dict[str, int]:
    """The sizes every decoder has. `defaults`: what transformers' class assumes when a file leaves one out.

    Raises:
        CheckpointError: one is missing, no positive number, or heads can't be grouped.
    """
    sizes = {
        "hidden": section.count("hidden_size", defaults.get("hidden")),
        "intermediate": section.count("intermediate_size", defaults.get("intermediate")),
        "layers": section.count("num_hidden_layers", defaults.get("layers")),
        "heads": section.count("num_attention_heads", defaults.get("heads")),
        "vocab": section.count("vocab_size", defaults.get("vocab")),
        "max_positions": section.count("max_position_embeddings", defaults.get("max_positions")),
    }
    if sizes["layers"] > MAX_LAYERS:
        raise CheckpointError(f"{section.where} claims {sizes['layers']:,} layers; that is no model")
    sizes["kv_heads"] = section.count("num_key_value_heads", defaults.get("kv_heads", sizes["heads"]))
    sizes["head_dim"] = section.count("head_dim", defaults.get("head_dim", sizes["hidden"] // sizes["heads"]))
    if sizes["heads"] % sizes["kv_heads"]:
        raise CheckpointError(
            f"{section.where}: num_attention_heads {sizes['heads']} is no multiple of "
            f"num_key_value_heads {sizes['kv_heads']}"
        )
    return sizes


def windows_by_type(
    section: Section, layers: int, window: int | None, default: Sequence[str]
) -> tuple[int | None, ...]:
    """Windows from `layer_types`, or from `default` where the file has none.

    Raises:
        CheckpointError: the list is not as long as the model, or names a kind of layer we don't know.
    """
    types = section.get("layer_types", list, list(default))
    if len(types) != layers:
        raise CheckpointError(f"{section.where} has {len(types)} layer_types for {layers} layers")
    known = {"full_attention", "sliding_attention"}
    for kind in types:
        if not isinstance(kind, str) or kind not in known:
            raise CheckpointError(
                f"{section.where} has a layer of type {shown(kind)}; known are {sorted(known)}"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
