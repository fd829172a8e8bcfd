"""The footprint of our own engine: on a GPU, where kernels read the weights as they are stored, and on a CPU.

Values of s bytes (2, or 4 in float32); h hidden, i intermediate, q = heads · head_dim,
k = kv_heads · head_dim, d = head_dim. Prefill, per token of a chunk, in the largest moment of a layer:

| | low-bit weights | bf16 weights |
|---|---|---|
| qkv | s (2h + q + 2k) | s (2h + q + 2k) |
| output projection | s (2h + 3q + 2k) | s (3h + 3q + 2k) |
| gate and up | s (3h + i + 2n), n columns of both at a time | s (2h + 3i): both, and their product |
| down | s (3h + i) | s (4h + i) |

A mixture of experts takes s (3h + e + k (h + j)) in place of the last two, k experts of width j for a token
and e = h where all tokens share an expert; beside it 4 (n + 1) for the scores of n experts and 12 k.

The rotation (2 s d), ids, positions and slots (48) come to it, and what image tokens bring. There are no
scores of attention: the kernels keep them in registers. Low-bit weights are widened a slice of 32 MiB at a
time. Then the logits,
which outlive the layers: V (4 + s) bytes a row, 4 V where the head is int8 or there is one row.

Decoding runs in CUDA graphs, one for each batch size, in one memory pool: the logits of every size stay, the
rest is shared. Attention splits a context in 16 parts, each with a float32 output. Products of a few rows are
split over their columns: a float32 tile for each part.

On a CPU, in plain torch, a token of a prompt takes s (4i + 2h + 2d), the MLP being the peak, or with
a mixture s (k h + 6h + 4j + e) + 8h + 16 (n + 1).

Sampling takes 56 bytes a score where filters sort a whole row (traced: `tests/planner/test_native.py`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from snugvl.core.formats import FEW_BITS, FORMATS, LOW_BIT, Precision
from snugvl.core.memory_kinds import Kind
from snugvl.hardware import calibration
from snugvl.planner.engines.native import hybrid
from snugvl.planner.engines.transformers.footprint import logits
from snugvl.planner.footprint.total import (
    LARGE_ROUND_BYTES,
    Component,
    measured,
    predicted,
    reserved_bytes,
    up,
)
from snugvl.planner.footprint.vision import SLICE_ROWS, encoder_bytes_per_token, slice_rows
from snugvl.planner.footprint.weights import GROUP, prequantized_group, recordable_tokens
from snugvl.planner.inventory import Inventory, Widths, mlp_width, widths
from snugvl.planner.settings import Settings

SLICE_BYTES: Final = 32 << 20  # of widened weights
SCORE_BYTES: Final = 4  # of an expert, for a token
PAIR_BYTES: Final = 12  # of a token and an expert: its number, its share, its place in the order
TOKEN_BYTES: Final = 48  # id, three positions, slot, row of a placeholder
ATTENTION_SPLITS: Final = 16
SMALL_ROWS: Final = 64  # up to here a product may be split over its columns
WIDENED_ROWS: Final = 32  # of a product with codes in two planes, which widens them for more
SAMPLING_BYTES: Final = 56
WIDE_ROWS: Final = 4096  # of `layers/linear.py`
WIDE_BYTES: Final = 16  # a code of few bits as int32, as float32, less its zero point, times its scale
GRAPH_SIZES: Final = (1, 2, 4, 8, 16, 32)
# What the driver holds of compiled kernels and of recorded graphs once all have run, beyond the context,
# which each start measures (`backends/place.py`): 16 to 18 MiB on an H200, at most 8 of them at once. An
# engine that took more is remembered.
KERNEL_BYTES: Final = calibration.KERNEL_BYTES
KERNELS: Final = "compiled kernels"
# The driver takes memory when a kernel or a library first runs, for some of them long after the start, and
# torch's cap knows nothing of it. Half of this is kept free for the next ones as long as the engine runs
# (`engine/pressure.py`).
LATE_BYTES: Final = 32 << 20
LATE: Final = Kind.KERNELS.value
GRAPHS_LIBRARY: Final = "cuBLAS workspace of the graphs"
TABLE_BYTES: Final = 8  # a block number of a graph's table, as it arrives and in its place

# Tensors of up to 1 MiB, which torch's allocator keeps apart (7 MiB of them were seen on an H200), and what
# lies idle between others in the workspace's one piece.
SMALL_TENSORS_BYTES: Final = 16 << 20

PIECE_BYTES: Final = 8 << 20
READERS: Final = (4, 2, 1)  # threads that fill a GPU, a piece each
# Threads and bytes of their pieces, the quickest first: a piece costs Python as much whatever its size.
LOADING: Final = ((4, 32 << 20), (4, 16 << 20), *((threads, PIECE_BYTES) for threads in READERS))
# Beyond the piece itself, per element of it: traced on `Linear.put`.
PUT_BYTES: Final[dict[Precision, int]] = {
    "fp32": 4, "bf16": 0, "fp8": 0, "int8": 13, **dict.fromkeys(FEW_BITS, 17)
}  # fmt: skip
DEQUANTISED_BYTES: Final = 12
BLOCK_BYTES: Final = 6  # of a byte of a GGUF's blocks that are sorted: `layers/ggml.py`
PREQUANTIZED_BYTES: Final = 1  # codes of a piece that are moved at once


def prefill_per_token(model: Inventory, settings: Settings) -> int:
    """Peak bytes of a layer's activations for each token of a chunk, without those for image tokens."""
    return _per_token(model, settings.itemsize, low_bit=settings.weights in LOW_BIT)


# A solver asks for thousands of footprints of a few models: what few of the settings decide is kept.
@lru_cache(maxsize=1024)
def _per_token(model: Inventory, itemsize: int, *, low_bit: bool) -> int:
    w, s = own_widths(model), itemsize
    heads = s * (w.q + 2 * w.k)
    moments: tuple[int, ...]
    if low_bit:
        moments = (s * (2 * w.h + 2 * w.q) + heads, s * (3 * w.h + w.i + 2 * _at_once(w, s)))
    else:
        moments = (
            s * (3 * w.h + 2 * w.q) + heads,
            s * (2 * w.h + 3 * w.i),
            s * (3 * w.h + 2 * w.i),
            s * (4 * w.h + w.i),
        )
    return max(*moments, experts_per_token(model, s)) + 2 * s * w.d + TOKEN_BYTES


@lru_cache(maxsize=256)
def own_widths(model: Inventory) -> Widths:
    """Widths, of MLPs that of those which our engine has beside experts."""
    return replace(widths(model), i=mlp_width(model))


def experts_per_token(model: Inventory, itemsize: int) -> int:
    """Workspace of a layer of experts for each token on a GPU, in bytes; 0 for other models."""
    mixture, h = model.facts.text.mixture, model.facts.text.hidden_size
    if mixture is None:
        return 0
    shared = mixture.shared > 0
    beside = SCORE_BYTES * (mixture.count + shared) + PAIR_BYTES * mixture.used
    return itemsize * ((3 + shared) * h + mixture.used * (h + mixture.width)) + beside


def _at_once(w: Widths, itemsize: int) -> int:
    """Number of columns of gate and up multiplied at a time: a slice holds both, and slices are equal."""
    return up(-(-w.i // (slices(w.i, 2 * w.h, itemsize) or 1)), SLICE_ROWS)


def slices(rows: int, columns: int, itemsize: int) -> int:
    """Number of slices in which a low-bit matrix is dequantized (`products/dequantize.py`)."""
    return -(-rows // slice_rows(columns * itemsize, SLICE_BYTES)) if rows * columns else 0


def slice_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of widened weights at a time: a slice, or the largest matrix where that is less."""
    if settings.weights not in LOW_BIT:
        return 0
    w = own_widths(model)
    rows = (w.h * (w.q + 2 * w.k), w.q * w.h, 2 * w.i * w.h)
    return min(SLICE_BYTES, max(rows) * settings.itemsize)


def _head_of_blocks(model: Inventory) -> bool:
    """Whether lm_head is stored as a GGUF's blocks: our own kernels multiply it, with float32 results."""
    return model.has("blocks", "embedding" if model.facts.tied else "lm_head")


def logits_bytes(model: Inventory, settings: Settings, rows: int) -> int:
    """Bytes of the logits of `rows` positions: in float32, and in the type they are computed in."""
    wide = settings.head == "bf16" and rows > 1 and settings.itemsize == 2 and not _head_of_blocks(model)
    return rows * model.facts.text.vocab_size * (4 + (settings.itemsize if wide else 0))


def prefill_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of workspace of the largest chunk."""
    tokens = min(settings.chunk, settings.context * settings.sequences)
    per_token = tokens * prefill_per_token(model, settings)
    attention = hybrid.attention_bytes(model, settings.itemsize, tokens, kernels=True)
    layer = max(per_token, attention) + slice_bytes(model, settings)
    logits = tokens * settings.itemsize * widths(model).h + logits_bytes(model, settings, settings.sequences)
    return max(layer, logits) + tokens * _image_bytes(model, settings)


def largest_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of the largest tensor in the layers of the largest chunk."""
    tokens = min(settings.chunk, settings.context * settings.sequences)
    w, mixture = own_widths(model), model.facts.text.mixture
    together = 1 if settings.weights in LOW_BIT else 2  # gate and up as one, but where a kernel joins them
    columns = [together * w.i, w.q + 2 * w.k]
    if mixture is not None:
        columns.append(mixture.used * max(model.facts.text.hidden_size, mixture.width))
    widened = slice_bytes(model, settings) if tokens > SMALL_ROWS else 0
    return max(tokens * settings.itemsize * max(columns), widened)


def _image_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of encoder outputs that each token of a chunk takes in."""
    sees = model.facts.vision is not None and settings.images
    return encoder_bytes_per_token(model, settings.itemsize) if sees else 0


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with stored weights.

    `rows`, `columns`: of the matrix; `swiglu`: whether the output's halves, gate and up, are multiplied.
    """

    rows: int
    columns: int
    swiglu: bool = False


@lru_cache(maxsize=4096)
def split_bytes(product: Product, tokens: int, multiprocessors: int, group: int = GROUP) -> int:
    """Bytes of partial tiles of a product of `tokens` rows, 2 to 64 (`layers/kernels/products/linear.py`).

    `group`: columns that share a scale, which are never split.
    """
    high = 16 if tokens <= 16 else 32 if tokens <= 32 else SMALL_ROWS
    wide = 64 if product.rows >= 6144 or high == 32 else 32
    enough = 7 * multiprocessors // 4 if high == 32 else 2 * multiprocessors
    tiles, split = -(-product.rows // wide), 1
    while tiles * split < enough and split * 2 <= product.columns // group // 2:
        split *= 2
    return split * tiles * wide * high * 4 * (1 + product.swiglu) if split > 1 else 0


def split_workspace(model: Inventory, settings: Settings, tokens: int, multiprocessors: int) -> int:
    """Bytes of partial tiles of the step's largest product."""
    w, found = own_widths(model), [0]
    if settings.weights in LOW_BIT and not model.has("blocks", "decoder"):  # nothing of theirs is split
        found.append(_decoders_split(model, tokens, multiprocessors))
    if settings.weights in FEW_BITS and FORMATS[settings.weights].upper and tokens > WIDENED_ROWS:
        found = [slice_bytes(model, settings)]
    if settings.head == "int8":
        found.append(split_bytes(Product(model.facts.text.vocab_size, w.h), tokens, multiprocessors))
    return max(found)


@lru_cache(maxsize=4096)
def _decoders_split(model: Inventory, tokens: int, multiprocessors: int) -> int:
    """Bytes of partial tiles of the largest product of the decoder's low-bit weights."""
    w, group = own_widths(model), prequantized_group(model)
    products = (
        Product(w.q + 2 * w.k, w.h), Product(w.h, w.q), Product(w.i, w.h, swiglu=True), Product(w.h, w.i)
    )  # fmt: skip
    others = (Product(rows, columns) for rows, columns in hybrid.products(model))
    return max(split_bytes(product, tokens, multiprocessors, group) for product in (*products, *others))


def attention_bytes(w: Widths, sequences: int) -> int:
    """Bytes of decode attention's partial outputs, and of the logarithms of their sums."""
    return sequences * w.heads * ATTENTION_SPLITS * (w.d + 1) * 4


@lru_cache(maxsize=256)
def graph_sizes(sequences: int) -> tuple[int, ...]:
    """Batch sizes that get a CUDA graph."""
    largest = min((size for size in GRAPH_SIZES if size >= sequences), default=GRAPH_SIZES[-1])
    return tuple(size for size in GRAPH_SIZES if size <= largest)


def recorded_sizes(model: Inventory, settings: Settings) -> tuple[int, ...]:
    """`graph_sizes` of these settings, without those of steps that no graph may hold."""
    sizes, most = graph_sizes(settings.sequences), recordable_tokens(model, settings)
    return sizes if most is None else tuple(size for size in sizes if size <= most)


def graph_bytes(model: Inventory, settings: Settings, multiprocessors: int) -> int:
    """Bytes of the pool of all decode graphs, and of their inputs. Layers and logits don't live together.

    Inputs are block tables and, of answers that follow a grammar, a bit for each token that may come next.
    """
    sizes = recorded_sizes(model, settings)
    if not sizes:
        return 0  # steps are started launch by launch
    largest, vocab = sizes[-1], model.facts.text.vocab_size
    logits = [(size * vocab * 4, 1) for size in sizes]
    layer = [(attention_bytes(widths(model), largest), 1)]
    attention = hybrid.attention_bytes(model, settings.itemsize, largest, kernels=True)
    layer.append((max(largest * prefill_per_token(model, settings), attention), 1))
    if largest > 1:
        layer.append((split_workspace(model, settings, largest, multiprocessors), 1))
    head = [(logits_bytes(model, settings, largest) - largest * vocab * 4, 1)]
    tables = -(-settings.context // 16) * TABLE_BYTES * sum(sizes)
    masks = largest * -(-vocab // 32) * 4
    pool = max(reserved_bytes(logits[:-1] + layer), reserved_bytes(logits + head))
    return pool + up(tables + masks, LARGE_ROUND_BYTES)


def library_bytes(model: Inventory, settings: Settings, cublas_bytes: int) -> int:
    """Bytes of cuBLAS' workspace on the graphs' stream; products of one row or of low-bit weights need none.

    Linear attention always needs it: the projection of its gates is never quantised.
    """
    used = settings.weights not in LOW_BIT or (settings.head == "bf16" and not _head_of_blocks(model))
    return cublas_bytes if (used and settings.sequences > 1) or hybrid.has_states(model) else 0


def loading_bytes(model: Inventory, settings: Settings, readers: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Bytes that loading takes beside the weights: each reader's piece, and its conversion to a format.

    A piece has `piece_bytes`, or is one row (128 rows of FP8) where that is more.
    """
    stored = model.facts.quantization == "fp8"
    element = 1 if stored else 2
    piece = max(piece_bytes, _columns(model) * element * (GROUP if stored else 1))
    each = PREQUANTIZED_BYTES if model.has("packed") else PUT_BYTES[settings.weights]
    if model.has("blocks"):
        each = BLOCK_BYTES * element
    if "int8" in (settings.head, settings.vision_weights):
        each = max(each, PUT_BYTES["int8"])
    if stored and settings.weights != "fp8":
        each = max(each, DEQUANTISED_BYTES)
    return readers * (piece + piece // element * each)


@lru_cache(maxsize=256)
def _columns(model: Inventory) -> int:
    """Columns of the widest matrix."""
    return max((group.shape[-1] for group in model.groups if len(group.shape) > 1), default=1)


def native_components(
    model: Inventory, settings: Settings, kv_bytes: int, cublas_bytes: int, multiprocessors: int
) -> list[Component]:
    """Components of decoder, sampler, graphs and loading on a GPU."""
    rows, prefill = settings.sequences, prefill_bytes(model, settings)
    graphs = graph_bytes(model, settings, multiprocessors)
    library = library_bytes(model, settings, cublas_bytes) if graphs else 0
    sampling = logits_bytes(model, settings, rows) + rows * model.facts.text.vocab_size * SAMPLING_BYTES
    few = split_workspace(model, settings, SMALL_ROWS, multiprocessors)
    # The cache and the graphs come when the weights are there: their place is free while loading.
    loading = max(0, loading_bytes(model, settings, READERS[-1]) - kv_bytes - graphs)
    small = SMALL_TENSORS_BYTES + (hybrid.SMALL_BYTES if hybrid.has_states(model) else 0)
    return [
        measured(KERNELS, Kind.OTHER, KERNEL_BYTES, why="and the driver's part of graphs, on an H200"),
        measured(LATE, Kind.KERNELS, LATE_BYTES, why="the driver loads some when they first run"),
        predicted(
            "CUDA graphs",
            Kind.GRAPHS,
            graphs,
            why=f"up to {recorded_sizes(model, settings)[-1]} sequences" if graphs else "",
        ),
        Component(GRAPHS_LIBRARY, Kind.WORKSPACE, library),
        measured("small tensors", Kind.OTHER, small, why="and holes between large ones"),
        predicted("loading buffers", Kind.OTHER, loading, "load", why="one reader, beyond the cache's place"),
        predicted(
            "prefill workspace",
            Kind.WORKSPACE,
            max(prefill, few),
            "prefill",
            why=f"{settings.chunk:,} tokens a step",
        ),
        predicted("sampling workspace", Kind.WORKSPACE, sampling, "decode", why=f"{rows} sequences"),
    ]


def native_prefill(model: Inventory, tokens: int, itemsize: int = 2) -> int:
    """Bytes of workspace of `tokens` new tokens that attend only to themselves (fused attention)."""
    w, mixture = own_widths(model), model.facts.text.mixture
    most = itemsize * (4 * w.i + 2 * w.h)
    if mixture is not None:
        shared, pairs = mixture.shared > 0, mixture.used * w.h
        experts = itemsize * (pairs + (6 + shared) * w.h + 4 * mixture.width) + 8 * w.h
        most = max(most, experts + 4 * SCORE_BYTES * (mixture.count + shared))
    return tokens * (most + itemsize * 2 * w.d)


def widened(model: Inventory, settings: Settings) -> int:
    """Bytes for widening low-bit weights without kernels: some thousand rows of a matrix at a time."""
    if settings.weights not in LOW_BIT:
        return 0
    w, mixture = own_widths(model), model.facts.text.mixture
    each = 0 if mixture is None else 3 * w.h * mixture.width  # one expert at a time
    return max(WIDE_ROWS * max(w.h, w.q, w.i), each) * (WIDE_BYTES + settings.itemsize)


def native_cpu_components(model: Inventory, settings: Settings) -> list[Component]:
    """Components of workspace on a CPU: its attention takes masks and grouped heads and stores no scores."""
    itemsize = settings.itemsize
    chunk = min(settings.chunk, settings.kv_tokens)
    wide = widened(model, settings)
    attention = hybrid.attention_bytes(model, itemsize, chunk, kernels=False)
    layer = max(native_prefill(model, chunk, itemsize), attention)
    prefill, why = layer + wide + chunk * _image_bytes(model, settings), f"{chunk:,} tokens of a chunk"
    rows, cached = settings.sequences, f"{settings.kv_tokens:,} tokens"
    # Keys and values of one layer are gathered for a step.
    decode = settings.kv_tokens * 2 * widths(model).k * itemsize + wide
    return [
        predicted("prefill workspace", Kind.WORKSPACE, prefill, "prefill", why=why),
        Component("logits", Kind.WORKSPACE, logits(model, rows), "prefill"),
        predicted("decode workspace", Kind.WORKSPACE, decode, "decode", why=cached),
        Component("logits", Kind.WORKSPACE, logits(model, rows), "decode"),
    ]
