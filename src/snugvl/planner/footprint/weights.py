"""Memory of weights: the bytes that each tensor takes once it is loaded.

| format | bytes of a matrix of `rows` × `columns` |
|---|---|
| fp32, bf16 | 4, 2 per element (fp8 checkpoints are multiplied with their scales) |
| fp8 | 1 per element, and a float32 scale for each block of 128 × 128 |
| int8 | 1 per element, and a 16-bit scale for each `GROUP` columns of a row: 8.125 bits |
| few bits | that many per element, a 16-bit scale and zero point for `Format.group` columns of a row |

A matrix whose sides don't divide so stays 16-bit, as do norms, biases, and what embeds patches and positions;
embedding, lm_head and the vision tower are 16-bit or int8 (our engine alone), a tower's matrix with a scale a
row where its columns don't divide. With float32 activations, 16-bit is 32-bit. Pre-quantized 4- and
8-bit checkpoints stay as they are stored; our engine has a 16-bit zero point beside each scale, and our own
format is what it has, tensor for tensor. A GGUF's
blocks are the file's bytes in another order, what isn't quantised in it is 16-bit.

A streamed vision tower keeps its blocks and mergers in host memory, each in one piece with its tensors at
multiples of 256 bytes. They pass through a room on the GPU for the largest block beside the largest piece
(`models/host_memory.py`). What embeds patches and positions stays there: it is used first, so that nothing
could hide its copy, and is a hundredth of the tower. An embedding in host memory takes nothing on the GPU,
which reads rows of it there (`models/host_memory.py`).

Experts in host memory are in one piece a layer there, with their tensors at multiples of 256 bytes. On the
GPU each layer has slots for some of them, and all layers share a room of two halves with `HALF_EXPERTS` each,
all in one piece (`models/expert_cache.py`).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any, Final

from snugvl.checkpoint.facts import ModelFacts
from snugvl.core.config import EXPERT_ROUNDS
from snugvl.core.formats import BITSANDBYTES, FEW_BITS, FORMATS, Format
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import format_size
from snugvl.planner.engines import rules_of
from snugvl.planner.engines.transformers.footprint import layer_bytes
from snugvl.planner.footprint.total import Component, predicted, reserved_bytes, up
from snugvl.planner.inventory import PARTS, Inventory, Part, TensorGroup, group_of, widths
from snugvl.planner.settings import Settings

GROUP: Final = 128  # columns that share a scale; rows and columns of an FP8 block
SCALE_BYTES: Final = 2
BLOCK_SCALE_BYTES: Final = 4
WIDE_SCALE_BYTES: Final = 4
STREAM_ALIGNMENT: Final = 256
STREAMED: Final = re.compile(r"\bvisual\.(?P<piece>blocks\.\d+|merger|deepstack_merger_list\.\d+)\.")
EXPERT_CACHE: Final = "expert cache"
HALF_EXPERTS: Final = 16  # `HALF` of `models/expert_cache.py`
HEADS: Final = ("embedding", "lm_head")
JOINED: Final = re.compile(  # parts of one matrix: of all experts, an MLP, attention, a router
    r"(?<=\.)(?:experts\.\d+\.(?:(?P<experts>gate_proj|up_proj)|down_proj)|(?P<mlp>gate_proj|up_proj)"
    r"|(?P<qkv>[qkv]_proj)|in_proj_(?:(?P<linear>qkv|z)|(?P<rates>b|a))|(?P<router>(?:shared_expert_)?gate))(?=\.)"
)

# Nothing else of the settings changes a weight, and a solver asks for the same ones again and again.
_OF_WEIGHTS: Final = (
    "engine", "weights", "head", "vision", "embedding", "tensor_parallel", "pipeline_parallel", "float32",
    "offloaded", "language_only", "vision_weights", "expert_slots",
)  # fmt: skip
_of_weights: Final = attrgetter(*_OF_WEIGHTS)

Matrix = tuple[tuple[TensorGroup, int], ...]
"""Tensors that become one matrix of our network, by group, with how many there are of each."""

LABELS: Final[dict[Part, str]] = {part: f"weights: {part}" for part in PARTS} | {
    "vision": "weights: vision tower"
}
KINDS: Final[dict[Part, Kind]] = {
    "decoder": Kind.WEIGHTS, "embedding": Kind.EMBEDDING, "lm_head": Kind.EMBEDDING, "vision": Kind.VISION,
    "predictor": Kind.WEIGHTS,
}  # fmt: skip


def int8_parts(rows: int, columns: int) -> tuple[int, ...]:
    """Bytes of (codes, scales) of a matrix that is rounded to int8; empty where its columns don't divide."""
    return () if columns % GROUP else (rows * columns, rows * columns // GROUP * SCALE_BYTES)


def few_bits_parts(rows: int, columns: int, form: Format, group: int | None = None) -> tuple[int, ...]:
    """Bytes of the planes of codes, of the scales and of the zero points of a matrix in few bits.

    `group`: columns that share a scale, where a pre-quantized matrix has other groups than the format.
    """
    group = group or form.group
    scales = rows * columns // group * SCALE_BYTES
    planes = (rows * columns * bits // 8 for bits in form.planes)
    return () if columns % group else (*planes, scales, scales)


def prequantized_parts(group: TensorGroup, settings: Settings, facts: ModelFacts) -> tuple[int, ...]:
    """Bytes of the tensors that one of `group` becomes, in a checkpoint with pre-quantized integers.

    Scales, and tensors that aren't packed, are groups of their own.
    """
    if group.kind not in ("scale", "scale8", "matrix") or group.part not in ("decoder", "predictor"):
        return loaded_parts(group, settings)
    if not rules_of(settings.engine).own_layout:
        return (group.nbytes,)
    if group.kind == "matrix":
        return (settings.itemsize * group.elements,)
    if facts.own:
        return (group.nbytes,)
    if group.kind == "scale8":
        return (group.nbytes,) if group.nbytes == SCALE_BYTES * group.elements else ()
    # Stored zero points and shapes are wider integers, and so are orders that say nothing.
    return (group.nbytes, group.nbytes) if group.nbytes == SCALE_BYTES * group.elements else ()


def prequantized_group(model: Inventory) -> int:
    """Number of columns that share a scale in a pre-quantized 4-bit checkpoint; `GROUP` for others."""
    scales = sum(
        group.elements * group.count
        for group in model.groups
        if group.kind == "scale" and group.nbytes == SCALE_BYTES * group.elements
    )
    packed = sum(group.nbytes * group.count for group in model.groups if group.kind == "packed")
    return codes_of_byte(model) * packed // scales if packed and scales else GROUP


def codes_of_byte(model: Inventory) -> int:
    """Number of codes in a byte of a pre-quantized checkpoint's packed tensors."""
    return 8 // FORMATS[model.facts.quantization or "fp8"].planes[0]


def bitsandbytes_parts(rows: int, columns: int, settings: Settings) -> tuple[int, ...]:
    """Bytes of (values, scales) of a matrix that bitsandbytes rounds; empty where it rounds none."""
    form = BITSANDBYTES.get(settings.weights)
    if form is None:
        return ()
    return rows * columns * form.bits // 8, -(-rows * columns // (form.block or columns)) * WIDE_SCALE_BYTES


@lru_cache(maxsize=128)
def keeps_fp8(model: Inventory) -> bool:
    """Whether our engine keeps the FP8 of a checkpoint: its blocks are 128 × 128, the kernels' own, and end
    where the rows of an expert's gate do, and those of each part of a joined matrix."""
    mixture = model.facts.text.mixture
    if model.facts.quantization != "fp8" or (mixture is not None and mixture.width % GROUP):
        return False
    odd = any(group.shape[-2] % GROUP for group in _in_fp8(model.groups))
    if odd and any(_cuts_blocks(alike) for alike, _ in _matrices(model)):
        return False
    scales = sum(group.elements * group.count for group in model.groups if group.kind == "scale")
    blocks = sum(
        prod(group.shape[:-2]) * -(-group.shape[-2] // GROUP) * -(-group.shape[-1] // GROUP) * group.count
        for group in _in_fp8(model.groups)
    )
    return blocks == scales


def _cuts_blocks(alike: Matrix) -> bool:
    """Whether a matrix is joined of FP8 tensors one of which ends within a block."""
    stored = _in_fp8(group for group, many in alike for _ in range(many))
    return len(stored) > 1 and any(group.shape[-2] % GROUP for group in stored)


def _in_fp8(groups: Iterable[TensorGroup]) -> list[TensorGroup]:
    """The groups of tensors that are stored in FP8."""
    return [group for group in groups if group.kind == "fp8"]


def matrix_parts(
    rows: int, columns: int, settings: Settings, *, stored_fp8: bool, group: int | None = None
) -> tuple[int, ...]:
    """Bytes of the tensors in which our engine keeps a matrix of a decoder layer."""
    wide = (settings.itemsize * rows * columns,)
    if settings.weights == "fp8":
        blocks = 0 if columns % GROUP or rows % GROUP else rows * columns // GROUP**2
        return (rows * columns, blocks * BLOCK_SCALE_BYTES) if stored_fp8 and blocks else wide
    if settings.weights == "int8":
        return int8_parts(rows, columns) or wide
    if settings.weights not in FEW_BITS:
        return wide
    return few_bits_parts(rows, columns, FORMATS[settings.weights], group) or wide


def loaded_parts(group: TensorGroup, settings: Settings) -> tuple[int, ...]:
    """Bytes of the tensors that one of `group` becomes in memory."""
    wide = (settings.itemsize * group.elements,)
    if group.kind in ("packed", "blocks"):
        return (group.nbytes,)
    rules = rules_of(settings.engine)
    native = rules.own_layout
    if group.kind == "scale":  # our engine's are counted with their matrix
        return (BLOCK_SCALE_BYTES * group.elements,) if settings.weights == "fp8" and not native else ()
    columns = group.shape[-1] if group.shape else 1
    rows = group.elements // columns
    if group.kind == "plain":
        int8 = group.part in HEADS and settings.head == "int8"
        return (int8_parts(rows, columns) or wide) if int8 else wide
    if group.kind == "tower":  # with a scale for a whole row where its columns don't divide
        int8_tower = int8_parts(rows, columns) or (rows * columns, rows * SCALE_BYTES)
        return int8_tower if settings.vision_weights == "int8" else wide
    if rules.bitsandbytes and group.kind == "matrix" and not group.expert:
        return bitsandbytes_parts(rows, columns, settings) or wide
    if not native:
        return (group.elements,) if settings.weights == "fp8" and group.kind == "fp8" else wide
    return matrix_parts(rows, columns, settings, stored_fp8=group.kind == "fp8")


def sizes(
    model: Inventory, settings: Settings, part: Part, *, experts: bool = False
) -> Iterator[tuple[int, int]]:
    """(bytes, count) of the tensors of one part, or of its experts alone."""
    packed = model.has("packed") or model.has("blocks")
    for group in model.groups:
        if group.part != part or (experts and not group.expert):
            continue
        ready = prequantized_parts(group, settings, model.facts) if packed else loaded_parts(group, settings)
        yield from ((nbytes, group.count) for nbytes in ready)


def joined(model: Inventory, settings: Settings) -> Iterator[tuple[int, int]]:
    """(bytes, count) of our decoder's tensors as allocated: q, k and v as one matrix, gate and up as one.

    Experts in host memory are not among them.
    """
    if model.has("blocks", "decoder"):
        yield from _joined_blocks(model, settings)
        return
    if model.facts.own or model.has("scale8", "decoder") or model.facts.text.mixture:
        yield from _joined_mixed(model, settings)
        return
    w = widths(model)
    stored = model.facts.quantization == "fp8"
    columns_of_scale = prequantized_group(model) if model.facts.quantization in FEW_BITS else None
    for rows, columns in ((w.q + 2 * w.k, w.h), (w.h, w.q), (2 * w.i, w.h), (w.h, w.i)):
        for nbytes in matrix_parts(rows, columns, settings, stored_fp8=stored, group=columns_of_scale):
            yield nbytes, model.facts.text.num_layers
    for group in model.groups:
        if group.part == "decoder" and group.kind == "plain":
            yield settings.itemsize * group.elements, group.count


def _matrix(found: re.Match[str]) -> str:
    return found.lastgroup or "experts.down"


def _joined_blocks(model: Inventory, settings: Settings) -> Iterator[tuple[int, int]]:
    """(bytes, count) of the tensors of a GGUF's decoder, whose tensors differ from layer to layer."""
    made: dict[str, int] = defaultdict(int)
    for tensor in model.facts.tensors:
        group = group_of(tensor)
        if group.part == "decoder" and not (group.expert and settings.expert_slots is not None):
            made[JOINED.sub(_matrix, tensor.name)] += sum(prequantized_parts(group, settings, model.facts))
    yield from ((nbytes, 1) for nbytes in made.values())


def _joined_mixed(model: Inventory, settings: Settings) -> Iterator[tuple[int, int]]:
    """(bytes, count) of pre-quantized integers, whose widths differ from layer to layer."""
    for alike, count in _matrices(model):
        if not (alike[0][0].expert and settings.expert_slots is not None):
            yield from ((nbytes, count) for nbytes in _planes(alike, model, settings))


def _planes(alike: Matrix, model: Inventory, settings: Settings) -> list[int]:
    """Bytes of the tensors that a matrix becomes: codes, scales, zero points."""
    packed = model.has("packed") or model.has("blocks")
    made: dict[int, int] = defaultdict(int)
    for group, many in alike:
        parts = prequantized_parts(group, settings, model.facts) if packed else loaded_parts(group, settings)
        for number, nbytes in enumerate(parts):
            made[number] += nbytes * many
    return list(made.values())


def expert_cache_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes on the GPU of slots for experts in host memory, and of the room for those without a slot."""
    mixture, slots = model.facts.text.mixture, settings.expert_slots
    if mixture is None or slots is None:
        return 0
    layers = _expert_layers(model)

    def room(matrices: tuple[Matrix, ...], count: int) -> int:
        each = (nbytes for matrix in matrices for nbytes in _planes(matrix, model, settings))
        return sum(up(nbytes // mixture.count * count, STREAM_ALIGNMENT) for nbytes in each)

    half = max(room(matrices, min(HALF_EXPERTS, mixture.count)) for matrices, _ in layers)
    return sum(room(matrices, slots) * many for matrices, many in layers) + 2 * half


def recordable_tokens(model: Inventory, settings: Settings) -> int | None:
    """Tokens of the largest step of our engine that a CUDA graph may hold; None: of any.

    With experts in host memory that is a step whose experts the GPU fetches, `EXPERT_ROUNDS` times all slots.
    """
    mixture, slots = model.facts.text.mixture, settings.expert_slots
    if mixture is None or slots is None:
        return None
    return 0 if settings.eager else EXPERT_ROUNDS * slots // mixture.used


def expert_host_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of experts in host memory; 0 where they are on the GPU."""
    if settings.expert_slots is None:
        return 0
    return sum(
        up(nbytes, STREAM_ALIGNMENT) * many
        for matrices, many in _expert_layers(model)
        for matrix in matrices
        for nbytes in _planes(matrix, model, settings)
    )


@lru_cache(maxsize=64)
def _expert_layers(model: Inventory) -> tuple[tuple[tuple[Matrix, ...], int], ...]:
    """Matrices of the experts of a layer, and how many such layers there are."""
    layers: dict[str, dict[str, Counter[TensorGroup]]] = defaultdict(lambda: defaultdict(Counter))
    for tensor in model.facts.tensors:
        group = group_of(tensor)
        if group.part == "decoder" and group.expert and tensor.loaded:
            layer = tensor.name.partition(".experts.")[0]
            layers[layer][JOINED.sub(_matrix, tensor.name.removeprefix(layer))][group] += 1
    made = (tuple(tuple(sorted(each.items(), key=repr)) for each in one.values()) for one in layers.values())
    return tuple(Counter(made).items())


@lru_cache(maxsize=64)
def _matrices(model: Inventory) -> tuple[tuple[Matrix, int], ...]:
    """Tensors of one matrix of the decoder, by group, and how many such matrices there are."""
    made: dict[str, Counter[TensorGroup]] = defaultdict(Counter)
    for tensor in model.facts.tensors:
        group = group_of(tensor)
        if group.part == "decoder" and tensor.loaded:
            made[JOINED.sub(_matrix, tensor.name)][group] += 1
    found: dict[Matrix, int] = defaultdict(int)
    for alike, many in Counter(tuple(each.items()) for each in made.values()).items():
        found[tuple(sorted(alike, key=repr))] += many
    return tuple(found.items())


def weight_components(model: Inventory, settings: Settings) -> tuple[Component, ...]:
    """Components of weights per part on one GPU, and of the allocator's rounding of all of them together.

    Parts are divided by the GPUs that share them: tensor parallelism cuts every matrix, pipeline parallelism
    cuts the layers (the embedding and the head stay whole on the first and the last GPU).
    """
    return _components(model, settings.images > 0, _of_weights(settings))


@lru_cache(maxsize=4096)  # all that plans for every form of every model ask for
def _components(model: Inventory, images: bool, values: tuple[Any, ...]) -> tuple[Component, ...]:
    """`values`: of the settings of `_OF_WEIGHTS`."""
    settings = Settings(**dict(zip(_OF_WEIGHTS, values, strict=True)), images=int(images))
    return rules_of(settings.engine).weight_components(model, settings)


def parts_in_one_segment(model: Inventory, settings: Settings) -> tuple[Component, ...]:
    """Components of weights per part on one GPU, all in one segment, and of the allocator's rounding."""
    rules = rules_of(settings.engine)
    parts, resident = [], []
    for part in PARTS:
        entries = [entry for entry in sizes(model, settings, part) if entry[0]]
        share = settings.tensor_parallel * (settings.pipeline_parallel if part == "decoder" else 1)
        entries = [(-(-size // share), count) for size, count in entries]
        nbytes = sum(size * count for size, count in entries)
        place = {"vision": settings.vision, "embedding": settings.embedding}.get(part, "gpu")
        if place == "cpu" or (part == "vision" and without_tower(settings)) or not nbytes:
            continue
        if part == "decoder" and settings.expert_slots is not None:
            nbytes -= part_bytes(model, settings, part, experts=True)
            entries = [(nbytes, 1)]
        if part == "decoder" and rules.own_layout:
            together = list(joined(model, settings))
            # Hybrid layers are of other shapes, and some files store the matrices joined: as they are.
            if sum(size * count for size, count in together) == nbytes:
                entries = together
        if part == "decoder" and settings.offloaded:
            nbytes -= layer_bytes(model, settings)
            entries = [(nbytes, 1)]
        if place == "streamed":
            entries = streaming_sizes(model, settings)
            nbytes = sum(size * count for size, count in entries)
        resident += entries
        crossing = crossing_bytes(model, settings) if place == "streamed" else 0
        streamed = f", a room through which {format_size(crossing)} stream" if crossing else ""
        parts.append(
            Component(
                LABELS[part], KINDS[part], nbytes, why=part_why(model, part, settings, share) + streamed
            )
        )
    exact = sum(size * count for size, count in resident)
    rounding = max(0, rules.segment_bytes(resident) - exact)
    if slots := expert_cache_bytes(model, settings):  # apart, as it may be given to other programs
        rounding += reserved_bytes([(slots, 1)]) - slots
        why = f"{settings.expert_slots} of each layer, and {2 * HALF_EXPERTS} that pass through"
        parts.insert(1, Component(EXPERT_CACHE, Kind.WEIGHTS, slots, why=why))
    why = "one segment, and small ones"
    parts.append(predicted("allocator rounding", Kind.ROUNDING, rounding, why=why))
    return tuple(parts)


def without_tower(settings: Settings) -> bool:
    """Whether the vision tower is left out: by wish, or by an engine where no images are allowed."""
    dropped = settings.images == 0 and rules_of(settings.engine).drops_unused_tower
    return settings.language_only or dropped


def part_bytes(model: Inventory, settings: Settings, part: Part, *, experts: bool = False) -> int:
    """Bytes of one part, or of its experts alone, wherever in memory it is."""
    return sum(size * count for size, count in sizes(model, settings, part, experts=experts))


def streaming_sizes(model: Inventory, settings: Settings) -> list[tuple[int, int]]:
    """(bytes, count) of a streamed tower's tensors on the GPU, with the room for its largest block."""
    pieces = list(_pieces(model, settings))
    block = max(nbytes for kind, nbytes, _ in pieces if kind == "blocks")
    beside = [
        (nbytes, many)
        for kind, groups, _ in _streamable(model)
        for group, many in groups
        for nbytes in loaded_parts(group, settings)
        if not kind
    ]
    return [*beside, (block + max(nbytes for _, nbytes, _ in pieces), 1)]


def crossing_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of a streamed tower in host memory, which are copied to the GPU for every picture."""
    if settings.vision != "streamed" or without_tower(settings):
        return 0
    return sum(nbytes * alike for _, nbytes, alike in _pieces(model, settings))


def _pieces(model: Inventory, settings: Settings) -> Iterator[tuple[str, int, int]]:
    """Pieces in which a tower is streamed: their kind, the bytes of one, and how many are alike."""
    for kind, groups, alike in _streamable(model):
        if kind:
            parts = ((loaded_parts(group, settings), many) for group, many in groups)
            yield kind, sum(up(part, STREAM_ALIGNMENT) * many for each, many in parts for part in each), alike


@lru_cache(maxsize=64)
def _streamable(model: Inventory) -> tuple[tuple[str, Matrix, int], ...]:
    """A tower's tensors by piece: the piece's kind (empty for tensors that are in none), its tensors by
    group, and how many pieces are alike."""
    found: dict[str, Counter[TensorGroup]] = defaultdict(Counter)
    for tensor in model.facts.tensors:
        if tensor.role in ("vision", "connector") and tensor.loaded:
            match = STREAMED.search(tensor.name)
            found[match["piece"] if match else ""][group_of(tensor)] += 1
    kinds = Counter((piece.partition(".")[0], tuple(groups.items())) for piece, groups in found.items())
    return tuple((kind, groups, alike) for (kind, groups), alike in kinds.items())


def weight_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of all weights in memory, without the allocator's rounding."""
    return sum(part_bytes(model, settings, part) for part in PARTS)


def part_why(model: Inventory, part: Part, settings: Settings, share: int) -> str:
    """The text of a part's formats, for people."""
    shared = f", shared by {share} GPUs" if share > 1 else ""
    plain = "fp32" if settings.itemsize == 4 else "bf16"
    kind: str = settings.vision_weights if part == "vision" else settings.head
    kind = settings.weights if part in ("decoder", "predictor") else kind
    if model.facts.gguf is not None and model.has("blocks", part):
        return f"{model.facts.gguf.file_type} as stored"
    return f"{plain if kind == 'bf16' else kind}{shared}"
