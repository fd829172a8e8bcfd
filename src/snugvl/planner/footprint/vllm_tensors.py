"""The tensors that vLLM makes of a checkpoint, and what its log calls them together: "Model loading took".

vLLM joins matrices that read the same input before it loads them (read in vLLM 0.32,
`model_executor/layers/linear.py` and the models): queries, keys and values, gate and up, the projections of
linear attention, the matrices of all experts of a layer. Larger tensors round otherwise in torch's allocator:
of Qwen2.5-1.5B that is 3 %. Rows of embedding and head are padded to 64. With tensor parallel a matrix is cut
into equal parts (heads of keys that are fewer than the GPUs are kept several times), norms are whole on every
GPU; pipeline parallel cuts the layers.

While it loads, vLLM since 0.24 or so sets `max_split_size_mb:20` (`_scoped_allocator_max_split` of
`v1/worker/gpu_worker.py`): from then on a tensor of 20 MiB or more counts as a multiple of 2 MiB. Logs tell:
Qwen2.5-1.5B 2.8871 GiB in 0.11.2, 2.98 in September 2026.

"Model loading took" is `memory_allocated` after loading, which the buffers made with the model are in:

    rotary cache         positions · rotary width · 2 bytes; four times the positions with M-RoPE, once more
                         for Gemma 3's local layers, and with LongRoPE those of the original context again
    deepstack buffers    levels · max_num_batched_tokens · hidden · 2 bytes
"""

import re
from functools import lru_cache
from typing import Final, NamedTuple

from snugvl.checkpoint.facts import TensorFact
from snugvl.planner.footprint.allocator import MIB, CachingAllocator, up
from snugvl.planner.footprint.offload import LAYER
from snugvl.planner.footprint.widths import widths
from snugvl.planner.inventory import Inventory, Part, group_of
from snugvl.planner.settings import Settings

MAX_SPLIT_BYTES: Final = 20 * MIB
VOCABULARY_PADDING: Final = 64
SCALE_BYTES: Final = 4  # scales of FP8 blocks are float32 in memory
ROTARY_BYTES: Final = 2
MROPE_FACTOR: Final = 4
MROPE_FAMILIES: Final = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5")
# Of the families that rotate a part of each head: one of so many values.
ROTARY_DIVISOR: Final = {"qwen3_5": 4}
LOCAL_ROTARY_FAMILIES: Final = ("gemma3", "gemma3_text")

_JOINED: Final = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba", "in_proj_a": "in_proj_ba",
}  # fmt: skip
_EXPERT: Final = re.compile(r"\bexperts\.\d+\.")
_KEYS: Final = re.compile(r"\b[kv]_proj\.")
# One-dimensional tensors that are cut with their matrix, and what is on every GPU though it is a matrix.
_CUT_WITH: Final = re.compile(r"\b([qkv]_proj|gate_proj|up_proj|linear_attn)\.")
_WHOLE: Final = re.compile(r"\b(patch|pos(ition)?)_embed|\bmlp\.gate\.|\bnorm\b|_norm\b|layernorm")


class Loaded(NamedTuple):
    """One tensor as vLLM holds it on one GPU."""

    part: Part
    nbytes: int


@lru_cache(maxsize=256)
def loaded_tensors(
    model: Inventory, weights: str, itemsize: int, tensor_parallel: int, pipeline_parallel: int, tower: bool
) -> tuple[Loaded, ...]:
    """Every tensor of the fullest GPU, in the order of the checkpoint.

    Args:
        weights: format of the decoder's matrices; those that are stored in FP8 become 16-bit unless "fp8".
        itemsize: bytes of a value that isn't quantised.
        tower: the vision tower is loaded.
    """
    layers = -(-model.facts.text.num_layers // pipeline_parallel)
    found: dict[str, Loaded] = {}
    for tensor in model.facts.tensors:
        part = group_of(tensor).part
        if not tensor.loaded or (part == "lm_head" and model.facts.tied) or (part == "vision" and not tower):
            continue
        named = LAYER.match(tensor.name)
        if named and part == "decoder" and int(named["number"]) >= layers:
            continue
        nbytes = _nbytes(tensor, part, weights, itemsize)
        nbytes = -(-nbytes // _share(model, tensor, tensor_parallel))
        name = _joined(tensor.name)
        found[name] = Loaded(part, nbytes + (found[name].nbytes if name in found else 0))
    return tuple(found.values())


def tensors_of(model: Inventory, settings: Settings) -> tuple[Loaded, ...]:
    """The same for `settings`. Where no image is allowed vLLM leaves the tower out."""
    tower = bool(settings.images) and not settings.language_only
    return loaded_tensors(
        model,
        settings.weights,
        settings.itemsize,
        settings.tensor_parallel,
        settings.pipeline_parallel,
        tower,
    )


def rotary_caches(model: Inventory) -> tuple[int, ...]:
    """Bytes of each table of cosines and sines (`--max-model-len` shrinks none of them)."""
    family, positions = model.facts.family, model.facts.text.max_position_embeddings
    width = widths(model).d // ROTARY_DIVISOR.get(family, 1) * ROTARY_BYTES
    if family in MROPE_FAMILIES:
        return (MROPE_FACTOR * positions * width,)
    if family in LOCAL_ROTARY_FAMILIES:
        return (positions * width,) * 2
    return ((positions + (model.facts.native_positions or 0)) * width,)


def deepstack_buffers(model: Inventory, batched_tokens: int) -> tuple[int, ...]:
    """Bytes of the inputs of the first decoder layers, for the largest batch: one a level."""
    vision = model.facts.vision
    return (batched_tokens * widths(model).h * 2,) * vision.deepstack_levels if vision else ()


def loading_bytes(
    model: Inventory, settings: Settings, max_split_bytes: int | None = MAX_SPLIT_BYTES
) -> CachingAllocator:
    """The allocator when the model is loaded: `allocated` is what vLLM logs, `reserved` what the card gives.

    `max_split_bytes`: None for a vLLM before the limit.
    """
    allocator = CachingAllocator(max_split_bytes)
    sizes = [tensor.nbytes for tensor in tensors_of(model, settings)]
    deepstack = deepstack_buffers(model, settings.chunk) if settings.images else ()
    for nbytes in filter(None, (*sizes, *rotary_caches(model), *deepstack)):
        allocator.allocate(nbytes)
    return allocator


def _nbytes(tensor: TensorFact, part: Part, weights: str, itemsize: int) -> int:
    """Bytes of a tensor when it is loaded, on all GPUs together."""
    group = group_of(tensor)
    if group.kind == "packed":
        return group.nbytes
    if group.kind == "scale":
        ready_made = group.nbytes if weights in ("int4", "int8") else 0
        return SCALE_BYTES * group.elements if weights == "fp8" else ready_made
    if group.kind == "fp8" and weights == "fp8":
        return group.elements
    if part in ("embedding", "lm_head") and len(tensor.shape) == 2:
        rows, columns = tensor.shape
        return up(rows, VOCABULARY_PADDING) * columns * itemsize
    return group.elements * itemsize


def _share(model: Inventory, tensor: TensorFact, gpus: int) -> int:
    """GPUs among which a tensor is cut."""
    if gpus == 1 or _WHOLE.search(tensor.name) or tensor.role == "norm":
        return 1
    if len(tensor.shape) == 1 and not _CUT_WITH.search(tensor.name):
        return 1
    if _KEYS.search(tensor.name) and tensor.role not in ("vision", "connector"):
        heads = max(layer.kv_heads for layer, _ in model.kv_layers)
        return min(gpus, max(heads, 1))
    return gpus


def _joined(name: str) -> str:
    """The name of the tensor that this one is a part of."""
    return ".".join(_JOINED.get(word, word) for word in _EXPERT.sub("experts.", name).split("."))
