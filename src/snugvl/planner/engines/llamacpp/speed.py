"""How fast llama.cpp decodes: a prediction, held against what people publish (`test_llamacpp_speed.py`).

    seconds a token = bytes on the GPU / (its bandwidth · share) + layers · 65 µs + bytes elsewhere / 30 GB/s

Of a mixture only the experts of a token are read. Share and microseconds were fitted to published rows of
Q4_K_M and Q8_0 on six cards from an RTX 2080 to an RTX 5090, all within a factor of 1.3; cards before Turing
reach less than half of their bandwidth. Other makers' have a share of their own, from published rows of an
RX 7900 XTX, an M1 Max and an M4. Main memory is assumed: two channels of DDR5, half of it used.
"""

from typing import Final

from snugvl.hardware.machine import Gpu
from snugvl.planner.engines.llamacpp.footprint import EMBEDDING, EXPERTS, HEAD, TOWER, cache_bytes, placed
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

SHARE: Final = 0.91
SHARE_BEFORE_TURING: Final = 0.4
SHARE_OF_OTHERS: Final = 0.72  # of AMD, Intel and Apple, between 0.63 (M1 Max) and 0.9 (M4)
TURING: Final = (7, 0)
LAYER_S: Final = 65e-6
HOST_RATE: Final = 30e9  # bytes per second that a processor reads of main memory


def llamacpp_rate(model: Inventory, settings: Settings, gpu: Gpu | None) -> float | None:
    """Tokens per second of one request alone, half of its context filled; None where the card isn't known."""
    host = _read(model, settings, gpu=False) / HOST_RATE
    if not settings.on_gpu:
        return 1 / host
    if gpu is None or gpu.bandwidth is None:
        return None
    old = gpu.compute_capability is not None and gpu.compute_capability < TURING
    share = SHARE_OF_OTHERS if gpu.api != "cuda" else SHARE_BEFORE_TURING if old else SHARE
    layers = model.facts.text.num_layers * LAYER_S
    return 1 / (_read(model, settings, gpu=True) / (gpu.bandwidth * share) + layers + host)


def _read(model: Inventory, settings: Settings, *, gpu: bool) -> float:
    """Bytes that are read for a token in one of the memories."""
    weights = placed(model, settings, gpu=gpu)
    facts = model.facts
    total: float = sum(nbytes for part, nbytes in weights.items() if part not in (EMBEDDING, TOWER, EXPERTS))
    total += weights[EXPERTS] * model.experts_read
    if not settings.on_gpu and facts.tied and not weights[HEAD]:
        total += weights[EMBEDDING]
    cache, states = cache_bytes(model, settings, gpu=gpu)
    return total + (cache / 2 + states) / settings.concurrency
