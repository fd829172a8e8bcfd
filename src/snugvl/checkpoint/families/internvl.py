"""InternVL3 in transformers' form (-hf): InternViT on tiles, pixel shuffle, a Qwen2.5 (or Llama) decoder."""

from collections.abc import Iterator
from dataclasses import dataclass

from snugvl.checkpoint.facts import VisionFacts
from snugvl.checkpoint.families.network import (
    Expected,
    Network,
    check_patch,
    edge,
    head,
    images_of,
    linear,
    norm,
    one_side,
)
from snugvl.checkpoint.families.text import LLAMA, QWEN2, QWEN3, read_decoder
from snugvl.checkpoint.image_rules import TilesAndThumbnail
from snugvl.checkpoint.section import MAX_LAYERS, Section
from snugvl.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = ("InternVLForConditionalGeneration",)
_DECODERS = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA}
MAX_MERGE = 64
MAX_TILES = 256  # every grid of so many is looked at
_ALIASES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


@dataclass(frozen=True, slots=True)
class _Tower:
    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    image: int
    patch: int
    bias: bool
    qk_norm: bool
    rms: bool

    def tensors(self, name: str) -> Iterator[Expected]:
        positions, shape = (
            (self.image // self.patch) ** 2 + 1,
            (self.hidden, self.channels, self.patch, self.patch),
        )
        yield Expected(f"{name}.embeddings.cls_token", (1, 1, self.hidden), "vision")
        yield Expected(f"{name}.embeddings.position_embeddings", (1, positions, self.hidden), "vision")
        yield Expected(f"{name}.embeddings.patch_embeddings.projection.weight", shape, "vision")
        yield Expected(f"{name}.embeddings.patch_embeddings.projection.bias", (self.hidden,), "vision")
        for index in range(self.depth):
            layer = f"{name}.encoder.layer.{index}"
            for scale in ("lambda_1", "lambda_2"):
                yield Expected(f"{layer}.{scale}", (self.hidden,), "vision")
            for part in ("q", "k", "v"):
                matrix = f"{layer}.attention.{part}_proj"
                yield from linear(matrix, self.hidden, self.hidden, "vision", bias=self.bias)
            yield from linear(
                f"{layer}.attention.projection_layer", self.hidden, self.hidden, "vision", bias=True
            )
            if self.qk_norm:
                yield from norm(f"{layer}.attention.q_norm", self.hidden, "vision")
                yield from norm(f"{layer}.attention.k_norm", self.hidden, "vision")
            yield from linear(f"{layer}.mlp.fc1", self.intermediate, self.hidden, "vision", bias=True)
            yield from linear(f"{layer}.mlp.fc2", self.hidden, self.intermediate, "vision", bias=True)
            yield from norm(f"{layer}.layernorm_before", self.hidden, "vision", bias=not self.rms)
            yield from norm(f"{layer}.layernorm_after", self.hidden, "vision", bias=not self.rms)


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read an InternVL configuration.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
        UnsupportedModel: a decoder or a tower of another plan.
    """
    text = root.section("text_config")
    kind = text.get("model_type", str, "qwen2")
    if kind not in _DECODERS:
        raise UnsupportedModel(
            f"{text.where} is a {kind!r} decoder; known in InternVL are {', '.join(_DECODERS)}"
        )
    decoder = read_decoder(text, _DECODERS[kind])
    tower = _read_tower(root.section("vision_config"))
    ratio = root.get("downsample_ratio", float, 0.5)
    merge = round(1 / ratio) if 1 / MAX_MERGE <= ratio <= 1 else 0
    grid = tower.image // tower.patch
    if not merge or grid % merge:
        raise CheckpointError(
            f"{root.where} has downsample_ratio {ratio}, which does not divide {grid} patches"
        )
    # The Hub's files of every size store an lm_head and say so; transformers' own default is to tie.
    tied = root.get("tie_word_embeddings", bool, text.get("tie_word_embeddings", bool, True))
    rule = _rule(images_of(images, root.where), tower, (grid // merge) ** 2)
    facts = VisionFacts(
        depth=tower.depth,
        hidden_size=tower.hidden,
        intermediate_size=tower.intermediate,
        num_heads=tower.heads,
        patch_size=tower.patch,
        merge_size=merge,
        patch_dim=tower.channels * tower.patch**2,
        deepstack_levels=0,
        rule=rule,
    )
    return Network(
        family="internvl",
        architecture=architecture,
        text=decoder.facts(),
        vision=facts,
        tied=tied,
        tensors=(
            *tower.tensors("model.vision_tower"),
            *_projector(tower.hidden * merge**2, decoder.hidden),
            *decoder.tensors("model.language_model"),
            *head(tied, decoder.vocab, decoder.hidden),
        ),
        aliases=_ALIASES,
    )


def _read_tower(vision: Section) -> _Tower:
    if not vision.get("use_mean_pooling", bool, True) or vision.get("use_mask_token", bool, False):
        raise UnsupportedModel(f"{vision.where} has a mask token or no mean pooling; that tower isn't known")
    tower = _Tower(
        depth=vision.count("num_hidden_layers", 24, most=MAX_LAYERS),
        hidden=vision.count("hidden_size", 1024),
        intermediate=vision.count("intermediate_size", 4096),
        heads=vision.count("num_attention_heads", 16),
        channels=vision.count("num_channels", 3),
        image=one_side(vision, "image_size", 448),
        patch=one_side(vision, "patch_size", 14),
        bias=vision.get("attention_bias", bool, False),
        qk_norm=vision.get("use_qk_norm", bool, False),
        rms=vision.get("norm_type", str, "layer_norm") == "rms_norm",
    )
    check_patch(tower.patch, tower.image, vision.where)
    return tower


def _rule(images: Section, tower: _Tower, tokens: int) -> TilesAndThumbnail:
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
