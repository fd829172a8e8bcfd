"""Gated DeltaNet's kernels at the sizes of Qwen3.5-4B: microseconds a layer, by batch and tile of the scan.

    python benchmarks/delta_rule.py [--out FILE]                # on a GPU

Each figure is of a CUDA graph that holds the whole of a layer's linear attention eight times. Before it is
timed, a tile's result is compared with plain torch on the same sixteen-bit inputs: some tiles that compile
are wrong (`layers/kernels/delta_rule.py`, `scan_tile`). Each runs in a process of its own, as one that reads
where nothing is ends its process's use of the GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import machine
from snugvl.checkpoint.architecture import LinearAttention, ModelConfig
from snugvl.checkpoint.catalogue import find
from snugvl.checkpoint.families import parse_config
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kernels import delta_rule
from snugvl.layers.kv_cache import StateCache
from snugvl.models.linear_attention import GatedDeltaNet

SIZE = "Qwen/Qwen3.5-4B"
BATCHES = {
    "1 decode": [1],
    "8 decodes": [1] * 8,
    "32 decodes": [1] * 32,
    "64 tokens": [64],
    "1,100 tokens": [1100],
    "8 × 256 tokens": [256] * 8,
    "1,017 tokens, 31 decodes": [1017] + [1] * 31,
}
TILES = ((16, 2, 1), (32, 2, 1), (32, 4, 2), (64, 4, 1), (64, 4, 2), (64, 8, 2))
REPEATS, REPLAYS = 8, 50


def config_of(name: str) -> ModelConfig:
    """Of a model of the catalogue."""
    found = find(name)
    assert found is not None
    return parse_config(dict(found[0].config), name)


def case(layer: GatedDeltaNet, lens: list[int]) -> Callable[[str], torch.Tensor]:
    """A batch of sequences with so many new tokens each, and five before: its result by a way to attend."""
    sizes, device = layer.sizes, torch.device("cuda")
    states = states_of(sizes, len(lens))
    nowhere = torch.zeros(sum(lens), dtype=torch.int64, device=device)
    slots = torch.arange(len(lens), device=device)
    after = tuple(count + 5 for count in lens)
    metadata = AttentionMetadata(
        tuple(lens), after, nowhere, nowhere[None], 16, state_slots=slots
    ).on_device()
    projected = torch.randn(sum(lens), sizes.channels + sizes.values, device=device).bfloat16()
    rates = torch.randn(sum(lens), 2 * sizes.value_heads, device=device).bfloat16()
    if max(lens) == 1:
        metadata = replace(metadata, starts=None)
    return lambda way: getattr(layer, way)(projected, rates, states, metadata)


def states_of(sizes: LinearAttention, slots: int) -> StateCache:
    """Empty ones."""
    heads = (sizes.value_heads, sizes.key_dim, sizes.value_dim)
    inputs = (sizes.kernel - 1, sizes.channels)
    cuda = torch.device("cuda")
    return StateCache(
        num_layers=1, slots=slots, heads=heads, inputs=inputs, dtype=torch.bfloat16, device=cuda
    )


def microseconds(work: Callable[[], object]) -> float:
    """Of one of the works of a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    graph.replay()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e6 / REPEATS / REPLAYS


@torch.inference_mode()
def measured(tile: tuple[int, int, int]) -> dict[str, float]:
    """Microseconds of each batch, and how far from plain torch."""
    torch.manual_seed(0)
    delta_rule.scan_tile = lambda *_: tile
    layer = GatedDeltaNet(config_of(SIZE).text, 0).cuda().bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    errors = []
    for name in ("1,100 tokens", "1,017 tokens, 31 decodes"):
        torch.manual_seed(1)
        right = case(layer, BATCHES[name])("_plain").float()
        torch.manual_seed(1)
        ours = case(layer, BATCHES[name])("_by_kernels").float()
        errors.append(float((ours - right).norm() / right.norm()))
    times = {name: microseconds(partial(case(layer, lens), "_by_kernels")) for name, lens in BATCHES.items()}
    return {"error": max(errors), **times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tile", type=lambda text: tuple(map(int, text.split(","))), help="of one process")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.tile:
        print(json.dumps(measured(arguments.tile)))
        return
    rows = []
    for tile in TILES:
        command = [sys.executable, __file__, "--tile", ",".join(map(str, tile))]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        row = json.loads(ran.stdout.splitlines()[-1]) if not ran.returncode else {"failed": ran.stderr[-200:]}
        rows.append({"columns, warps, stages": tile, **row})
        print(*tile, *(f"{name}: {value:.4g}" for name, value in row.items() if name != "failed"), sep="  ")
    machine.save("delta_rule", {"model": SIZE, "tiles": rows}, arguments.out)


if __name__ == "__main__":
    main()
