"""The vision tower of Qwen3-VL and Qwen3.5: full attention, LayerNorms, learned positions, a patch merger."""

from collections.abc import Iterator
from dataclasses import dataclass

from snugvl.checkpoint.facts import VisionFacts
from snugvl.checkpoint.families.network import Expected, edge, linear, norm, one_side
from snugvl.checkpoint.image_rules import SmartResize
from snugvl.checkpoint.section import MAX_LAYERS, Section
from snugvl.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class QwenTower:
    """Its sizes. `deepstack`: extra mergers, one for each level."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    out_hidden: int
    positions: int
    deepstack: int

    def facts(self, rule: SmartResize) -> VisionFacts:
        """The same as the planner's nouns."""
        return VisionFacts(
            depth=self.depth,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            patch_size=self.patch,
            merge_size=self.merge,
            patch_dim=self.channels * self.temporal_patch * self.patch**2,
            deepstack_levels=self.deepstack,
            rule=rule,
        )

    def tensors(self, name: str) -> Iterator[Expected]:
        """Every tensor of the tower; all of them carry biases."""
        shape = (self.hidden, self.channels, self.temporal_patch, self.patch, self.patch)
        yield Expected(f"{name}.patch_embed.proj.weight", shape, "vision")
        yield Expected(f"{name}.patch_embed.proj.bias", (self.hidden,), "vision")
        yield Expected(f"{name}.pos_embed.weight", (self.positions, self.hidden), "vision")
        for index in range(self.depth):
            block = f"{name}.blocks.{index}"
            yield from norm(f"{block}.norm1", self.hidden, "vision", bias=True)
            yield from norm(f"{block}.norm2", self.hidden, "vision", bias=True)
            for part, rows, columns in (
                ("attn.qkv", 3 * self.hidden, self.hidden),
                ("attn.proj", self.hidden, self.hidden),
                ("mlp.linear_fc1", self.intermediate, self.hidden),
                ("mlp.linear_fc2", self.hidden, self.intermediate),
            ):
                yield from linear(f"{block}.{part}", rows, columns, "vision", bias=True)
        yield from self._merger(f"{name}.merger", self.hidden)
        for level in range(self.deepstack):
            # The extra mergers normalise after merging, so their norm is merge² wider.
            yield from self._merger(f"{name}.deepstack_merger_list.{level}", self.hidden * self.merge**2)

    def _merger(self, name: str, norm_width: int) -> Iterator[Expected]:
        merged = self.hidden * self.merge**2
        yield from norm(f"{name}.norm", norm_width, "connector", bias=True)
        yield from linear(f"{name}.linear_fc1", merged, merged, "connector", bias=True)
        yield from linear(f"{name}.linear_fc2", self.out_hidden, merged, "connector", bias=True)


def read_tower(section: Section, out_hidden: int, deepstack: int) -> QwenTower:
    """A `vision_config`. `out_hidden` is the decoder's width, which the tower must hand over.

    Raises:
        CheckpointError: a field is missing, or contradicts the decoder.
    """
    tower = QwenTower(
        depth=section.count("depth", 27, most=MAX_LAYERS),
        hidden=section.count("hidden_size", 1152),
        intermediate=section.count("intermediate_size", 4304),
        heads=section.count("num_heads", 16),
        channels=section.count("in_channels", 3),
        patch=one_side(section, "patch_size", 16),
        temporal_patch=one_side(section, "temporal_patch_size", 2),
        merge=section.count("spatial_merge_size", 2),
        out_hidden=section.count("out_hidden_size", 3584),
        positions=section.count("num_position_embeddings", 2304),
        deepstack=deepstack,
    )
    if tower.out_hidden != out_hidden:
        raise CheckpointError(
            f"{section.where} has out_hidden_size {tower.out_hidden}, the decoder's width is {out_hidden}"
        )
    return tower


def read_rule(images: Section, patch: int, merge: int) -> SmartResize:
    """Limits of Qwen's image processors: min_pixels and max_pixels in older files, size in newer ones.

    Raises:
        CheckpointError: there are no limits, or the patches are not those of the tower.
    """
    sizes = images.count("patch_size", patch), images.count("merge_size", merge)
    if sizes != (patch, merge):
        raise CheckpointError(
            f"{images.where} has patches of {sizes[0]} merged by {sizes[1]}, the tower {patch} by {merge}"
        )
    limits = []
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        limits.append(images.count(old) if images.values.get(old) else edge(images, "size", new))
    token = (patch * merge) ** 2
    if max(limits[0], token) > limits[1]:
        raise CheckpointError(
            f"{images.where} has {limits[0]:,} to {limits[1]:,} pixels; one token takes {token:,}"
        )
    return SmartResize(patch, merge, min_pixels=limits[0], max_pixels=limits[1])
