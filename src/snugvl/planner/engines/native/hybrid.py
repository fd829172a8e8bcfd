"""Workspace of layers with linear attention, and of full attention with gates, on our own engine.

Values of s bytes; h hidden, p columns of the layer's projection (queries, keys, values, gates), v width of
all value heads (or of all queries), n value heads.

    linear   s (h + 2p + 128 n) a token: projected, convolved, found, two squares of a chunk's width a head
    gated    s (2h + p + 2v) a token
    without kernels (on a CPU), linear   s (2h + p + v) a token, 56 v for each of 256 tokens that are in
             float32 at a time

Traced on our network (`tests/planner/test_hybrid.py`).
"""

from typing import Final

from snugvl.planner.inventory import Inventory

SQUARES: Final = 2 * 64  # values of each value head of a token (`layers/kernels/delta_rule.py`)
PIECE: Final = 256  # of `models/linear_attention.py`
PIECE_BYTES: Final = 56  # of float32 a value, at most: 14 tensors as wide as the values
HEAD_BYTES: Final = 16  # of each value head of a token: beta, decay and what they are made of
# Tensors of up to 1 MiB, which torch's allocator keeps apart: of up to 64 tokens nearly all of the above.
# Traced: at most 12.1 MiB (`tests/planner/test_hybrid.py`); `engine/memory.py` leaves as much unclaimed.
SMALL_BYTES: Final = 16 << 20


def attention_bytes(model: Inventory, itemsize: int, tokens: int, *, kernels: bool) -> int:
    """Workspace of a chunk in the layer that takes most; 0 for plain attention, which the MLP outdoes.

    `kernels`: on a GPU.
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


def layer_kernels(model: Inventory) -> int:
    """Of a step with prompts beside products: two norms, rotation and cache, attention, two residuals.

    A linear layer has six in place of two of them.
    """
    return 10 if has_states(model) else 6


def has_states(model: Inventory) -> bool:
    """Whether some layers are linear."""
    return any(layer.state_bytes for layer, _ in model.kv_layers)


def products(model: Inventory) -> list[tuple[int, int]]:
    """Rows and columns of the matrices that only such layers have."""
    h = model.facts.text.hidden_size
    shapes = [(layer.projected, layer.values) for layer, _ in model.kv_layers if layer.projected]
    return [shape for projected, values in shapes for shape in ((projected, h), (h, values))]
