"""The vision encoder of Gemma 3 and SmolVLM: SigLIP, with learned positions and biases everywhere."""

from collections.abc import Iterator
from dataclasses import dataclass

from snugvl.checkpoint.facts import ImageRule, VisionFacts
from snugvl.checkpoint.families.network import Expected, check_patch, linear, norm, one_side
from snugvl.checkpoint.section import MAX_LAYERS, Section


@dataclass(frozen=True, slots=True)
class Siglip:
    """Its sizes. `image`: side of the square it works on, in pixels."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    image: int
    patch: int

    @property
    def positions(self) -> int:
        """Patches of one square."""
        return (self.image // self.patch) ** 2

    def facts(self, rule: ImageRule, merge: int) -> VisionFacts:
        """The same as the planner's nouns. `merge`: patches per side of a token."""
        return VisionFacts(
            depth=self.depth,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            patch_size=self.patch,
            merge_size=merge,
            patch_dim=self.channels * self.patch**2,
            deepstack_levels=0,
            rule=rule,
        )

    def tensors(self, name: str) -> Iterator[Expected]:
        """Every tensor of the encoder."""
        shape = (self.hidden, self.channels, self.patch, self.patch)
        yield Expected(f"{name}.embeddings.patch_embedding.weight", shape, "vision")
        yield Expected(f"{name}.embeddings.patch_embedding.bias", (self.hidden,), "vision")
        yield Expected(
            f"{name}.embeddings.position_embedding.weight", (self.positions, self.hidden), "vision"
        )
        for index in range(self.depth):
            layer = f"{name}.encoder.layers.{index}"
            for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                yield from linear(f"{layer}.self_attn.{part}", self.hidden, self.hidden, "vision", bias=True)
            yield from norm(f"{layer}.layer_norm1", self.hidden, "vision", bias=True)
            yield from linear(f"{layer}.mlp.fc1", self.intermediate, self.hidden, "vision", bias=True)
            yield from linear(f"{layer}.mlp.fc2", self.hidden, self.intermediate, "vision", bias=True)
            yield from norm(f"{layer}.layer_norm2", self.hidden, "vision", bias=True)
        yield from norm(f"{name}.post_layernorm", self.hidden, "vision", bias=True)


def read_siglip(section: Section, defaults: dict[str, int]) -> Siglip:
    """A `vision_config`. `defaults`: what transformers' class assumes for a field left out.

    Raises:
        CheckpointError: a field is missing or no positive number.
    """
    tower = Siglip(
        depth=section.count("num_hidden_layers", defaults["depth"], most=MAX_LAYERS),
        hidden=section.count("hidden_size", defaults["hidden"]),
        intermediate=section.count("intermediate_size", defaults["intermediate"]),
        heads=section.count("num_attention_heads", defaults["heads"]),
        channels=section.count("num_channels", 3),
        image=one_side(section, "image_size", defaults["image"]),
        patch=one_side(section, "patch_size", defaults["patch"]),
    )
    check_patch(tower.patch, tower.image, section.where)
    return tower
