"""Common parts of several families' vision: image processors' settings, encoders of fixed squares."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from snugvl.checkpoint.facts import ImageRule, VisionFacts
from snugvl.checkpoint.families.traits import Expected, linear, norm
from snugvl.checkpoint.section import MAX_LAYERS, Section
from snugvl.errors import CheckpointError


def images_of(images: Section | None, where: str) -> Section:
    """The image processor's settings, which a model that sees must have."""
    if images is None:
        raise CheckpointError(
            f"{where} is a model that sees, but there is no preprocessor_config.json beside it; "
            "without it the tokens of an image are unknown"
        )
    return images


def one_side(section: Section, key: str, default: int | None = None) -> int:
    """Read a size that some files write as a pair of equal numbers.

    Raises:
        CheckpointError: it is a pair of different ones, or no size.
    """
    value: Any = section.values.get(key)
    if isinstance(value, list) and value and all(part == value[0] for part in value):
        return Section({key: value[0]}, section.where).count(key)
    return section.count(key, default)


def edge(section: Section, key: str, side: str, *, default: int | None = None) -> int:
    """Read a side that image processors write as {"longest_edge": n}, {"height": n, "width": n} or n."""
    value = section.values.get(key)
    if isinstance(value, Mapping):
        return Section(value, f"{section.where}: {key}").count(side, default)
    return section.count(key, default)


@dataclass(frozen=True, slots=True)
class SquareTower:
    """Sizes of an encoder that works on squares. `image`, `patch`: their sides in pixels."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    image: int
    patch: int

    @property
    def grid(self) -> int:
        """Number of patches on a side of the square."""
        return self.image // self.patch

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of the convolution that makes a patch one vector."""
        return self.hidden, self.channels, self.patch, self.patch

    def facts(self, rule: ImageRule, merge: int) -> VisionFacts:
        """The tower's facts for the planner. `merge`: patches per side of a token."""
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


def read_square(section: Section, defaults: Mapping[str, int]) -> SquareTower:
    """Read a `vision_config`. `defaults`: those of transformers' class for missing fields.

    Raises:
        CheckpointError: a field is missing or no positive number, or a square has no patch.
    """
    tower = SquareTower(
        depth=section.count("num_hidden_layers", defaults["depth"], most=MAX_LAYERS),
        hidden=section.count("hidden_size", defaults["hidden"]),
        intermediate=section.count("intermediate_size", defaults["intermediate"]),
        heads=section.count("num_attention_heads", defaults["heads"]),
        channels=section.count("num_channels", 3),
        image=one_side(section, "image_size", defaults["image"]),
        patch=one_side(section, "patch_size", defaults["patch"]),
    )
    section.require(tower.grid > 0, f"patches of {tower.patch} pixels in an image of {tower.image} pixels")
    return tower


def siglip_tensors(tower: SquareTower, name: str) -> Iterator[Expected]:
    """Every tensor of SigLIP, the encoder of Gemma 3 and SmolVLM; all have biases, positions are learned."""
    yield Expected(f"{name}.embeddings.patch_embedding.weight", tower.patch_shape, "vision")
    yield Expected(f"{name}.embeddings.patch_embedding.bias", (tower.hidden,), "vision")
    positions = (tower.grid**2, tower.hidden)
    yield Expected(f"{name}.embeddings.position_embedding.weight", positions, "vision")
    for index in range(tower.depth):
        layer = f"{name}.encoder.layers.{index}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear(f"{layer}.self_attn.{part}", tower.hidden, tower.hidden, "vision", bias=True)
        yield from norm(f"{layer}.layer_norm1", tower.hidden, "vision", bias=True)
        yield from linear(f"{layer}.mlp.fc1", tower.intermediate, tower.hidden, "vision", bias=True)
        yield from linear(f"{layer}.mlp.fc2", tower.hidden, tower.intermediate, "vision", bias=True)
        yield from norm(f"{layer}.layer_norm2", tower.hidden, "vision", bias=True)
    yield from norm(f"{name}.post_layernorm", tower.hidden, "vision", bias=True)
