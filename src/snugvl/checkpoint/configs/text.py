"""Text models with one decoder: Llama 2 and 3, Mistral, Phi-3, Qwen2, Qwen2.5 and Qwen3.

Sizes, windows and biases are read by `checkpoint/families/`, as the planner reads them.
"""

from snugvl.checkpoint.architecture import LayerKind, ModelConfig, TextConfig
from snugvl.checkpoint.configs.rotary import read_limit, read_rope
from snugvl.checkpoint.configs.shared import check_heads, dtype_of, quantization_of, ties
from snugvl.checkpoint.families import phi3, text
from snugvl.checkpoint.families.decoder import Decoder
from snugvl.checkpoint.section import Section
from snugvl.errors import UnsupportedModel

ARCHITECTURES = (*text.ARCHITECTURES, *phi3.ARCHITECTURES)


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read the configuration of a text model.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a variant or a quantisation that this engine doesn't run.
    """
    fused = architecture in phi3.ARCHITECTURES
    decoder = phi3.read_decoder(root) if fused else text.read_decoder(root, architecture)
    act = root.get("hidden_act", str, "silu")
    if act != "silu":
        raise UnsupportedModel(f"{root.where} has hidden_act {act!r}; only 'silu' is supported")
    if decoder.mlp_bias:
        raise UnsupportedModel(f"{root.where} has mlp_bias; our own engine runs MLPs without biases")
    config = _text(root, decoder, fused=fused)
    check_heads(config, root.where)
    return ModelConfig(
        architecture=architecture,
        text=config,
        vision=None,
        vision_tokens=None,
        tie_word_embeddings=ties(root, root),
        dtype=dtype_of(root, root),
        quantization=quantization_of(root),
    )


def _text(root: Section, decoder: Decoder, *, fused: bool) -> TextConfig:
    rope = read_rope(root, decoder.head_dim, partial=fused)
    limit = read_limit(root, rope, decoder.max_positions)
    # A window that no context outgrows is none.
    windows = [None if each is None or each >= limit else each for each in decoder.windows]
    sliding: LayerKind = "sliding"
    full: LayerKind = "full"
    return TextConfig(
        hidden_size=decoder.hidden,
        num_layers=decoder.layers,
        num_heads=decoder.heads,
        num_kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        intermediate_size=decoder.intermediate,
        vocab_size=decoder.vocab,
        max_position_embeddings=limit,
        rms_norm_eps=root.get("rms_norm_eps", float, 1e-5 if fused else 1e-6),
        rope=rope,
        kinds=tuple(full if each is None else sliding for each in windows),
        qkv_bias=decoder.qkv_bias,
        o_bias=decoder.o_bias,
        qk_norm=decoder.qk_norm,
        window=next((each for each in windows if each is not None), None),
        fused=fused,
    )
