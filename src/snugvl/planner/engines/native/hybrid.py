"""Workspace of layers with linear attention, and of full attention with gates, on our own engine.

Values of s bytes; h hidden, p columns of the layer's projection (queries, keys, values, gates), v width of
all value heads (or of all queries), n value heads.

    linear   s (h + 2p + 128 n) a token: projected, convolved, found, two squares of a chunk's width a head
    gated    s (2h + p + 2v) a token
    without kernels (on a CPU), linear   s (2h + p + v) a token, 56 v for each of 256 tokens that are in
             float32 at a time

Traced on our network (`tests/planner/test_hybrid.py`).

Recurrent states take much memory, for sequences and for the next turn, which starts from a snapshot. A state
of Qwen3.5-4B takes as much as 1,500 tokens of keys and values, whatever a sequence's length. Our engine has
one for each sequence that may run, and snapshots where prompts may start (`engine/snapshots.py`):

    up to comfort    as many as are left room for, before larger steps
    beyond it        a few must fit: a longer context is worth less than turns that start where the last ended
    then             two a sequence, before a larger pool
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from snugvl.planner.footprint.kv import state_bytes
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings
from snugvl.planner.wishes import Wishes

SQUARES: Final = 2 * 64  # values of each value head of a token (`layers/kernels/delta_rule.py`)
PIECE: Final = 256  # of `models/linear_attention.py`
PIECE_BYTES: Final = 56  # of float32 a value, at most: 14 tensors as wide as the values
HEAD_BYTES: Final = 16  # of each value head of a token: beta, decay and what they are made of
# Tensors of up to 1 MiB, which torch's allocator keeps apart: of up to 64 tokens nearly all of the above.
# Traced: at most 12.1 MiB (`tests/planner/test_hybrid.py`); `engine/memory.py` leaves as much unclaimed.
SMALL_BYTES: Final = 16 << 20
# (EngineConfig.max_batched_tokens, max_num_seqs) that allocation tries, fastest first
NATIVE_STEPS: Final = ((2048, 16), (1024, 8), (512, 4), (512, 1))
SNAPSHOTS: Final = 4  # for the end of a picture, of the turns before and after it, and of an answer
EACH: Final = 2  # a sequence
TOKENS: Final = 1024  # of the pool for each: without its blocks it is of no use


@lru_cache(maxsize=4096)
def attention_bytes(model: Inventory, itemsize: int, tokens: int, *, kernels: bool) -> int:
    """Bytes of a chunk's workspace in the largest attention layer; 0 for plain attention: the MLP takes more.

    `kernels`: whether it runs on a GPU.
    """
    h, most = model.facts.text.hidden_size, 0
    for layer, _ in model.kv_layers:
        if not layer.projected:
            continue
        linear = layer.recurrent
        each, piece = itemsize * (2 * h + layer.projected + (1 if linear else 2) * layer.values), 0
        if linear and kernels:
            each = itemsize * (h + 2 * layer.projected + SQUARES * layer.value_heads)
        elif linear:
            piece = min(tokens, PIECE) * PIECE_BYTES * layer.values
        most = max(most, tokens * (each + HEAD_BYTES * layer.value_heads) + piece)
    return most


@lru_cache(maxsize=256)
def has_states(model: Inventory) -> bool:
    """Whether some layers have linear attention, and so recurrent states."""
    return any(layer.state_bytes for layer, _ in model.kv_layers)


def products(model: Inventory) -> list[tuple[int, int]]:
    """(rows, columns) of the matrices that only layers with linear attention have."""
    h = model.facts.text.hidden_size
    shapes = [(layer.projected, layer.values) for layer, _ in model.kv_layers if layer.projected]
    return [shape for projected, values in shapes for shape in ((projected, h), (h, values))]


def keeping(
    model: Inventory, wishes: Wishes, settings: Settings, most: int, spare_bytes: int | None = None
) -> Settings:
    """Settings with more state snapshots, up to `most` and within `spare_bytes`; never fewer than before."""
    each = state_bytes(model, settings)
    if not each or not wishes.prefix_cache:
        return settings
    now, most = settings.state_snapshots, min(most, settings.kv_tokens // TOKENS)
    more = most - now if spare_bytes is None else min(most - now, spare_bytes // each)
    return settings._replace(state_snapshots=now + max(more, 0))


def steps(model: Inventory, base: Settings) -> Sequence[tuple[int, int]]:
    """(chunk, sequences) to try, fastest first: with recurrent states, sequences become fewer first."""
    if not state_bytes(model, base):
        return NATIVE_STEPS
    chunks, sequences = (sorted(set(each), reverse=True) for each in zip(*NATIVE_STEPS, strict=True))
    counts = sorted({*sequences, base.sequences}, reverse=True)
    return [(chunk, count) for chunk in chunks for count in counts]
