"""The vision tower of Qwen3-VL and Qwen3.5, and the parts common to Qwen's towers: limits, tokens, checks."""

from collections.abc import Iterator, Mapping
from typing import Any

from snugvl.checkpoint.architecture import TextConfig, VisionConfig, VisionTokens
from snugvl.checkpoint.facts import VisionFacts
from snugvl.checkpoint.families.rotary import read_vision_theta
from snugvl.checkpoint.families.traits import Expected, Pictures, linear, norm
from snugvl.checkpoint.families.vision import edge, images_of, one_side
from snugvl.checkpoint.image_rules import SmartResize
from snugvl.checkpoint.section import MAX_LAYERS, Section, shown
from snugvl.errors import CheckpointError

LEVELS = "deepstack_visual_indexes"
_DEFAULTS: Mapping[str, Any] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
GGUF_TOKENS = Pictures(8, 4096)  # tokens of one (`clip.cpp`)


def sees(root: Section) -> bool:
    """Whether there is a tower; a GGUF without its mmproj says that there is none, with null."""
    return root.values.get("vision_config", root) is not None


def read_tower(section: Section, levels: list[int], defaults: Mapping[str, Any] = _DEFAULTS) -> VisionConfig:
    """Read a `vision_config`. `levels`: indices of the blocks after which a deepstack merger stands.

    Raises:
        CheckpointError: a field is missing or nonsense.
    """
    section.require(len(levels) <= MAX_LAYERS, f"{len(levels):,} {LEVELS} are those of no model")
    return VisionConfig(
        depth=section.count("depth", defaults["depth"], most=MAX_LAYERS),
        hidden_size=section.count("hidden_size", defaults["hidden_size"]),
        intermediate_size=section.count("intermediate_size", defaults["intermediate_size"]),
        num_heads=section.count("num_heads", 16),
        in_channels=section.count("in_channels", 3),
        patch_size=one_side(section, "patch_size", defaults["patch_size"]),
        temporal_patch_size=one_side(section, "temporal_patch_size", 2),
        spatial_merge_size=section.count("spatial_merge_size", 2),
        out_hidden_size=section.count("out_hidden_size", 3584),
        num_position_embeddings=section.count("num_position_embeddings", 2304),
        deepstack_layers=tuple(levels),
        hidden_act=section.get("hidden_act", str, defaults.get("hidden_act", "gelu_pytorch_tanh")),
        rope_theta=read_vision_theta(section),
    )


def check_tower(section: Section, tower: VisionConfig, text: TextConfig) -> None:
    """Refuse, for our engine, a tower that leaves out a size or contradicts itself.

    Raises:
        CheckpointError: names both values.
    """
    section.need("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")
    check_frame(section, tower, text.hidden_size)
    section.require(
        tower.position_grid**2 == tower.num_position_embeddings,
        f"num_position_embeddings {tower.num_position_embeddings} is not a square",
    )
    levels = tower.deepstack_layers
    section.require(
        all(isinstance(level, int) for level in levels), f"{LEVELS} {shown(levels)} aren't numbers"
    )
    section.require(
        all(0 <= level < tower.depth for level in levels),
        f"{LEVELS} {list(levels)} name layers beyond {tower.depth - 1}",
    )


def check_frame(section: Section, tower: VisionConfig, hidden: int) -> None:
    """Refuse, for our engine, any of Qwen's towers whose heads can't be rotated, or of another width."""
    check_width(section, tower, hidden)
    section.require(
        tower.hidden_size % (4 * tower.num_heads) == 0,
        f"hidden_size {tower.hidden_size} is not a multiple of 4 x num_heads {tower.num_heads}",
    )


def check_width(section: Section, tower: VisionConfig, hidden: int) -> None:
    """Refuse a tower whose output is not as wide as the decoder's hidden state."""
    section.require(
        tower.out_hidden_size == hidden,
        f"out_hidden_size {tower.out_hidden_size} differs from the text's hidden_size {hidden}",
    )


def tower_facts(tower: VisionConfig, images: Section | None, where: str) -> VisionFacts:
    """A tower's facts for the planner, with the limits of Qwen's image processors.

    The limits are min_pixels and max_pixels in older files, size in newer ones.

    Raises:
        CheckpointError: there are no limits, or the patches are not those of the tower.
    """
    images = images_of(images, where)
    patch, merge = tower.patch_size, tower.spatial_merge_size
    sizes = images.count("patch_size", patch), images.count("merge_size", merge)
    if sizes != (patch, merge):
        raise CheckpointError(
            f"{images.where} has patches of {sizes[0]} merged by {sizes[1]}, the tower {patch} by {merge}"
        )
    least, most = (
        images.count(old) if images.values.get(old) else edge(images, "size", new)
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    token = (patch * merge) ** 2
    if max(least, token) > most:
        raise CheckpointError(f"{images.where} has {least:,} to {most:,} pixels; one token takes {token:,}")
    return VisionFacts(
        depth=tower.depth,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_heads,
        patch_size=patch,
        merge_size=merge,
        patch_dim=tower.patch_dim,
        deepstack_levels=len(tower.deepstack_layers),
        rule=SmartResize(patch, merge, min_pixels=least, max_pixels=most),
        windowed=tower.window is not None,
    )


def read_tokens(root: Section, start: int) -> VisionTokens:
    """Read the control tokens around and for pictures; `start`: the first's id where the file has none."""
    return VisionTokens(
        image=root.get("image_token_id", int, start + 3),
        video=root.get("video_token_id", int, start + 4),
        start=root.get("vision_start_token_id", int, start),
        end=root.get("vision_end_token_id", int, start + 1),
    )


def tower_tensors(tower: VisionConfig) -> Iterator[Expected]:
    """Every tensor of Qwen3-VL's tower; all of them carry biases."""
    name, hidden = "model.visual", tower.hidden_size
    yield Expected(f"{name}.patch_embed.proj.weight", patch_shape(tower), "vision")
    yield Expected(f"{name}.patch_embed.proj.bias", (hidden,), "vision")
    yield Expected(f"{name}.pos_embed.weight", (tower.num_position_embeddings, hidden), "vision")
    yield from block_tensors(tower, name, ("linear_fc1", "linear_fc2"), bias=True)
    yield from _merger(tower, f"{name}.merger", hidden)
    for level in range(len(tower.deepstack_layers)):
        # The extra mergers normalise after merging, so their norm is merge² wider.
        width = hidden * tower.spatial_merge_size**2
        yield from _merger(tower, f"{name}.deepstack_merger_list.{level}", width)


def block_tensors(tower: VisionConfig, name: str, mlp: tuple[str, ...], *, bias: bool) -> Iterator[Expected]:
    """Tensors of the blocks of any of Qwen's towers. `mlp`: its matrices, the last of which goes back to the
    hidden size; `bias`: whether the norms have one."""
    hidden, inner = tower.hidden_size, tower.intermediate_size
    *wide, back = (f"mlp.{part}" for part in mlp)
    for index in range(tower.depth):
        block = f"{name}.blocks.{index}"
        yield from norm(f"{block}.norm1", hidden, "vision", bias=bias)
        yield from norm(f"{block}.norm2", hidden, "vision", bias=bias)
        yield from linear(f"{block}.attn.qkv", 3 * hidden, hidden, "vision", bias=True)
        yield from linear(f"{block}.attn.proj", hidden, hidden, "vision", bias=True)
        for part in wide:
            yield from linear(f"{block}.{part}", inner, hidden, "vision", bias=True)
        yield from linear(f"{block}.{back}", hidden, inner, "vision", bias=True)


def patch_shape(tower: VisionConfig) -> tuple[int, ...]:
    """Shape of the convolution that makes a patch one vector."""
    side = tower.patch_size
    return tower.hidden_size, tower.in_channels, tower.temporal_patch_size, side, side


def _merger(tower: VisionConfig, name: str, norm_width: int) -> Iterator[Expected]:
    merged = tower.hidden_size * tower.spatial_merge_size**2
    yield from norm(f"{name}.norm", norm_width, "connector", bias=True)
    yield from linear(f"{name}.linear_fc1", merged, merged, "connector", bias=True)
    yield from linear(f"{name}.linear_fc2", tower.out_hidden_size, merged, "connector", bias=True)
