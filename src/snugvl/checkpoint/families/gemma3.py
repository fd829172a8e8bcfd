"""Gemma 3: five layers with a window to one without, four norms a layer, a SigLIP encoder of fixed size."""

from collections.abc import Iterator
from dataclasses import replace

from snugvl.checkpoint.families.decoder import Decoder, read_decoder, sliding, windows_by_type
from snugvl.checkpoint.families.traits import Expected, Family, Network, Prompting, Traits, norm
from snugvl.checkpoint.families.vision import edge, images_of, read_square, siglip_tensors
from snugvl.checkpoint.image_rules import FixedSquare
from snugvl.checkpoint.section import Section
from snugvl.errors import CheckpointError, UnsupportedModel

SEES, TEXT = "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"
_DEFAULTS = {
    "hidden": 2304, "intermediate": 9216, "layers": 26, "heads": 8, "kv_heads": 4, "head_dim": 256,
    "vocab": 262208, "max_positions": 131072,
}  # fmt: skip
_SIGLIP = {"depth": 12, "hidden": 768, "intermediate": 3072, "heads": 12, "image": 224, "patch": 16}
_ALIASES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("model.vision_tower.vision_model.", "model.vision_tower."),
)
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Gemma 3 configuration, with a vision tower (4B and up) or without (1B).

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: pan & scan, which makes several images of one, or a pooling head, is switched on.
    """
    tied = root.get("tie_word_embeddings", bool, True)
    if architecture == TEXT:
        decoder = _decoder(root)
        tensors = tuple(decoder.tensors("model", tied, norms=_NORMS))
        return Network("gemma3_text", architecture, decoder.facts(), None, tied, tensors)
    decoder = _decoder(root.section("text_config"))
    vision = root.section("vision_config")
    if vision.get("vision_use_head", bool, False):
        raise UnsupportedModel(f"{vision.where} has vision_use_head; Gemma 3 as published has no such head")
    tower = read_square(vision, _SIGLIP)
    settings = images_of(images, root.where)
    if settings.values.get("do_pan_and_scan"):
        raise UnsupportedModel(f"{settings.where} has do_pan_and_scan; only one square per image is known")
    image_tokens = root.count("mm_tokens_per_image", 256)
    side = edge(settings, "size", "height", default=tower.image)
    tokens_per_side = round(image_tokens**0.5)
    if side != tower.image or tokens_per_side**2 != image_tokens or tower.grid % tokens_per_side:
        raise CheckpointError(
            f"{root.where}: {image_tokens} tokens of an image of {side} pixels do not divide the encoder's "
            f"{tower.grid}×{tower.grid} patches of {tower.image} pixels"
        )
    rule = FixedSquare(side, tower.patch, image_tokens)
    return Network(
        family="gemma3",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower.facts(rule, merge=tower.grid // tokens_per_side),
        tied=tied,
        tensors=(
            *siglip_tensors(tower, "model.vision_tower"),
            *_projector(tower.hidden, decoder.hidden),
            *decoder.tensors("model.language_model", tied, norms=_NORMS),
        ),
        aliases=_ALIASES,
    )


def _decoder(text: Section) -> Decoder:
    decoder, pattern = read_decoder(text, _DEFAULTS), text.count("sliding_window_pattern", 6)
    types = sliding([(index + 1) % pattern != 0 for index in range(decoder.layers)])
    windows = windows_by_type(text, text.count("sliding_window", 4096), types)
    bias = text.get("attention_bias", bool, False)
    return replace(decoder, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _projector(vision: int, hidden: int) -> Iterator[Expected]:
    name = "model.multi_modal_projector"
    yield Expected(f"{name}.mm_input_projection_weight", (vision, hidden), "connector")
    yield from norm(f"{name}.mm_soft_emb_norm", vision, "connector")


FAMILY = Family(
    architectures=(SEES, TEXT),
    describe=describe,
    # `rope_scaling` of the larger Gemmas is linear, 8; vLLM's `LinearScalingRotaryEmbedding` keeps all of its
    # positions.
    traits={"gemma3": Traits(stretched=8, full_every=6), "gemma3_text": Traits(stretched=1)},
    # Google's documentation gives it no boxes, and its team says that they are not a trained ability
    # (discussion 38 of google/gemma-3-4b-it).
    prompting=dict.fromkeys((SEES, "Gemma3nForConditionalGeneration"), Prompting("Gemma 3", "no boxes")),
    projectors={"gemma3": None},
)
