"""SmolVLM and SmolVLM2 (Idefics 3): a Llama decoder, a SigLIP encoder on tiles, pixel shuffle between."""

from snugvl.checkpoint.families.text import LLAMA, read_text
from snugvl.checkpoint.families.traits import Expected, Family, Network, Prompting, Traits
from snugvl.checkpoint.families.vision import SquareTower, edge, images_of, read_square, siglip_tensors
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
    decoder = read_text(root.section("text_config"), LLAMA)
    tower = read_square(root.section("vision_config"), _SIGLIP)
    scale = root.count("scale_factor", 2)
    # transformers reads the top level alone; the text model's own copy of the switch is ignored.
    tied = root.get("tie_word_embeddings", bool, False)
    rule = _rule(images_of(images, root.where), tower, scale)
    projection = (decoder.hidden, tower.hidden * scale**2)
    return Network(
        family="smolvlm",
        architecture=architecture,
        text=decoder.facts(),
        vision=tower.facts(rule, merge=scale),
        tied=tied,
        tensors=(
            *siglip_tensors(tower, "model.vision_model"),
            Expected("model.connector.modality_projection.proj.weight", projection, "connector"),
            *decoder.tensors("model.text_model", tied),
        ),
    )


def _rule(images: Section, tower: SquareTower, scale: int) -> ScaledTiles:
    tile = edge(images, "max_image_size", "longest_edge", default=tower.image)
    tokens = (tower.grid // scale) ** 2
    declared = images.count("image_seq_len", tokens)
    if tile != tower.image or declared != tokens or not tokens:
        raise CheckpointError(
            f"{images.where} has tiles of {tile} pixels and {declared} tokens, the encoder {tower.image} "
            f"pixels and {tokens} tokens"
        )
    longest = edge(images, "size", "longest_edge", default=4 * tile)
    split = images.get("do_image_splitting", bool, True)
    return ScaledTiles(tile, tower.patch, tokens, longest, split=split)


FAMILY = Family(
    architectures=ARCHITECTURES,
    describe=describe,
    traits={"smolvlm": Traits()},
    # Its card names captions, questions and stories, no boxes.
    prompting=dict.fromkeys(ARCHITECTURES, Prompting("SmolVLM", "no boxes")),
)
