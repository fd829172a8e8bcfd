"""Weights in memory: what each tensor becomes when it is loaded.

| format | bytes of a matrix of `rows` × `columns` |
|---|---|
| fp32, bf16 | 4, 2 per element (fp8 checkpoints are multiplied with their scales) |
| fp8 | 1 per element and the stored block scales; vLLM keeps the scales as float32 |
| int8 | 1 per element and a 16-bit scale per output row |
| int4 | ½ per element and, per group of `GROUP` columns, a 16-bit scale and a 4-bit zero point: 4.16 bits |

Embedding, lm_head, norms and the vision tower stay 16-bit (float32 in fp32). Ready-made 4- and 8-bit
checkpoints stay as they are stored.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from snugvl.planner.footprint.allocator import MIB, reserved_bytes, up
from snugvl.planner.footprint.component import Component
from snugvl.planner.inventory import PARTS, Group, Inventory, Part
from snugvl.planner.settings import Settings, WeightFormat

GROUP: Final = 128  # columns that share an int4 scale
SCALE_BYTES: Final = 2
ZERO_POINT_BITS: Final = 4
PLAIN_BYTES: Final[dict[WeightFormat, int]] = {"fp32": 4}  # 2 for every other format

LABELS: Final[dict[Part, str]] = {
    "decoder": "weights: decoder",
    "embedding": "weights: embedding",
    "lm_head": "weights: lm_head",
    "vision": "weights: vision tower",
}


def matrix_bytes(elements: int, rows: int, weights: WeightFormat, group: int = GROUP) -> int:
    """A matrix that is quantised while it is loaded. int4 may be cut in the last group of a row."""
    if weights == "fp32":
        return 4 * elements
    if weights == "bf16":
        return 2 * elements
    if weights == "int8":
        return elements + SCALE_BYTES * rows
    assert weights == "int4", f"{weights} is not made while loading"
    groups = rows * -(-(elements // rows) // group)
    return -(-elements // 2) + groups * SCALE_BYTES + -(-groups * ZERO_POINT_BITS // 8)


def loaded_bytes(group: Group, weights: WeightFormat, *, wide_scales: bool = False) -> int:
    """Bytes in memory of one tensor of `group`. `wide_scales`: vLLM turns 16-bit scales into float32."""
    elements = group.elements
    if group.kind == "packed":
        return group.nbytes
    if group.kind == "plain":
        return PLAIN_BYTES.get(weights, 2) * elements
    if group.kind == "scale":
        kept = weights in ("fp8", "int8", "int4") and not _requantised(weights)
        return (4 * elements if wide_scales else group.nbytes) if kept else 0
    if weights == "fp8":
        return elements if group.kind == "fp8" else 2 * elements
    rows = group.shape[-2] * (elements // (group.shape[-2] * group.shape[-1])) if len(group.shape) > 1 else 1
    return matrix_bytes(elements, rows, weights)


def _requantised(weights: WeightFormat) -> bool:
    """Scales of an FP8 checkpoint are used up when its matrices are turned into something else."""
    return weights in ("int8", "int4")


def sizes(
    model: Inventory, weights: WeightFormat, part: Part, *, wide_scales: bool = False
) -> Iterator[tuple[int, int]]:
    """(bytes, how many) of the tensors of one part."""
    packed = any(group.kind == "packed" for group in model.groups)
    for group in model.groups:
        if group.part == part:
            stored = packed and group.kind == "scale"  # scales of ready-made integers stay
            yield (
                (group.nbytes if stored else loaded_bytes(group, weights, wide_scales=wide_scales)),
                group.count,
            )


def weight_components(model: Inventory, settings: Settings) -> tuple[Component, ...]:
    """Weights per part on one GPU, and the allocator's rounding of all of them together.

    Parts are divided by the GPUs that share them: tensor parallelism cuts every matrix, pipeline parallelism
    cuts the layers (the embedding and the head stay whole on the first and the last GPU).
    """
    # Nothing else of the settings changes a weight: a solver asks for the same ones again and again.
    needed = Settings(
        settings.engine,
        settings.weights,
        images=min(settings.images, 1),
        vision=settings.vision,
        embedding=settings.embedding,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
    )
    return _components(model, needed)


@lru_cache(maxsize=1024)
def _components(model: Inventory, settings: Settings) -> tuple[Component, ...]:
    wide = settings.engine == "vllm"
    parts, resident = [], []
    for part in PARTS:
        entries = [entry for entry in sizes(model, settings.weights, part, wide_scales=wide) if entry[0]]
        share = settings.tensor_parallel * (settings.pipeline_parallel if part == "decoder" else 1)
        entries = [(-(-size // share), count) for size, count in entries]
        nbytes = sum(size * count for size, count in entries)
        place = {"vision": settings.vision, "embedding": settings.embedding}.get(part, "gpu")
        unused = part == "vision" and settings.images == 0 and settings.engine == "vllm"
        if place == "cpu" or unused or not nbytes:
            continue
        if place == "streamed":  # two blocks: one computes while the next arrives
            nbytes = 2 * _largest_block(model, nbytes)
            entries = [(nbytes // 2, 2)]
        resident += entries
        parts.append(Component(LABELS[part], nbytes, why=_why(part, settings, share)))
    exact = sum(size * count for size, count in resident)
    # transformers reserves one segment for all weights before it loads them; measured 1.0 to 3.5 MiB beyond.
    whole = settings.engine == "transformers"
    rounding = up(exact, 4 * MIB) - exact if whole else max(0, reserved_bytes(resident) - exact)
    parts.append(Component("allocator rounding", rounding, basis="predicted", why="segments of 2 and 20 MiB"))
    return tuple(parts)


def weight_bytes(model: Inventory, weights: WeightFormat, *, wide_scales: bool = False) -> int:
    """All weights in memory, without the allocator's rounding."""
    return sum(
        size * count for part in PARTS for size, count in sizes(model, weights, part, wide_scales=wide_scales)
    )


def _largest_block(model: Inventory, nbytes: int) -> int:
    assert model.facts.vision is not None
    return -(-nbytes // model.facts.vision.depth)


def _why(part: Part, settings: Settings, share: int) -> str:
    shared = f", shared by {share} GPUs" if share > 1 else ""
    if part == "decoder":
        return f"{settings.weights}{shared}"
    return f"{'fp32' if settings.weights == 'fp32' else 'bf16'}{shared}"
