"""Qwen3-VL, dense (2B, 4B, 8B, 32B) and as a mixture of experts (30B-A3B, 235B-A22B)."""

from snugvl.checkpoint.families.decoder import Decoder, Experts, read_sizes
from snugvl.checkpoint.families.network import Network, head, images_of
from snugvl.checkpoint.families.qwen_tower import read_rule, read_tower
from snugvl.checkpoint.section import MAX_LAYERS, Section
from snugvl.errors import CheckpointError

DENSE = "Qwen3VLForConditionalGeneration"
MIXTURE = "Qwen3VLMoeForConditionalGeneration"
ARCHITECTURES = (DENSE, MIXTURE)

# What transformers' configuration classes assume for a field that a file leaves out.
_DENSE_DEFAULTS = {
    "hidden": 4096, "intermediate": 22016, "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128,
    "vocab": 151936, "max_positions": 128000,
}  # fmt: skip
_MIXTURE_DEFAULTS = {
    "hidden": 2048, "intermediate": 5632, "layers": 24, "heads": 16, "kv_heads": 16,
    "vocab": 151936, "max_positions": 128000,
}  # fmt: skip


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Qwen3-VL configuration.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    mixture = architecture == MIXTURE
    text = root.section("text_config")
    sizes = read_sizes(text, _MIXTURE_DEFAULTS if mixture else _DENSE_DEFAULTS)
    bias = text.get("attention_bias", bool, False)
    decoder = Decoder.of(
        sizes,
        windows=(None,) * sizes["layers"],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=_experts(text, sizes["layers"]) if mixture else None,
    )
    # transformers reads the top level; older files repeat the text model's value there.
    tied = root.get("tie_word_embeddings", bool, text.values.get("tie_word_embeddings", False))
    vision = root.section("vision_config")
    levels = vision.get("deepstack_visual_indexes", list, [8, 16, 24])
    if len(levels) > MAX_LAYERS:
        raise CheckpointError(
            f"{vision.where} has {len(levels):,} deepstack_visual_indexes; that is no model"
        )
    tower = read_tower(vision, decoder.hidden, len(levels))
    rule = read_rule(images_of(images, root.where), tower.patch, tower.merge)
    return Network(
        family="qwen3_vl_moe" if mixture else "qwen3_vl",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower.facts(rule),
        tied=tied,
        tensors=(
            *tower.tensors("model.visual"),
            *decoder.tensors("model.language_model"),
            *head(tied, decoder.vocab, decoder.hidden),
        ),
        native=not mixture,
    )


def _experts(text: Section, layers: int) -> Experts:
    dense = {index for index in text.get("mlp_only_layers", list, []) if isinstance(index, int)}
    step = text.count("decoder_sparse_step", 1)
    return Experts(
        count=text.count("num_experts", text.values.get("num_local_experts") or 60),
        intermediate=text.count("moe_intermediate_size", 1408),
        sparse=tuple(index not in dense and (index + 1) % step == 0 for index in range(layers)),
    )
