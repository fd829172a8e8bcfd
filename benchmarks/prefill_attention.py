"""Which tiles attention of prompts' chunks runs fastest in, alone and with decodes beside it, on this GPU.

    python benchmarks/prefill_attention.py --out results.json [--models 2b 4b] [--steps prompt mixed]
    TRITON_INTERPRET=1 python benchmarks/prefill_attention.py --device cpu --models tiny   # without a GPU

A cell replays a CUDA graph of several layers, each with a cache of its own, so that decodes find nothing in
the L2 cache. Every variant is compared with plain torch in float32 first; one that is wrong or fails is told
and left out. Of each come microseconds a layer and the operations that causal attention needs, a second;
beside prompts stands PyTorch's own `scaled_dot_product_attention` over keys and values in one piece.

What the package takes by itself comes first. Then other tiles of chunks are tried, and where a cell has
decodes each of them with several tiles of those. Variants are compiled by several processes before, without
the GPU. The last lines say which tiles are best over all cells of a model.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import geometric_mean
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

import machine
from kernel_tiles import replay_us
from snugvl.layers.kernels.attention import paged
from snugvl.layers.kernels.attention.paged import PrefillTiles, prefill_tiles
from snugvl.layers.kernels.compiler.ahead_of_time import compile_all, dry_run
from snugvl.layers.kernels.device import Hardware, hardware_of
from snugvl.layers.kv_cache import E4M3, KVCache

HEADS = {"2b": (16, 8, 128), "4b": (32, 8, 128), "tiny": (4, 2, 32)}  # heads, KV heads, dim; 8b is as 4b
BLOCK = 16
COLD_BYTES = 120e6  # more than the L2 cache of an H200 (50 MiB) twice
TOLERANCE = 2e-2  # relative error of a head's output: bfloat16 rounds by some thousandths
STEPS: dict[str, tuple[tuple[int, int], ...]] = {  # new tokens and context of each sequence
    "prompt": ((1050, 1050),),
    "two": ((1024, 1024), (1024, 1024)),
    "prefix": ((2048, 4096),),
    "mixed": (*((1, 1100),) * 16, (1000, 1000)),
    "crowd": (*((1, 1100),) * 31, (1050, 1050)),
    "tiny": ((1, 33), (1, 20), (40, 70)),
}
PROGRAMS = (  # rows, warps, step, stages
    (64, 4, 64, 3), (64, 4, 64, 2), (64, 4, 32, 3), (128, 8, 64, 3), (128, 8, 64, 2), (128, 8, 32, 3),
)  # fmt: skip
FEW = ((64, 3), (64, 4), (128, 2), (128, 3))  # step, stages


@dataclass(frozen=True, slots=True)
class Cell:
    """A model's heads, how its cache is stored, and the chunks of a step."""

    model: str
    kv: str
    step: str

    @property
    def flops(self) -> float:
        """Of both products, over what is seen."""
        heads, _, dim = HEADS[self.model]
        seen = sum(new * (context - new) + new * (new + 1) / 2 for new, context in STEPS[self.step])
        return 4.0 * heads * dim * seen

    @property
    def decodes(self) -> bool:
        """Whether some sequence has one new token."""
        return any(new == 1 for new, _ in STEPS[self.step])


@dataclass(frozen=True, slots=True)
class Result:
    """One variant in one cell; `error`: the largest relative one of any head's output."""

    cell: Cell
    tiles: PrefillTiles
    us: float
    tflops: float
    error: float


class Layers:
    """A cell's queries and caches, one a layer."""

    def __init__(self, cell: Cell, device: torch.device, layers: int | None = None) -> None:
        torch.manual_seed(0)
        self.cell, self.device = cell, device
        self.heads, kv_heads, dim = HEADS[cell.model]
        self.shared = self.heads // kv_heads
        self.new = [new for new, _ in STEPS[cell.step]]
        self.contexts = [context for _, context in STEPS[cell.step]]
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        stored = E4M3 if cell.kv == "fp8" else self.dtype
        width = -(-max(self.contexts) // BLOCK)
        blocks = 1 + width * len(self.new)
        if layers is None:
            a_layer = 2 * sum(self.contexts) * kv_heads * dim * stored.itemsize
            layers = max(4, min(12, int(COLD_BYTES / a_layer))) if device.type == "cuda" else 2
        self.cache = KVCache(
            num_layers=layers, num_blocks=blocks, block_size=BLOCK, num_kv_heads=kv_heads, head_dim=dim,
            dtype=stored, device=device,
        )  # fmt: skip
        order = torch.randperm(blocks - 1).add(1).view(len(self.new), width)
        self.tables = order.int().to(device)
        self.starts = torch.tensor([0, *accumulate(self.new)], dtype=torch.int32, device=device)
        self.lengths = torch.tensor(self.contexts, dtype=torch.int32, device=device)
        self.query = torch.randn(sum(self.new), self.heads, dim, device=device, dtype=self.dtype)
        self.outputs: list[torch.Tensor] = []

    def fill(self) -> None:
        """New numbers in each layer: little memory beside the cache."""
        slots = torch.arange(self.cache.num_blocks * BLOCK, device=self.device)
        for layer in range(len(self.cache.storage)):
            shape = 2, len(slots), *self.cache.storage.shape[3:]
            new = torch.randn(shape, device=self.device, dtype=self.dtype)
            self.cache.write(layer, slots, new[0], new[1])

    def all(self) -> None:
        """All layers."""
        self.outputs = []
        for layer in range(len(self.cache.storage)):
            where = (*self.cache.layer(layer), self.tables, self.starts, self.lengths)
            scale = self.query.shape[-1] ** -0.5
            self.outputs.append(paged.chunk(self.query, *where, BLOCK, scale))

    def expected(self) -> torch.Tensor:
        """The first layer's output in plain torch, float32, `[tokens, heads, dim]`."""
        rows = []
        for row, (start, end) in enumerate(pairwise([0, *accumulate(self.new)])):
            keys, values = self.gathered(0, row, torch.float32)  # [heads, context, dim]
            query = self.query[start:end].float().transpose(0, 1)
            scores = query @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
            unseen = torch.ones_like(scores, dtype=torch.bool).triu(keys.shape[1] - (end - start) + 1)
            rows.append((scores.masked_fill(unseen, float("-inf")).softmax(-1) @ values).transpose(0, 1))
        return torch.cat(rows)

    def gathered(self, layer: int, row: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence, each `[heads, context, dim]`, repeated for every query head."""
        place = torch.arange(self.contexts[row], device=self.device)
        slots = self.tables[row, place // BLOCK].long() * BLOCK + place % BLOCK
        keys, values = (part.to(dtype) for part in self.cache.gather(layer, slots, dtype))
        return (
            keys.repeat_interleave(self.shared, 1).transpose(0, 1).contiguous(),
            values.repeat_interleave(self.shared, 1).transpose(0, 1).contiguous(),
        )

    def torchs_us(self) -> float | None:
        """PyTorch's own kernel, where the step is prompts without a prefix, each of the same length."""
        lengths = set(self.new)
        if self.device.type != "cuda" or len(lengths) > 1 or self.new != self.contexts:
            return None
        pairs = [self.gathered(0, row, self.dtype) for row in range(len(self.new))]
        keys, values = (torch.stack(part) for part in zip(*pairs, strict=True))
        query = self.query.view(len(self.new), -1, *self.query.shape[1:]).transpose(1, 2).contiguous()

        def run() -> None:
            for _ in range(8):
                scaled_dot_product_attention(query, keys, values, is_causal=True)

        run()
        return replay_us(run, 8)


@contextmanager
def chosen(tiles: PrefillTiles) -> Iterator[None]:
    """Attention runs in these tiles."""
    with mock.patch.object(paged, "prefill_tiles", return_value=tiles):
        yield


def timed(run: Callable[[], None], layers: int, device: torch.device) -> float:
    """Microseconds a layer."""
    if device.type == "cuda":
        return replay_us(run, layers)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6 / layers


def variants(first: PrefillTiles, decodes: bool) -> list[PrefillTiles]:
    """The package's own tiles, others of chunks, and, where there are decodes, others of those."""
    few = FEW if decodes else ((first.few_step, first.few_stages),)
    found = [
        PrefillTiles(rows, step, warps, stages, *f) for rows, warps, step, stages in PROGRAMS for f in few
    ]
    return list(dict.fromkeys([first, *found]))


class Race:
    """The variants in one cell."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device = cell, device
        self.layers = Layers(cell, device)
        self.layers.fill()
        self.expected = self.layers.expected()

    def enter(self, tiles: PrefillTiles) -> Result | None:
        """Measure; None where it is wrong or fails."""
        layers = self.layers
        with chosen(tiles):
            try:
                layers.all()
                error = far(layers.outputs[0].float(), self.expected)
                us = timed(layers.all, len(layers.outputs), self.device)
            except Exception as problem:
                print(f"FAILED {self.cell} {tiles}: {type(problem).__name__}: {str(problem)[:300]}")
                return None
        if not error < TOLERANCE:
            print(f"WRONG {self.cell} {tiles}: relative error {error:.1e}")
            return None
        return Result(self.cell, tiles, us, self.cell.flops / us / 1e6, error)

    def run(self, quick: bool) -> list[Result]:
        """All of them, the package's own first."""
        dim, hardware = self.layers.query.shape[-1], hardware_of(self.device)
        default = prefill_tiles(hardware, dim, self.layers.shared, self.layers.dtype == torch.float32)
        tried = [default] if quick else variants(default, self.cell.decodes)
        return [result for result in map(self.enter, tried) if result]


def far(values: torch.Tensor, right: torch.Tensor) -> float:
    """The largest relative error of any head's output, `[…, dim]`."""
    return float(((values - right).norm(dim=-1) / right.norm(dim=-1)).max())


def compile_only(cells: list[Cell], hardware: Hardware, shard: int, shards: int) -> None:
    """Compile a share of what will be measured, without the GPU, so that the folder on disk has it."""
    launches = []
    with dry_run(hardware) as noted:
        for cell in cells:
            layers = Layers(cell, torch.device("meta"), layers=1)
            default = prefill_tiles(hardware, layers.query.shape[-1], layers.shared, False)
            for tiles in variants(default, cell.decodes):
                with chosen(tiles):
                    layers.all()
        launches = list(noted)
    for _ in compile_all(launches[shard::shards], hardware):
        pass  # what failed is told by the measurement


def compiled(cells: list[Cell], hardware: Hardware, processes: int) -> None:
    """Have several processes compile all variants."""
    start = time.perf_counter()
    names = [f"{cell.model}:{cell.kv}:{cell.step}" for cell in cells]
    facts = [*map(str, hardware.capability), str(hardware.units)]
    again = [sys.executable, __file__, "--cells", *names, "--hardware", *facts, "--compile"]
    workers = [subprocess.Popen([*again, f"{i}/{processes}"]) for i in range(processes)]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def show(results: list[Result], torchs: float | None, most: int) -> None:
    """The package's own, and the best."""
    ranked = sorted(results, key=lambda result: result.us)
    for result in [results[0], *ranked[:most]]:
        cell, tiles = result.cell, result.tiles
        tile = (
            f"{tiles.rows}×{tiles.step}, {tiles.warps} warps, {tiles.stages} stages"
            f", few {tiles.few_step}/{tiles.few_stages}"
        )
        print(
            f"{cell.model} {cell.kv:4} {cell.step:7}{tile:44}{result.us:8.2f} µs{result.tflops:7.0f} TFLOP/s"
            f"  error {result.error:.1e}" + (f"  (torch {torchs:.2f})" if torchs else ""),
            flush=True,
        )


def program(tiles: PrefillTiles) -> PrefillTiles:
    """The tiles of chunks alone."""
    return replace(tiles, few_step=0, few_stages=0)


def show_best(model: str, cells: list[list[Result]]) -> None:
    """The tiles that are best over all bf16 cells of a model: by the mean of times, the package's being 1."""
    cells = [results for results in cells if results and results[0].cell.model == model]
    cells = [results for results in cells if results[0].cell.kv == "bf16"]
    scores = {}
    for tiles in {result.tiles: None for results in cells for result in results}:
        ratios = []
        for results in cells:
            same = [r for r in results if r.tiles == tiles] or [
                r for r in results if not r.cell.decodes and program(r.tiles) == program(tiles)
            ]
            ratios += [r.us / results[0].us for r in same[:1]]
        if len(ratios) == len(cells):
            scores[tiles] = geometric_mean(ratios)
    for tiles in sorted(scores, key=lambda tiles: scores[tiles])[:5]:
        print(f"{model} over {len(cells)} cells: {scores[tiles]:.3f} {tiles}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["2b", "4b"], choices=HEADS)
    parser.add_argument("--steps", nargs="+", choices=STEPS, help="all but tiny; with models tiny, that one")
    parser.add_argument("--cells", nargs="+", help="MODEL:KV:STEP, in place of these")
    parser.add_argument("--quick", action="store_true", help="only what the package takes")
    parser.add_argument("--most", type=int, default=4, help="variants to print of a cell")
    parser.add_argument("--processes", type=int, default=14, help="that compile; 0: none")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--hardware", nargs=3, type=int, help="MAJOR MINOR UNITS, with --compile")
    parser.add_argument("--compile", help="SHARD/SHARDS: only compile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    steps = args.steps or (
        ["tiny"] if args.models == ["tiny"] else [step for step in STEPS if step != "tiny"]
    )
    cells = [Cell(model, "bf16", step) for model in args.models for step in steps]
    cells += [Cell(args.models[0], "fp8", step) for step in steps[:1]]
    if args.cells:
        cells = [Cell(*name.split(":")) for name in args.cells]
    if args.compile:
        major, minor, units = args.hardware
        compile_only(cells, Hardware((major, minor), units), *map(int, args.compile.split("/")))
        return
    if args.device.type == "cuda" and args.processes and not args.quick:
        compiled(cells, hardware_of(args.device), args.processes)
    found, everything = [], []
    for cell in cells:
        race = Race(cell, args.device)
        results, torchs = race.run(args.quick), race.layers.torchs_us()
        if results:
            show(results, torchs, args.most)
        found.append({"cell": asdict(cell), "torch_us": torchs, "results": [asdict(r) for r in results]})
        everything.append(results)
        if args.out:  # after each: time on a GPU may end
            args.out.write_text(json.dumps({"machine": machine.describe(), "cells": found}))
    for model in dict.fromkeys(cell.model for cell in cells if not args.quick):
        show_best(model, everything)


if __name__ == "__main__":
    main()
