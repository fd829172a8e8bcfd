"""Text-only decoders with one plan: Llama 2 and 3, Mistral, Qwen2 and Qwen2.5, Qwen3."""

from collections.abc import Mapping
from dataclasses import dataclass

from snugvl.checkpoint.families.decoder import Decoder, read_sizes, windows_by_type
from snugvl.checkpoint.families.network import Network, head
from snugvl.checkpoint.section import Section

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True)
class Kind:
    """How one of them differs. `defaults`: what transformers' class assumes for a field left out."""

    family: str
    defaults: Mapping[str, int]
    qkv_bias: bool = False
    qk_norm: bool = False
    biased_by_config: bool = False


_QWEN = {
    "hidden": 4096, "intermediate": 22016, "layers": 32, "heads": 32, "kv_heads": 32,
    "vocab": 151936, "max_positions": 32768,
}  # fmt: skip
_LLAMA = {
    "hidden": 4096, "intermediate": 11008, "layers": 32, "heads": 32, "vocab": 32000, "max_positions": 2048,
}  # fmt: skip
_MISTRAL = _LLAMA | {"intermediate": 14336, "kv_heads": 8, "max_positions": 131072}
KINDS: Mapping[str, Kind] = {
    LLAMA: Kind("llama", _LLAMA, biased_by_config=True),
    MISTRAL: Kind("mistral", _MISTRAL),
    QWEN2: Kind("qwen2", _QWEN, qkv_bias=True),
    QWEN3: Kind("qwen3", _QWEN | {"head_dim": 128}, qk_norm=True, biased_by_config=True),
}
ARCHITECTURES = tuple(KINDS)


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read the configuration of a text-only decoder.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    decoder = read_decoder(root, architecture)
    tied = root.get("tie_word_embeddings", bool, False)
    return Network(
        family=KINDS[architecture].family,
        architecture=architecture,
        text=decoder.facts(),
        vision=None,
        tied=tied,
        tensors=(*decoder.tensors("model"), *head(tied, decoder.vocab, decoder.hidden)),
        native=True,
    )


def read_decoder(section: Section, architecture: str) -> Decoder:
    """The decoder of a text model, or of a model that sees and has such a decoder inside."""
    kind = KINDS[architecture]
    sizes = read_sizes(section, kind.defaults)
    bias = kind.biased_by_config and section.get("attention_bias", bool, False)
    return Decoder.of(
        sizes,
        windows=_windows(section, architecture, sizes["layers"]),
        qkv_bias=kind.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=architecture == LLAMA and section.get("mlp_bias", bool, False),
        qk_norm=kind.qk_norm,
    )


def _windows(section: Section, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Mistral slides everywhere unless told null; Qwen above max_window_layers if switched on."""
    if architecture == LLAMA:
        return (None,) * layers
    window = section.values.get("sliding_window", 4096)
    if architecture == MISTRAL:
        return (None if window is None else section.count("sliding_window", 4096),) * layers
    if not section.get("use_sliding_window", bool, False) or window is None:
        return (None,) * layers
    first = section.count("max_window_layers", 28) if section.values.get("max_window_layers") != 0 else 0
    types = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    return windows_by_type(section, layers, section.count("sliding_window", 4096), types)
