"""What each CUDA graph takes of its pool, captured one by one, while clients ask about pictures.

PYTHONPATH=src:.:benchmarks python tests/engine/graph_pool.py FOLDER FORMAT off|auto|mtp [cuda|cpu]

Beside it the pool that `snugvl plan` names: the sum of its rows "CUDA graphs" and "cuBLAS workspace".
"""

import sys
from typing import Any

import numpy as np
import torch
from PIL import Image

import masks
import snugvl
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine.graphs.cache import GraphCache, GraphKey
from snugvl.layers.device import pooled_bytes

LEVELS = ((1, 3), (8, 16), (32, 64), (32, 64), (32, 64))  # clients, requests
folder, weights, speculation, device = (*sys.argv[1:], "cuda")[:4]
random = np.random.default_rng(1)


def pool() -> str:
    """Bytes of torch's private pools, for people."""
    return f"{pooled_bytes() / 2**20:.0f} MiB" if torch.cuda.is_available() else "no pool"


def told(capture: Any) -> Any:
    """`GraphCache.capture`, with a line for each graph."""

    def captured(self: GraphCache, key: GraphKey, work: Any) -> None:
        before = pool()
        capture(self, key, work)
        print(f"{key}: {before} -> {pool()}", flush=True)

    return captured


def shown(index: int) -> Request:
    """A question about a picture of 1,024² pixels in random squares."""
    squares = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
    image = Image.fromarray(np.kron(squares, np.ones((32, 32, 1), np.uint8)))
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    return Request((user(image, f"Describe picture number {index}."),), sampling)


GraphCache.capture = told(GraphCache.capture)  # type: ignore[method-assign]
model = snugvl.load(
    folder, device=device, weights=weights, context=4096, concurrency=32, speculation=speculation
)
for clients, count in LEVELS if torch.cuda.is_available() else LEVELS[:1]:
    masks.timed(model, [shown(index) for index in range(count)], clients)
    print(f"{clients} clients: {pool()}", flush=True)
