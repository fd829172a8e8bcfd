"""Qwen2.5-VL: a tower of RMS norms and gated MLPs, windowed but for a few blocks, on a Qwen2.5 decoder."""

from collections.abc import Iterator
from dataclasses import dataclass

from snugvl.checkpoint.facts import VisionFacts
from snugvl.checkpoint.families.decoder import Decoder, read_sizes, windows_by_type
from snugvl.checkpoint.families.network import Expected, Network, head, images_of, linear, norm, one_side
from snugvl.checkpoint.families.qwen_tower import read_rule
from snugvl.checkpoint.section import MAX_LAYERS, Section
from snugvl.errors import CheckpointError

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)
_DEFAULTS = {
    "hidden": 8192, "intermediate": 29568, "layers": 80, "heads": 64, "kv_heads": 8,
    "vocab": 152064, "max_positions": 32768,
}  # fmt: skip
_ALIASES = (
    ("visual.", "model.visual."),
    ("model.visual.", "model.visual."),
    ("model.language_model.", "model.language_model."),
    ("model.", "model.language_model."),
)


@dataclass(frozen=True, slots=True)
class _Tower:
    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    out_hidden: int

    def tensors(self, name: str) -> Iterator[Expected]:
        shape = (self.hidden, self.channels, self.temporal_patch, self.patch, self.patch)
        yield Expected(f"{name}.patch_embed.proj.weight", shape, "vision")
        for index in range(self.depth):
            block = f"{name}.blocks.{index}"
            yield from norm(f"{block}.norm1", self.hidden, "vision")
            yield from norm(f"{block}.norm2", self.hidden, "vision")
            for part, rows, columns in (
                ("attn.qkv", 3 * self.hidden, self.hidden),
                ("attn.proj", self.hidden, self.hidden),
                ("mlp.gate_proj", self.intermediate, self.hidden),
                ("mlp.up_proj", self.intermediate, self.hidden),
                ("mlp.down_proj", self.hidden, self.intermediate),
            ):
                yield from linear(f"{block}.{part}", rows, columns, "vision", bias=True)
        merged = self.hidden * self.merge**2
        yield from norm(f"{name}.merger.ln_q", self.hidden, "connector")
        yield from linear(f"{name}.merger.mlp.0", merged, merged, "connector", bias=True)
        yield from linear(f"{name}.merger.mlp.2", self.out_hidden, merged, "connector", bias=True)


def describe(root: Section, architecture: str, images: Section | None) -> Network:
    """Read a Qwen2.5-VL configuration. Files of before transformers 4.52 have the decoder at the top level.

    Raises:
        CheckpointError: a field is missing or contradicts another one.
    """
    text = root.section("text_config") if root.values.get("text_config") else root
    decoder = _decoder(text)
    vision = root.section("vision_config")
    tower = _Tower(
        depth=vision.count("depth", 32, most=MAX_LAYERS),
        hidden=vision.count("hidden_size", 3584),
        intermediate=vision.count("intermediate_size", 3420),
        heads=vision.count("num_heads", 16),
        channels=vision.count("in_channels", 3),
        patch=one_side(vision, "patch_size", 14),
        temporal_patch=one_side(vision, "temporal_patch_size", 2),
        merge=vision.count("spatial_merge_size", 2),
        out_hidden=vision.count("out_hidden_size", 3584),
    )
    if tower.out_hidden != decoder.hidden:
        raise CheckpointError(
            f"{vision.where} has out_hidden_size {tower.out_hidden}, the decoder's width is {decoder.hidden}"
        )
    rule = read_rule(images_of(images, root.where), tower.patch, tower.merge)
    tied = root.get("tie_word_embeddings", bool, False) or text.get("tie_word_embeddings", bool, False)
    return Network(
        family="qwen2_5_vl",
        architecture=architecture,
        text=decoder.facts(),
        vision=VisionFacts(
            depth=tower.depth,
            hidden_size=tower.hidden,
            intermediate_size=tower.intermediate,
            num_heads=tower.heads,
            patch_size=tower.patch,
            merge_size=tower.merge,
            patch_dim=tower.channels * tower.temporal_patch * tower.patch**2,
            deepstack_levels=0,
            rule=rule,
            windowed=True,
        ),
        tied=tied,
        tensors=(
            *tower.tensors("model.visual"),
            *decoder.tensors("model.language_model"),
            *head(tied, decoder.vocab, decoder.hidden),
        ),
        aliases=_ALIASES,
        native=True,
    )


def _decoder(text: Section) -> Decoder:
    sizes = read_sizes(text, _DEFAULTS)
    layers = sizes["layers"]
    windows: tuple[int | None, ...] = (None,) * layers
    if text.get("use_sliding_window", bool, False):
        first = text.get("max_window_layers", int, 80)
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
        windows = windows_by_type(text, layers, text.count("sliding_window", 4096), types)
    return Decoder.of(sizes, windows=windows, qkv_bias=True)
