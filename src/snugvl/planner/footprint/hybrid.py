"""Workspace of layers with linear attention, and of full attention with gates, on our own engine.

Values of s bytes; h hidden, p columns of the layer's projection (queries, keys, values, gates), v width of
all value heads (or of all queries), c channels of the convolution.

    linear   s (2h + p + v) a token, and 56 v for each of 256 tokens that are in float32 at a time
    gated    s (2h + p + 2v) a token
    decode   s · taps · c + 12 c a sequence more: the convolution's window, as stored and in float32

Traced on our network (`tests/planner/test_hybrid.py`).
"""

from typing import Final

from snugvl.planner.inventory import Inventory

PIECE: Final = 256  # of `models/linear_attention.py`
PIECE_BYTES: Final = 56  # of float32 a value, at most: 14 tensors as wide as the values
HEAD_BYTES: Final = 16  # of each value head of a token: beta, decay and what they are made of
HEAD_DIM: Final = 64  # at least
# Tensors of up to 1 MiB, which torch's allocator keeps apart: of up to 64 tokens nearly all of the above.
# Traced: at most 12.1 MiB (`tests/planner/test_hybrid.py`); `engine/memory.py` leaves as much unclaimed.
SMALL_BYTES: Final = 16 << 20


def attention_bytes(model: Inventory, itemsize: int, tokens: int) -> int:
    """Workspace of a chunk in the layer that takes most; 0 for plain attention, which the MLP outdoes."""
    h, most = model.facts.text.hidden_size, 0
    for layer, _ in model.kv_layers:
        if not layer.projected:
            continue
        linear = layer.kv_heads == 0
        each = itemsize * (2 * h + layer.projected + (1 if linear else 2) * layer.values)
        piece = min(tokens, PIECE) * PIECE_BYTES * layer.values if linear else 0
        heads = layer.values // HEAD_DIM * HEAD_BYTES if linear else 0
        most = max(most, tokens * (each + heads) + piece)
    return most


def window_bytes(model: Inventory, itemsize: int, sequences: int) -> int:
    """What the convolution of a decode step takes besides."""
    found = [layer.state_values for layer, _ in model.kv_layers]  # its last inputs, the newest left out
    return sequences * max(found, default=0) * 2 * (itemsize + 6)


def has_states(model: Inventory) -> bool:
    """Whether some layers are linear."""
    return any(layer.state_bytes for layer, _ in model.kv_layers)


def products(model: Inventory) -> list[tuple[int, int]]:
    """Rows and columns of the matrices that only such layers have."""
    h = model.facts.text.hidden_size
    shapes = [(layer.projected, layer.values) for layer, _ in model.kv_layers if layer.projected]
    return [shape for projected, values in shapes for shape in ((projected, h), (h, values))]
