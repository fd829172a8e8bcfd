"""SmolVLM and SmolVLM2 (Idefics 3): a Llama decoder, a SigLIP encoder on tiles, pixel shuffle between."""

from snugvl.checkpoint.families.network import Expected, Network, edge, head, images_of
from snugvl.checkpoint.families.siglip import read_siglip
from snugvl.checkpoint.families.text import LLAMA, read_decoder
from snugvl.checkpoint.image_rules import ScaledTiles
from snugvl.checkpoint.section import Section
from snugvl.errors import CheckpointError

ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_SIGLIP = {"depth": 12, "hidden": 1152, "intermediate": 3072, "heads": 16, "image": 224, "patch": 32}


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a SmolVLM configuration.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    decoder = read_decoder(root.section("text_config"), LLAMA)
    tower = read_siglip(root.section("vision_config"), _SIGLIP)
    scale = root.count("scale_factor", 2)
    # transformers reads the top level alone; the text model's own copy of the switch is ignored.
    tied = root.get("tie_word_embeddings", bool, False)
    rule = _rule(images_of(images, root.where), tower.image, tower.patch, scale)
    projection = Expected(
        "model.connector.modality_projection.proj.weight",
        (decoder.hidden, tower.hidden * scale**2),
        "connector",
    )
    return Network(
        family="smolvlm",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower.facts(rule, merge=scale),
        tied=tied,
        tensors=(
            *tower.tensors("model.vision_model"),
            projection,
            *decoder.tensors("model.text_model"),
            *head(tied, decoder.vocab, decoder.hidden),
        ),
    )


def _rule(images: Section, side: int, patch: int, scale: int) -> ScaledTiles:
    tile = edge(images, "max_image_size", "longest_edge", default=side)
    tokens = (side // patch // scale) ** 2
    declared = images.count("image_seq_len", tokens)
    if tile != side or declared != tokens or not tokens:
        raise CheckpointError(
            f"{images.where} has tiles of {tile} pixels and {declared} tokens, the encoder {side} pixels "
            f"and {tokens} tokens"
        )
    longest = edge(images, "size", "longest_edge", default=4 * tile)
    return ScaledTiles(tile, longest, patch, tokens, split=images.get("do_image_splitting", bool, True))
