"""The tensors that vLLM makes of a checkpoint, whose sum its log calls "Model loading took".

vLLM joins matrices that read the same input before it loads them (read in vLLM 0.32,
`model_executor/layers/linear.py` and the models): queries, keys and values, gate and up, the projections of
linear attention, the matrices of all experts of a layer. Larger tensors round otherwise in torch's allocator:
of Qwen2.5-1.5B that is 3 %. Rows of embedding and head are padded to 64. With tensor parallel a matrix is cut
into equal parts (heads of keys that are fewer than the GPUs are kept several times), norms are whole on every
GPU; pipeline parallel cuts the layers.

While it loads, vLLM since 0.23 or so sets `max_split_size_mb:20` (`_scoped_allocator_max_split` of
`v1/worker/gpu_worker.py`): from then on a tensor of 20 MiB or more counts as a multiple of 2 MiB. Logs tell:
Qwen2.5-1.5B 2.8871 GiB in 0.11.2, 2.98 in September 2026.

"Model loading took" is `memory_allocated` after loading, which the buffers made with the model are in:

    rotary cache         positions · rotary width · 2 bytes; four times the positions with M-RoPE, with
                         LongRoPE those of the original context again; Gemma 3 has one for its local layers
                         and one, stretched eight times, for the others (0.5 GiB: of the 4B 8.5834 are logged)
    deepstack buffers    levels · max_num_batched_tokens · hidden · 2 bytes
"""

import re
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

from snugvl.checkpoint.facts import TensorFact
from snugvl.checkpoint.families import traits_of
from snugvl.core.formats import PREQUANTIZED
from snugvl.core.sizes import MIB
from snugvl.planner.footprint.total import CachingAllocator, up
from snugvl.planner.inventory import Inventory, Kind, Part, group_of, widths
from snugvl.planner.settings import Settings

MAX_SPLIT_BYTES: Final = 20 * MIB
VOCABULARY_PADDING: Final = 64
MOST_GPUS: Final = 1 << 10
SCALE_BYTES: Final = 4  # scales of FP8 blocks are float32 in memory
ROTARY_BYTES: Final = 2
MROPE_FACTOR: Final = 4

_JOINED: Final = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba", "in_proj_a": "in_proj_ba",
}  # fmt: skip
_BLOCKS: Final = (".layers.", ".blocks.", ".layer.")
_EXPERT: Final = re.compile(r"\bexperts\.\d+\.")
_KEYS: Final = re.compile(r"\b[kv]_proj\.")
# One-dimensional tensors that are cut with their matrix, and what is on every GPU though it is a matrix.
_CUT_WITH: Final = re.compile(r"\b([qkv]_proj|gate_proj|up_proj|linear_attn)\.")
_WHOLE: Final = re.compile(r"\b(patch|pos(ition)?)_embed|\bmlp\.gate\.|\bnorm\b|_norm\b|layernorm")


class Loaded(NamedTuple):
    """One tensor as vLLM holds it on one GPU."""

    part: Part
    nbytes: int


class _Piece(NamedTuple):
    """A stored tensor's part of one that vLLM makes. `most_shares`: GPUs among which it is cut at most."""

    kind: Kind
    elements: int
    nbytes: int
    most_shares: int


class _Joined(NamedTuple):
    """A tensor that vLLM makes. `layer`: of the decoder; -1 outside it."""

    part: Part
    layer: int
    pieces: tuple[_Piece, ...]


@lru_cache(maxsize=256)
def loaded_tensors(
    model: Inventory, weights: str, itemsize: int, tensor_parallel: int, pipeline_parallel: int, tower: bool
) -> tuple[Loaded, ...]:
    """Every tensor of the fullest GPU, in the order of the checkpoint.

    Args:
        weights: format of the decoder's matrices; those that are stored in FP8 become 16-bit unless "fp8".
        itemsize: bytes of a value that isn't quantised.
        tower: whether the vision tower is loaded.
    """
    layers = -(-model.facts.text.num_layers // pipeline_parallel)
    prequantized = model.facts.quantization in PREQUANTIZED.values()
    sizes: dict[tuple[_Piece, ...], int] = {}  # most layers are alike
    found = []
    for part, layer, pieces in _joined(model):
        if layer >= layers or (part == "vision" and not tower):
            continue
        nbytes = sizes.get(pieces)
        if nbytes is None:
            nbytes = 0
            for piece in pieces:
                share = min(tensor_parallel, piece.most_shares)
                nbytes += -(-_nbytes(piece, weights, itemsize, prequantized) // share)
            sizes[pieces] = nbytes
        found.append(Loaded(part, nbytes))
    return tuple(found)


def tensors_of(model: Inventory, settings: Settings) -> tuple[Loaded, ...]:
    """Tensors that vLLM loads with `settings`. Where no image is allowed it leaves the tower out."""
    tower = bool(settings.images) and not settings.language_only
    return loaded_tensors(
        model,
        settings.weights,
        settings.itemsize,
        settings.tensor_parallel,
        settings.pipeline_parallel,
        tower,
    )


@lru_cache(maxsize=256)
def _joined(model: Inventory) -> tuple[_Joined, ...]:
    """Every tensor that vLLM makes, from the stored ones. A plan over the catalogue reads 50,000 names."""
    known: dict[tuple[str, str, str, tuple[int, ...]], tuple[str, Part, _Piece] | None] = {}
    found: dict[tuple[str, str], tuple[Part, list[_Piece]]] = {}
    for tensor in model.facts.tensors:
        if not tensor.loaded:
            continue
        block, number, rest = _split(tensor.name)
        key = (block, rest, tensor.dtype, tensor.shape)
        if key not in known:
            part = group_of(tensor).part
            tied = part == "lm_head" and model.facts.tied
            name = ".".join(_JOINED.get(word, word) for word in _EXPERT.sub("experts.", rest).split("."))
            known[key] = None if tied else (f"{block}.{name}", part, _piece(model, tensor, part))
        told = known[key]
        if told is not None:
            name, part, piece = told
            found.setdefault((number, name), (part, []))[1].append(piece)
    return tuple(
        _Joined(part, int(number) if number and part == "decoder" else -1, tuple(pieces))
        for (number, _), (part, pieces) in found.items()
    )


def _split(name: str) -> tuple[str, str, str]:
    """A tensor's name in three parts: before the number of its layer, the number, and after it."""
    for block in _BLOCKS:
        before, found, behind = name.partition(block)
        if found:
            number, _, rest = behind.partition(".")
            return before + block, number, rest
    return "", "", name


def rotary_caches(model: Inventory) -> tuple[int, ...]:
    """Bytes of each table of cosines and sines (`--max-model-len` shrinks none of them)."""
    traits, positions = traits_of(model.facts.family), model.facts.text.max_position_embeddings
    width = widths(model).d // traits.rotary_divisor * ROTARY_BYTES
    if traits.mrope:
        return (MROPE_FACTOR * positions * width,)
    if traits.stretched is not None:
        return positions * width, traits.stretched * positions * width
    return ((positions + (model.facts.native_positions or 0)) * width,)


def deepstack_buffers(model: Inventory, batched_tokens: int) -> tuple[int, ...]:
    """Bytes of the inputs of the first decoder layers, for the largest batch: one a level."""
    vision = model.facts.vision
    return (batched_tokens * widths(model).h * 2,) * vision.deepstack_levels if vision else ()


def loading_bytes(
    model: Inventory, settings: Settings, max_split_bytes: int | None = MAX_SPLIT_BYTES
) -> CachingAllocator:
    """The allocator's state once the model is loaded: vLLM logs `allocated`; the card gives `reserved`.

    `max_split_bytes`: None for a vLLM before the limit.
    """
    allocator = CachingAllocator(max_split_bytes)
    sizes = [tensor.nbytes for tensor in tensors_of(model, settings)]
    deepstack = deepstack_buffers(model, settings.chunk) if settings.images else ()
    for nbytes in filter(None, (*sizes, *rotary_caches(model), *deepstack)):
        allocator.allocate(nbytes)
    return allocator


def _piece(model: Inventory, tensor: TensorFact, part: Part) -> _Piece:
    group, elements = group_of(tensor), prod(tensor.shape)
    if part in ("embedding", "lm_head") and len(tensor.shape) == 2:
        elements = up(tensor.shape[0], VOCABULARY_PADDING) * tensor.shape[1]
    return _Piece(group.kind, elements, group.nbytes, _most_shares(model, tensor))


def _nbytes(piece: _Piece, weights: str, itemsize: int, prequantized: bool) -> int:
    """Bytes when it is loaded, on all GPUs together. `prequantized`: a checkpoint of packed integers."""
    if piece.kind == "packed":
        return piece.nbytes
    if piece.kind in ("scale", "scale8"):
        plain = piece.nbytes if prequantized else 0
        return SCALE_BYTES * piece.elements if weights == "fp8" else plain
    return piece.elements * (1 if piece.kind == "fp8" and weights == "fp8" else itemsize)


def _most_shares(model: Inventory, tensor: TensorFact) -> int:
    """GPUs among which a tensor is cut at most: 1 for what is whole on each."""
    if tensor.role == "norm" or _WHOLE.search(tensor.name):
        return 1
    if len(tensor.shape) == 1 and not _CUT_WITH.search(tensor.name):
        return 1
    if _KEYS.search(tensor.name) and tensor.role not in ("vision", "connector"):
        return max(1, *(layer.kv_heads for layer, _ in model.kv_layers))
    return MOST_GPUS
