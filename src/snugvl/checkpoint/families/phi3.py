"""Phi-3, Phi-3.5 and Phi-4-mini: queries, keys and values in one matrix, gate and up in another."""

from collections.abc import Iterator

from snugvl.checkpoint.families.decoder import Decoder, read_sizes
from snugvl.checkpoint.families.network import Expected, Network, head, linear, norm
from snugvl.checkpoint.section import Section

ARCHITECTURES = ("Phi3ForCausalLM",)
_DEFAULTS = {
    "hidden": 3072, "intermediate": 8192, "layers": 32, "heads": 32, "vocab": 32064, "max_positions": 4096,
}  # fmt: skip


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Phi-3 configuration.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    decoder = read_decoder(root)
    tied = root.get("tie_word_embeddings", bool, False)
    return Network(
        family="phi3",
        architecture=architecture,
        text=decoder.facts(),
        vision=None,
        tied=tied,
        tensors=(*_tensors(decoder), *head(tied, decoder.vocab, decoder.hidden)),
        native=True,
    )


def read_decoder(section: Section) -> Decoder:
    """Sizes, and one window for all layers or none."""
    sizes = read_sizes(section, _DEFAULTS)
    window = section.count("sliding_window") if section.values.get("sliding_window") is not None else None
    return Decoder.of(sizes, windows=(window,) * sizes["layers"])


def _tensors(decoder: Decoder) -> Iterator[Expected]:
    yield Expected("model.embed_tokens.weight", (decoder.vocab, decoder.hidden), "embedding")
    queries = decoder.heads * decoder.head_dim
    fused = queries + 2 * decoder.kv_heads * decoder.head_dim
    for index in range(decoder.layers):
        layer = f"model.layers.{index}"
        yield from linear(f"{layer}.self_attn.qkv_proj", fused, decoder.hidden, "linear")
        yield from linear(f"{layer}.self_attn.o_proj", decoder.hidden, queries, "linear")
        yield from linear(f"{layer}.mlp.gate_up_proj", 2 * decoder.intermediate, decoder.hidden, "linear")
        yield from linear(f"{layer}.mlp.down_proj", decoder.hidden, decoder.intermediate, "linear")
        yield from norm(f"{layer}.input_layernorm", decoder.hidden)
        yield from norm(f"{layer}.post_attention_layernorm", decoder.hidden)
    yield from norm("model.norm", decoder.hidden)
