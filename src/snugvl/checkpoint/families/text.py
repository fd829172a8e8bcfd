"""Text-only decoders with one plan: Llama 2 and 3, Mistral, Qwen2 and Qwen2.5, Qwen3, Phi-3 and Phi-4-mini.

Phi-3's files have queries, keys and values in one matrix, gate and up in another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families.decoder import Decoder, need_silu, read_decoder, sliding, windows_by_type
from snugvl.checkpoint.families.rotary import read_limit, read_rope
from snugvl.checkpoint.families.traits import Family, GgufNetwork, Network, Traits, model_config, ties
from snugvl.checkpoint.section import Section
from snugvl.errors import UnsupportedModel

LLAMA, MISTRAL, PHI3 = "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True)
class Variant:
    """The differences of an architecture from a plain Llama.

    `defaults`: values that transformers' class takes for fields that config.json lacks.
    """

    family: str
    defaults: Mapping[str, int]
    qkv_bias: bool = False
    qk_norm: bool = False
    biased_by_config: bool = False
    fused: bool = False
    epsilon: float = 1e-6


_QWEN = {
    "hidden": 4096, "intermediate": 22016, "layers": 32, "heads": 32, "kv_heads": 32,
    "vocab": 151936, "max_positions": 32768,
}  # fmt: skip
_LLAMA = {
    "hidden": 4096, "intermediate": 11008, "layers": 32, "heads": 32, "vocab": 32000, "max_positions": 2048,
}  # fmt: skip
_MISTRAL = _LLAMA | {"intermediate": 14336, "kv_heads": 8, "max_positions": 131072}
_PHI3 = {
    "hidden": 3072, "intermediate": 8192, "layers": 32, "heads": 32, "vocab": 32064, "max_positions": 4096,
}  # fmt: skip
KINDS: Mapping[str, Variant] = {
    LLAMA: Variant("llama", _LLAMA, biased_by_config=True),
    MISTRAL: Variant("mistral", _MISTRAL),
    QWEN2: Variant("qwen2", _QWEN, qkv_bias=True),
    QWEN3: Variant("qwen3", _QWEN | {"head_dim": 128}, qk_norm=True, biased_by_config=True),
    PHI3: Variant("phi3", _PHI3, fused=True, epsilon=1e-5),
}


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read the configuration of a text-only decoder for the plan.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    decoder, tied = read_text(root, architecture), ties(root, root)
    return Network(
        family=KINDS[architecture].family,
        architecture=architecture,
        text=decoder.facts(),
        vision=None,
        tied=tied,
        tensors=tuple(decoder.tensors("model", tied)),
    )


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read the configuration of a text-only decoder for our engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a variant or a quantisation that this engine doesn't run.
    """
    kind, decoder = KINDS[architecture], read_text(root, architecture)
    need_silu(root)
    if decoder.mlp_bias:
        raise UnsupportedModel(f"{root.where} has mlp_bias; our own engine runs MLPs without biases")
    rope = read_rope(root, decoder.head_dim, partial=kind.fused)
    limit = read_limit(root, rope, decoder.max_positions)
    config = decoder.config(rope, root.get("rms_norm_eps", float, kind.epsilon), limit)
    return model_config(root, architecture, config, tied=ties(root, root))


def read_text(section: Section, architecture: str) -> Decoder:
    """The decoder of a text model, or of a model that sees and has such a decoder inside."""
    kind = KINDS[architecture]
    decoder = read_decoder(section, kind.defaults)
    bias = kind.biased_by_config and section.get("attention_bias", bool, False)
    return replace(
        decoder,
        windows=_windows(section, architecture, decoder.layers),
        qkv_bias=kind.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=architecture == LLAMA and section.get("mlp_bias", bool, False),
        qk_norm=kind.qk_norm,
        fused=kind.fused,
    )


def _windows(section: Section, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Windows of the layers: Phi-3's in all if set, Mistral's in all unless null, Qwen's from
    max_window_layers on if switched on."""
    default = None if architecture == PHI3 else 4096
    window = section.values.get("sliding_window", default)
    if architecture == LLAMA or window is None:
        return (None,) * layers
    if architecture in (MISTRAL, PHI3):
        return (section.count("sliding_window", default),) * layers
    if not section.get("use_sliding_window", bool, False):
        return (None,) * layers
    first = section.count("max_window_layers", 28) if section.values.get("max_window_layers") != 0 else 0
    types = sliding([index >= first for index in range(layers)])
    return windows_by_type(section, section.count("sliding_window", default), types)


FAMILY = Family(
    architectures=tuple(KINDS),
    describe=describe,
    native=tuple(KINDS),
    parse=parse,
    network="snugvl.models.networks:CausalLM",
    traits={kind.family: Traits() for kind in KINDS.values()},
    gguf={
        "llama": GgufNetwork(LLAMA, alternating=True),
        "qwen2": GgufNetwork(QWEN2),
        "qwen3": GgufNetwork(QWEN3),
    },
)
