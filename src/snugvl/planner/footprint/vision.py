"""Memory of the vision tower while it encodes, and of its outputs for the decoder.

`models/vision.py` and `models/qwen2_5_vision.py` have the formulas of our towers. Chunks are of equal size:
an image of a whole number of `ROWS` may need more than a larger one.

transformers' tower takes per patch, all 16-bit unless noted:

    input            2 · patch_dim; cast from float32 pixels, which `generate` keeps
    attention block  38h + 8d + 64: rotary in float32 is the peak
    MLP              8h + 4i (input, residual, normed, two intermediates)
    deepstack        the levels already made: levels · width / merge², 2 bytes

Traced on the operations of our own tower and of transformers 5.23 (`tests/planner/test_workspace.py` repeats
it). On an H200 transformers' slope was 42.6 kB per patch of the 2B; this gives 42,560.
There the embedded prompt (2 bytes a value) is alive meanwhile, and merging images into it takes 13 bytes per
value and prompt token (a prefix sum in int64 over the mask): with a small image in a long prompt that is the
peak.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from snugvl.checkpoint.facts import VisionFacts
from snugvl.core.memory_kinds import Kind
from snugvl.planner.footprint.total import Component, Phase, predicted, up
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings, VisionFormat

# Width : height of the images that are tried; the rule's rounding makes the shape matter a little.
SHAPES: Final = ((1, 1), (4, 3), (3, 2), (16, 9), (2, 1), (1, 2), (9, 16), (3, 4), (4, 1))
LONGEST: Final = 200  # times as long as wide, at most, in every rule that scales
HUGE: Final = 16384  # pixels of a side: beyond every rule's limit, so that the limit decides


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The largest image: prompt tokens and patches of the vision tower."""

    tokens: int
    patches: int


@lru_cache(maxsize=4096)
def largest_image(model: Inventory, max_pixels: int | None) -> ImageSize:
    """Most tokens and patches of an image within `max_pixels` (None: the model's own limit)."""
    vision = model.facts.vision
    if vision is None:
        return ImageSize(0, 0)
    rule, tokens, patches = vision.rule, 0, 0
    for wide, high in SHAPES:
        unit = HUGE // max(wide, high)
        width, height = unit * wide, unit * high
        tokens = max(tokens, rule.tokens(width, height, max_pixels))
        patches = max(patches, rule.patches(width, height, max_pixels))
    if scales(model):
        # A dynamic rule may fill its budget to the last cell, and a strip is one cell high at least: the
        # bound that no shape exceeds.
        limit = min(max_pixels or rule.max_pixels, rule.max_pixels)
        side = vision.patch_size * vision.merge_size
        strip = -(-math.isqrt(LONGEST * limit) // side) + 1
        tokens = max(tokens, limit // side**2, strip)
        patches = max(patches, tokens * vision.merge_size**2)
    return ImageSize(tokens, patches)


@lru_cache(maxsize=256)
def scales(model: Inventory) -> bool:
    """Whether an image's tokens follow from its pixels alone; else it is a square, or cut into pieces."""
    vision = model.facts.vision
    if vision is None:
        return False
    rule, side = vision.rule, vision.patch_size * vision.merge_size
    few, many = -(-math.isqrt(rule.min_pixels) // side), math.isqrt(rule.max_pixels) // side
    return few < many and all(rule.tokens(n * side, n * side, None) == n * n for n in (few, many))


def pixels_for(model: Inventory, tokens: int) -> int:
    """The pixel budget under which an image has at most `tokens` tokens."""
    vision = model.facts.vision
    assert vision is not None
    side = vision.patch_size * vision.merge_size
    return min(max(tokens * side**2, vision.rule.min_pixels), vision.rule.max_pixels)


WIDE: Final = 4  # bytes of a float32 value
MERGE_BYTES: Final = 13  # embeddings 2, mask 1, its prefix sum 8, the result 2
HALF: Final = 2  # bytes of a 16-bit value
ROWS: Final = 4096  # patches of a chunk
WINDOWED_ROWS: Final = 2048  # where there are windows
PLACE_BYTES: Final = 16  # row and column of a patch, int64
ORDER_BYTES: Final = 8  # place of a token among windows, int64
SLICE_BYTES: Final = 16 << 20  # of widened weights
SLICE_ROWS: Final = 32  # its rows are a multiple of
OTHERS: Final[tuple[Phase, ...]] = ("prefill", "decode")  # phases of sequences beside an image's


def encoder_bytes_per_token(model: Inventory, itemsize: int = HALF) -> int:
    """Encoder output per image token: the tower's output and each deepstack level, each a hidden vector."""
    vision = model.facts.vision
    assert vision is not None
    return (1 + vision.deepstack_levels) * model.facts.text.hidden_size * itemsize


@lru_cache(maxsize=4096)  # of some sizes of picture many settings ask
def native_held(model: Inventory, image: ImageSize, itemsize: int = HALF) -> int:
    """Bytes that our tower holds from its first chunk to its last, also between them, its output included."""
    vision = _vision(model)
    h, head = vision.hidden_size, vision.hidden_size // vision.num_heads
    whole = 3 * h * itemsize + PLACE_BYTES
    output = (1 + vision.deepstack_levels) * _level_bytes(model, itemsize)
    tables = 2 * WIDE * (head // 4) * math.isqrt(LONGEST * image.patches)
    order = ORDER_BYTES * image.tokens if vision.windowed else 0
    return image.patches * (whole + output) + order + tables


@lru_cache(maxsize=4096)
def native_workspace(
    model: Inventory, image: ImageSize, itemsize: int = HALF, weights: VisionFormat = "bf16"
) -> int:
    """Peak bytes of our tower for one image, or for a smaller image that takes more."""
    vision, patches = _vision(model), image.patches
    if vision.windowed:
        return _peak(model, image, min(patches, WINDOWED_ROWS), itemsize, weights)
    unit, pieces = vision.merge_size**2, -(-patches // ROWS)
    peaks = [_peak(model, image, up(-(-patches // pieces), unit), itemsize, weights)]
    if whole := patches - patches % ROWS:
        peaks.append(_peak(model, ImageSize(whole // unit, whole), ROWS, itemsize, weights))
    return max(peaks)


def _peak(model: Inventory, image: ImageSize, rows: int, itemsize: int, weights: VisionFormat) -> int:
    """Peak bytes of our tower for an image in chunks of `rows` patches."""
    vision = _vision(model)
    h, head = vision.hidden_size, vision.hidden_size // vision.num_heads
    chunk = rows * ((h + _inner(vision)) * itemsize + WIDE * head)
    if weights == "int8":
        chunk = max(chunk, _widening(model, image, rows, itemsize))
    return native_held(model, image, itemsize) + chunk


def _inner(vision: VisionFacts) -> int:
    """Number of values of a row within an MLP: SwiGLU has two intermediates, GELU works in place."""
    return vision.intermediate_size * (2 if vision.windowed else 1)


def _widening(model: Inventory, image: ImageSize, rows: int, itemsize: int) -> int:
    """Peak bytes in a chunk of `rows` beside what is held, while a matrix of the tower is widened."""
    vision = _vision(model)
    h, i, out = vision.hidden_size, vision.intermediate_size, model.facts.text.hidden_size
    joined = h * vision.merge_size**2
    # Values of a row that are alive (SwiGLU's gate waits for its other half), and the matrix.
    row = rows * itemsize
    moments = [
        4 * h * row + slice_bytes(h, h, itemsize),
        (h + _inner(vision)) * row + slice_bytes(i, h, itemsize),
        # GELU's MLP writes its result over its input.
        ((2 if vision.windowed else 1) * h + i) * row + slice_bytes(h, i, itemsize),
    ]
    merging = 2 * h * row + max(
        slice_bytes(joined, joined, itemsize),
        out * row // vision.merge_size**2 + slice_bytes(out, joined, itemsize),
    )
    # The last merger runs when keys and values are gone.
    gone = 0 if vision.deepstack_levels else 2 * h * itemsize * image.patches
    return max(*moments, merging - gone)


def slice_rows(row_bytes: int, slice_bytes: int) -> int:
    """Number of rows in a widened slice of a matrix, at most."""
    return max(SLICE_ROWS, slice_bytes // row_bytes // SLICE_ROWS * SLICE_ROWS)


def slice_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of a widened slice of a tower's matrix, cut into as few equal slices as are small enough."""
    most = slice_rows(columns * itemsize, SLICE_BYTES)
    return min(rows, up(-(-rows // -(-rows // most)), SLICE_ROWS)) * columns * itemsize


def transformers_workspace(model: Inventory, image: ImageSize) -> int:
    """Peak bytes of transformers for one image with SDPA attention: all patches at once."""
    vision = _vision(model)
    h, head = vision.hidden_size, vision.hidden_size // vision.num_heads
    inputs = HALF * vision.patch_dim
    attention = 38 * h + 8 * head + 64
    mlp = HALF * (4 * h + 2 * vision.intermediate_size) + 8 * head
    levels = vision.deepstack_levels * _level_bytes(model, HALF)
    return image.patches * (inputs + max(attention, mlp) + levels)


def features_per_token(model: Inventory) -> int:
    """Bytes transformers holds per image token: features, their copy, levels, the tower's last states."""
    vision = _vision(model)
    width = model.facts.text.hidden_size
    return HALF * ((2 + vision.deepstack_levels) * width + vision.merge_size**2 * vision.hidden_size)


def vllm_workspace(model: Inventory, image: ImageSize) -> int:
    """Bytes of vLLM's tower for one image, to first order: P · (2h · 3 + 4i + 2 · patch_dim) and levels.

    Consistent with two published logs (5070 Ti 2B, L4 8B), not measured by us.
    """
    vision = _vision(model)
    row = 6 * vision.hidden_size + 4 * vision.intermediate_size + HALF * vision.patch_dim
    return image.patches * (row + vision.deepstack_levels * _level_bytes(model, HALF))


def native_vision_components(model: Inventory, settings: Settings) -> list[Component]:
    """Components of workspace of our engine's tower, and of its outputs."""
    if model.facts.vision is None or settings.images == 0:
        return []
    image = largest_image(model, settings.max_pixels)
    itemsize = settings.itemsize
    each = image.tokens * encoder_bytes_per_token(model, itemsize)
    parts: list[Component] = []
    if settings.sequences > 1:  # the others' steps come between two chunks of an image
        paused = native_held(model, image, itemsize)
        name = "vision workspace while others run"
        parts += [predicted(name, Kind.WORKSPACE, paused, phase) for phase in OTHERS]
    workspace = native_workspace(model, image, itemsize, settings.vision_weights)
    parts.append(_workspace(image, workspace))
    if held := held_outputs(settings, image, each):
        others = max(0, held - each)
        parts.append(Component("encoder outputs of other images", Kind.ENCODINGS, others, "vision"))
        parts.append(
            Component(
                "encoder outputs", Kind.ENCODINGS, held, "prefill", why=f"{held // max(each, 1)} image(s)"
            )
        )
    return parts


def transformers_vision_components(model: Inventory, settings: Settings) -> list[Component]:
    """Components of workspace of transformers' tower, which encodes all images of a request in one batch.

    Its outputs are in the prefill's bytes.
    """
    if model.facts.vision is None or settings.images == 0:
        return []
    image = largest_image(model, settings.max_pixels)
    many = ImageSize(image.tokens * settings.images, image.patches * settings.images)
    embedded = settings.context * HALF * model.facts.text.hidden_size
    # Putting images' features into the prompt, checked on an H200.
    merge = settings.context * MERGE_BYTES * model.facts.text.hidden_size
    merge += many.tokens * features_per_token(model)
    workspace = max(transformers_workspace(model, many) + embedded, merge) * settings.itemsize // HALF
    pixels = many.patches * WIDE * _vision(model).patch_dim
    return [Component("pixel values", Kind.INPUTS, pixels, why="float32"), _workspace(image, workspace)]


def _workspace(image: ImageSize, nbytes: int) -> Component:
    why = f"{image.patches:,} patches ({image.tokens:,} image tokens)"
    return predicted("vision workspace", Kind.WORKSPACE, nbytes, "vision", why=why)


def held_outputs(settings: Settings, image: ImageSize, each: int) -> int:
    """Bytes of outputs our engine holds at once: of all images in a chunk, also of one cut by its end."""
    tokens = max(image.tokens, 1)
    touched = 2 + settings.chunk // tokens
    # Of one size, and as large as any: smaller ones hold no more in all.
    asked = settings.sequences * max(settings.context // tokens, 1)
    return min(asked, touched) * each


def _level_bytes(model: Inventory, itemsize: int) -> int:
    """Bytes per patch of one deepstack level."""
    return itemsize * model.facts.text.hidden_size // _vision(model).merge_size ** 2


def _vision(model: Inventory) -> VisionFacts:
    assert model.facts.vision is not None, "no vision tower"
    return model.facts.vision
