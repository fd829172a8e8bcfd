"""Models for the planner's tests, built tensor by tensor from published dimensions, without the catalogue."""

from dataclasses import dataclass, replace
from math import ceil, prod, sqrt

from snugvl.checkpoint.facts import (
    ImageRule,
    KVLayer,
    ModelFacts,
    Role,
    TensorFact,
    TextFacts,
    VisionFacts,
)
from snugvl.planner.footprint.total import Footprint, Phase

BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4}


@dataclass(frozen=True)
class Resize:
    """Qwen's rule: sides to multiples of `factor`, area between the limits."""

    factor: int = 32
    patch: int = 16
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216

    def _size(self, width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
        f, limit = self.factor, min(max_pixels or self.max_pixels, self.max_pixels)
        w, h = round(width / f) * f, round(height / f) * f
        if w * h > limit:
            beta = sqrt(width * height / limit)
            return max(f, int(width / beta / f) * f), max(f, int(height / beta / f) * f)
        if w * h < self.min_pixels:
            beta = sqrt(self.min_pixels / (width * height))
            return ceil(width * beta / f) * f, ceil(height * beta / f) * f
        return w, h

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        w, h = self._size(width, height, max_pixels)
        return w * h // self.factor**2

    def patches(self, width: int, height: int, max_pixels: int | None = None) -> int:
        w, h = self._size(width, height, max_pixels)
        return w * h // self.patch**2


@dataclass(frozen=True)
class Fixed:
    """A rule with one size for all, as Gemma 3's."""

    min_pixels: int = 896 * 896
    max_pixels: int = 896 * 896

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        return 256

    def patches(self, width: int, height: int, max_pixels: int | None = None) -> int:
        return 4096


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3-VL model."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    tied: bool
    depth: int = 24
    vision: int = 1024
    vision_intermediate: int = 4096
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936


SHAPES = {
    "2B": Shape(2048, 28, 16, 6144, True),
    "4B": Shape(2560, 36, 32, 9728, True),
    "8B": Shape(4096, 36, 32, 12288, False, 27, 1152, 4304),
    "32B": Shape(5120, 64, 64, 25600, False, 27, 1152, 4304),
}


def qwen3_vl(size: str, *, fp8: bool = False, tied: bool | None = None) -> ModelFacts:
    """Facts of a Qwen3-VL checkpoint as published (the FP8 ones store a head all the same)."""
    shape = SHAPES[size]
    h, i, q, k = shape.hidden, shape.intermediate, shape.heads * 128, shape.kv_heads * 128
    tensors = [_tensor("model.language_model.embed_tokens.weight", "embedding", (shape.vocab, h))]
    for layer in range(shape.layers):
        name = f"model.language_model.layers.{layer}."
        for part, rows, columns in (
            ("q", q, h), ("k", k, h), ("v", k, h), ("o", h, q), ("gate", i, h), ("up", i, h), ("down", h, i)
        ):  # fmt: skip
            dtype = "F8_E4M3" if fp8 else "BF16"
            tensors.append(_tensor(f"{name}{part}_proj.weight", "linear", (rows, columns), dtype))
            if fp8:
                scales = (ceil(rows / 128), ceil(columns / 128))
                tensors.append(_tensor(f"{name}{part}_proj.weight_scale_inv", "scale", scales))
        for norm, width in (("input", h), ("post", h), ("q", 128), ("k", 128)):
            tensors.append(_tensor(f"{name}{norm}_norm", "norm", (width,)))
    tensors.append(_tensor("model.language_model.norm.weight", "norm", (h,)))
    if fp8 or not shape.tied:
        tensors.append(_tensor("lm_head.weight", "lm_head", (shape.vocab, h)))
    tensors += _vision(shape)
    stored = sum(tensor.nbytes for tensor in tensors)
    return ModelFacts(
        name=f"Qwen/Qwen3-VL-{size}-Instruct{'-FP8' if fp8 else ''}",
        revision=None,
        source="catalogue",
        architecture="Qwen3VLForConditionalGeneration",
        family="qwen3_vl",
        text=TextFacts(
            h, i, shape.layers, shape.heads, shape.vocab, 262_144, (KVLayer(8, 128),) * shape.layers
        ),
        vision=VisionFacts(
            shape.depth, shape.vision, shape.vision_intermediate, 16, 16, 2, 1536, 3, Resize()
        ),
        tensors=tuple(tensors),
        tied=shape.tied if tied is None else tied,
        quantization="fp8" if fp8 else None,
        download_bytes=stored + 15_000_000,
        native=True,
    )


def _vision(shape: Shape) -> list[TensorFact]:
    v, i, joined = shape.vision, shape.vision_intermediate, 4 * shape.vision
    found: list[tuple[str, tuple[int, ...]]] = [
        ("patch_embed.weight", (v, 3, 2, 16, 16)),
        ("patch_embed.bias", (v,)),
        ("pos_embed.weight", (2304, v)),  # the one matrix that isn't multiplied
    ]
    block: list[tuple[int, ...]] = [(v,)] * 4
    block += [(3 * v, v), (3 * v,), (v, v), (v,), (i, v), (i,), (v, i), (v,)]
    linears: list[tuple[int, ...]] = [(joined, joined), (joined,), (shape.hidden, joined), (shape.hidden,)]
    pieces = [(f"blocks.{number}", block) for number in range(shape.depth)]
    pieces.append(("merger", [(v,), (v,), *linears]))
    pieces += [(f"deepstack_merger_list.{level}", [(joined,), (joined,), *linears]) for level in range(3)]
    found += [(f"{piece}.{number}", size) for piece, sizes in pieces for number, size in enumerate(sizes)]
    return [_tensor(f"model.visual.{name}", "vision", size) for name, size in found]


def _tensor(name: str, role: Role, shape: tuple[int, ...], dtype: str = "BF16") -> TensorFact:
    return TensorFact(name, role, dtype, shape, prod(shape) * BYTES[dtype])


def with_rule(facts: ModelFacts, rule: ImageRule) -> ModelFacts:
    """The same with another way from images to tokens."""
    assert facts.vision is not None
    return replace(facts, vision=replace(facts.vision, rule=rule))


def with_windows(facts: ModelFacts, layers: tuple[KVLayer, ...]) -> ModelFacts:
    """The same with other attention layers."""
    return replace(facts, text=replace(facts.text, kv_layers=layers))


def text_only(facts: ModelFacts) -> ModelFacts:
    """The same without its vision tower."""
    tensors = tuple(tensor for tensor in facts.tensors if tensor.role != "vision")
    return replace(facts, vision=None, tensors=tensors)


def phase_bytes(plan: Footprint, phase: Phase) -> int:
    """Bytes of the components of one phase of a footprint."""
    return sum(component.nbytes for component in plan.components if component.phase == phase)
