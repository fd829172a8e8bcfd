"""InternVL3 in transformers' form (-hf): InternViT on tiles, pixel shuffle, a Qwen2.5 (or Llama) decoder."""

from collections.abc import Iterator

from snugvl.checkpoint.families.text import LLAMA, QWEN2, QWEN3, read_text
from snugvl.checkpoint.families.traits import Expected, Family, Network, Prompting, Traits, linear, norm, ties
from snugvl.checkpoint.families.vision import SquareTower, edge, images_of, read_square
from snugvl.checkpoint.image_rules import TilesAndThumbnail
from snugvl.checkpoint.section import Section
from snugvl.errors import CheckpointError, UnsupportedModel

ARCHITECTURE, ORIGINAL = "InternVLForConditionalGeneration", "InternVLChatModel"
_DECODERS = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA}
_INTERNVIT = {"depth": 24, "hidden": 1024, "intermediate": 4096, "heads": 16, "image": 448, "patch": 14}
MAX_MERGE = 64
MAX_TILES = 256  # every grid of so many is looked at
_ALIASES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read an InternVL configuration.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a decoder or a tower of another plan.
    """
    text, vision = root.section("text_config"), root.section("vision_config")
    kind = text.get("model_type", str, "qwen2")
    if kind not in _DECODERS:
        raise UnsupportedModel(
            f"{text.where} is a {kind!r} decoder; known in InternVL are {', '.join(_DECODERS)}"
        )
    decoder, tower = read_text(text, _DECODERS[kind]), read_square(vision, _INTERNVIT)
    if not vision.get("use_mean_pooling", bool, True) or vision.get("use_mask_token", bool, False):
        raise UnsupportedModel(f"{vision.where} has a mask token or no mean pooling; that tower isn't known")
    ratio = root.get("downsample_ratio", float, 0.5)
    merge = round(1 / ratio) if 1 / MAX_MERGE <= ratio <= 1 else 0
    if not merge or tower.grid % merge:
        raise CheckpointError(
            f"{root.where} has downsample_ratio {ratio}, which does not divide {tower.grid} patches"
        )
    # The Hub's files of every size store an lm_head and say so; transformers' own default is to tie.
    tied = ties(root, text, default=True)
    rule = _rule(images_of(images, root.where), tower, (tower.grid // merge) ** 2)
    return Network(
        family="internvl",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower.facts(rule, merge),
        tied=tied,
        tensors=(
            *_tower_tensors(tower, vision, "model.vision_tower"),
            *_projector(tower.hidden * merge**2, decoder.hidden),
            *decoder.tensors("model.language_model", tied),
        ),
        aliases=_ALIASES,
    )


def _tower_tensors(tower: SquareTower, vision: Section, name: str) -> Iterator[Expected]:
    hidden, inner = tower.hidden, tower.intermediate
    bias, qk_norm = vision.get("attention_bias", bool, False), vision.get("use_qk_norm", bool, False)
    rms = vision.get("norm_type", str, "layer_norm") == "rms_norm"
    yield Expected(f"{name}.embeddings.cls_token", (1, 1, hidden), "vision")
    yield Expected(f"{name}.embeddings.position_embeddings", (1, tower.grid**2 + 1, hidden), "vision")
    yield Expected(f"{name}.embeddings.patch_embeddings.projection.weight", tower.patch_shape, "vision")
    yield Expected(f"{name}.embeddings.patch_embeddings.projection.bias", (hidden,), "vision")
    for index in range(tower.depth):
        layer = f"{name}.encoder.layer.{index}"
        for scale in ("lambda_1", "lambda_2"):
            yield Expected(f"{layer}.{scale}", (hidden,), "vision")
        for part in ("q", "k", "v"):
            yield from linear(f"{layer}.attention.{part}_proj", hidden, hidden, "vision", bias=bias)
        yield from linear(f"{layer}.attention.projection_layer", hidden, hidden, "vision", bias=True)
        if qk_norm:
            yield from norm(f"{layer}.attention.q_norm", hidden, "vision")
            yield from norm(f"{layer}.attention.k_norm", hidden, "vision")
        yield from linear(f"{layer}.mlp.fc1", inner, hidden, "vision", bias=True)
        yield from linear(f"{layer}.mlp.fc2", hidden, inner, "vision", bias=True)
        yield from norm(f"{layer}.layernorm_before", hidden, "vision", bias=not rms)
        yield from norm(f"{layer}.layernorm_after", hidden, "vision", bias=not rms)


def _rule(images: Section, tower: SquareTower, tokens: int) -> TilesAndThumbnail:
    """transformers' InternVLProcessor crops into tiles whatever crop_to_patches in the file says."""
    side = edge(images, "size", "height", default=tower.image)
    least, most = images.count("min_patches", 1), images.count("max_patches", 12, most=MAX_TILES)
    if side != tower.image or least > most:
        raise CheckpointError(
            f"{images.where} has {least} to {most} tiles of {side} pixels; the tower takes {tower.image}"
        )
    return TilesAndThumbnail(side, tower.patch, tokens, least, most)


def _projector(merged: int, hidden: int) -> Iterator[Expected]:
    name = "model.multi_modal_projector"
    yield from norm(f"{name}.layer_norm", merged, "connector", bias=True)
    yield from linear(f"{name}.linear_1", hidden, merged, "connector", bias=True)
    yield from linear(f"{name}.linear_2", hidden, hidden, "connector", bias=True)


FAMILY = Family(
    architectures=(ARCHITECTURE,),
    describe=describe,
    traits={"internvl": Traits()},
    # "Chat data format" of its documentation, "Grounding / Detection data".
    prompting=dict.fromkeys((ARCHITECTURE, ORIGINAL), Prompting("InternVL", "tags")),
)
