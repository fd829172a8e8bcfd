"""Qwen2.5-VL: a tower of RMS norms and gated MLPs, windowed but for a few blocks, on a Qwen2.5 decoder.

The defaults are those of transformers' `Qwen2_5_VLConfig`. Files of before transformers 4.52, and so the
Hub's, have the decoder's fields at the top level.
"""

from collections.abc import Iterator
from dataclasses import replace

from snugvl.checkpoint.architecture import ModelConfig, VisionConfig
from snugvl.checkpoint.families.decoder import (
    SIZES,
    Decoder,
    need_silu,
    read_decoder,
    sliding,
    windows_by_type,
)
from snugvl.checkpoint.families.qwen_tower import (
    GGUF_TOKENS,
    block_tensors,
    check_frame,
    check_width,
    patch_shape,
    read_tokens,
    read_tower,
    tower_facts,
)
from snugvl.checkpoint.families.rotary import read_mrope
from snugvl.checkpoint.families.traits import (
    Expected,
    Family,
    Network,
    Prompting,
    Resized,
    Traits,
    linear,
    model_config,
    norm,
)
from snugvl.checkpoint.section import Section, shown
from snugvl.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)
_DEFAULTS = {
    "hidden": 8192, "intermediate": 29568, "layers": 80, "heads": 64, "kv_heads": 8,
    "vocab": 152064, "max_positions": 32768,
}  # fmt: skip
_TOWER = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "hidden_act": "silu"}
ALIASES = (
    ("visual.", "model.visual."),
    ("model.visual.", "model.visual."),
    ("model.language_model.", "model.language_model."),
    ("model.", "model.language_model."),
)
_BLOCKS = "fullatt_block_indexes"


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Qwen2.5-VL configuration for the plan.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    text, vision = _text(root), root.section("vision_config")
    decoder, tower = _decoder(text), _tower(vision)
    check_width(vision, tower, decoder.hidden)
    tied = _tied(root, text)
    return Network(
        family="qwen2_5_vl",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower_facts(tower, images, root.where),
        tied=tied,
        tensors=(*_tower_tensors(tower, "model.visual"), *decoder.tensors("model.language_model", tied)),
        aliases=ALIASES,
    )


def parse(root: Section, architecture: str) -> ModelConfig:
    """Read the configuration of a Qwen2.5-VL for our engine.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a quantisation or a variant that this engine doesn't run.
    """
    text, vision = _text(root), root.section("vision_config")
    text.need(*SIZES.values())
    for section in (text, vision):
        need_silu(section)
    if text.get("use_sliding_window", bool, False):
        raise UnsupportedModel(
            f"{text.where} has use_sliding_window true; only false, as published, is supported"
        )
    decoder, tower = _decoder(text), _tower(vision)
    rope = read_mrope(text, decoder.head_dim, (16, 24, 24), 1e6, interleaved=False)
    check_frame(vision, tower, decoder.hidden)
    merged, window = tower.patch_size * tower.spatial_merge_size, vision.count("window_size", 112)
    vision.require(
        window % merged == 0,
        f"window_size {window} is not a multiple of patch_size {tower.patch_size} x "
        f"spatial_merge_size {tower.spatial_merge_size}",
    )
    vision.require(
        all(0 <= block < tower.depth for block in tower.full_blocks),
        f"{_BLOCKS} {list(tower.full_blocks)} name blocks beyond {tower.depth - 1}",
    )
    return model_config(
        root,
        architecture,
        decoder.config(rope, text.get("rms_norm_eps", float, 1e-5)),
        tied=_tied(root, text),
        inner=text,
        vision=tower,
        tokens=read_tokens(root, 151652),
    )


def _text(root: Section) -> Section:
    return root.section("text_config") if root.values.get("text_config") else root


def _tied(root: Section, text: Section) -> bool:
    """Whether lm_head is tied, as either section says; in a flat file they are the same one."""
    return any(part.get("tie_word_embeddings", bool, False) for part in (root, text))


def _decoder(text: Section) -> Decoder:
    decoder = replace(read_decoder(text, _DEFAULTS), qkv_bias=True)
    if not text.get("use_sliding_window", bool, False):
        return decoder
    first = text.get("max_window_layers", int, 80)
    types = sliding([index >= first for index in range(decoder.layers)])
    return replace(decoder, windows=windows_by_type(text, text.count("sliding_window", 4096), types))


def _tower(section: Section) -> VisionConfig:
    blocks = section.get(_BLOCKS, list, [7, 15, 23, 31])
    if not all(isinstance(block, int) for block in blocks):
        raise CheckpointError(f"{section.where} has {_BLOCKS} {shown(blocks)}, expected block numbers")
    tower = read_tower(section, [], _TOWER)
    return replace(
        tower,
        num_position_embeddings=0,
        window=section.count("window_size", 112) // tower.patch_size,
        full_blocks=tuple(blocks),
        tokens_per_second=section.count("tokens_per_second", 4),
    )


def _tower_tensors(tower: VisionConfig, name: str) -> Iterator[Expected]:
    hidden = tower.hidden_size
    yield Expected(f"{name}.patch_embed.proj.weight", patch_shape(tower), "vision")
    yield from block_tensors(tower, name, ("gate_proj", "up_proj", "down_proj"), bias=False)
    merged = hidden * tower.spatial_merge_size**2
    yield from norm(f"{name}.merger.ln_q", hidden, "connector")
    yield from linear(f"{name}.merger.mlp.0", merged, merged, "connector", bias=True)
    yield from linear(f"{name}.merger.mlp.2", tower.out_hidden_size, merged, "connector", bias=True)


FAMILY = Family(
    architectures=ARCHITECTURES,
    describe=describe,
    native=ARCHITECTURES,
    parse=parse,
    network="snugvl.models.networks:Qwen25VL",
    traits={"qwen2_5_vl": Traits(gguf=("qwen2vl",), mrope=True), "qwen2_vl": Traits(mrope=True)},
    # Section 2 of "Qwen2.5-VL Technical Report" (arXiv 2502.13923); limits of its preprocessor_config.json.
    prompting=dict.fromkeys(
        ARCHITECTURES, Prompting("Qwen2.5-VL", "pixels", Resized(28, min_pixels=3_136, max_pixels=12_845_056))
    ),
    projectors=dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger"), GGUF_TOKENS),
)
