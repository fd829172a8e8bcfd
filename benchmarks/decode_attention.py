"""How decode attention's contexts are best cut: on a GPU, shape by shape.

    python benchmarks/decode_attention.py --out results.json [--models 2b 4b] [--kv bf16 fp8]
    TRITON_INTERPRET=1 python benchmarks/decode_attention.py --device cpu --models tiny   # without a GPU

A cell replays a CUDA graph of as many layers as exceed the L2 cache: norm, rotation and the write of the new
token, then attention, as a decode step has them, so that what overlaps there overlaps here. `apart` is the
first of both alone. Of each cut come: microseconds a layer, the difference to the package's, the largest
difference of any value to its values, and the largest relative error of any head's output to plain torch in
float32. Tiles (step, warps, stages) are tried first, then splits with the best of them. A cut that is wrong
or fails is told and left out.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import machine
from kernel_tiles import replay_us
from snugvl.layers.kernels.attention import paged
from snugvl.layers.kernels.attention.decode import DecodeCut
from snugvl.layers.kv_cache import E4M3, KVCache

HEADS = {"2b": (16, 8, 128), "4b": (32, 8, 128), "tiny": (4, 2, 32)}  # heads, KV heads, dim; 8b is as 4b
BLOCK = 16
COLD_BYTES = 120e6  # more than the L2 cache of an H200 (50 MiB) twice
TOLERANCE = 2e-2  # relative error of a head's output: bfloat16 rounds by some thousandths
TILES = (  # step, warps, stages
    (64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 8, 5), (32, 4, 3), (32, 4, 5), (32, 4, 7), (32, 2, 5),
    (32, 2, 7), (16, 2, 9), (16, 1, 9), (128, 8, 3),
)  # fmt: skip
SPLITS = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Cell:
    """Sequences that decode: a model's heads, tokens of the longest context; shorter ones if `mixed`."""

    model: str
    kv: str
    sequences: int
    context: int
    mixed: bool = False

    def lengths(self) -> list[int]:
        if not self.mixed:
            return [self.context] * self.sequences
        return [max(1, self.context * place // self.sequences) for place in range(1, self.sequences + 1)]


@dataclass(frozen=True, slots=True)
class Result:
    """One cut of a cell; `delta`: the largest to the package's values, `error`: relative, to plain torch."""

    cell: Cell
    cut: DecodeCut
    us: float
    delta: float
    error: float


class Layers:
    """A cell's caches, one a layer, and the step that each of them takes."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        torch.manual_seed(0)
        self.heads, kv_heads, dim = HEADS[cell.model]
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        lengths = cell.lengths()
        width = -(-max(lengths) // BLOCK)
        blocks = 1 + width * len(lengths)
        stored = E4M3 if cell.kv == "fp8" else self.dtype
        a_layer = 2 * sum(lengths) * kv_heads * dim * stored.itemsize
        layers = max(4, min(64, int(COLD_BYTES / a_layer))) if device.type == "cuda" else 2
        self.cache = KVCache(
            num_layers=layers, num_blocks=blocks, block_size=BLOCK, num_kv_heads=kv_heads, head_dim=dim,
            dtype=stored, device=device,
        )  # fmt: skip
        for layer in range(layers):  # new numbers in each: little memory beside the cache
            slots = torch.arange(blocks * BLOCK, device=device)
            new = torch.randn(2, len(slots), kv_heads, dim, device=device, dtype=self.dtype)
            self.cache.write(layer, slots, new[0], new[1])
        order = torch.randperm(blocks - 1).add(1).view(len(lengths), width)
        self.tables = order.int().to(device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        last = torch.tensor(lengths, device=device) - 1
        rows = torch.arange(len(lengths), device=device)
        self.slots = self.tables[rows, last // BLOCK].long() * BLOCK + last % BLOCK
        qkv = torch.randn(len(lengths), self.heads + 2 * kv_heads, dim, device=device, dtype=self.dtype)
        angles = torch.rand(len(lengths), dim // 2, device=device).repeat(1, 2)
        weight = torch.ones(dim, device=device, dtype=self.dtype)
        rotation = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.written = (qkv, (weight, weight), 1e-6, rotation, self.slots)
        self.scale = dim**-0.5
        self.outputs: list[torch.Tensor] = []

    def query(self, layer: int) -> torch.Tensor:
        return paged.write(*self.written, *self.cache.layer(layer), self.heads)

    def apart(self) -> None:
        """All layers without attention."""
        for layer in range(len(self.cache.storage)):
            self.query(layer)

    def all(self) -> None:
        """All layers."""
        self.outputs = []
        for layer in range(len(self.cache.storage)):
            where = (*self.cache.layer(layer), self.tables, self.lengths, BLOCK, self.scale)
            self.outputs.append(paged.decode(self.query(layer), *where))

    @cached_property
    def expected(self) -> torch.Tensor:
        """The first layer's output in plain torch, float32, `[sequences, heads, dim]`."""
        query, rows = self.query(0).float(), []
        for row, length in enumerate(self.lengths.tolist()):
            place = torch.arange(length, device=query.device)
            slots = self.tables[row, place // BLOCK].long() * BLOCK + place % BLOCK
            keys, values = self.cache.gather(0, slots, torch.float32)  # [length, kv heads, dim]
            shared = self.heads // keys.shape[1]
            keys, values = (part.float().repeat_interleave(shared, 1) for part in (keys, values))
            weights = (torch.einsum("hd,nhd->hn", query[row], keys) * self.scale).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", weights, values))
        return torch.stack(rows)


def timed(run: Callable[[], None], layers: int, device: torch.device) -> float:
    """Microseconds a layer."""
    if device.type == "cuda":
        run()  # compiles, which a recording can't
        return replay_us(run, layers)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6 / layers


def far(values: torch.Tensor, right: torch.Tensor) -> float:
    """The largest relative error of any head's output, `[…, dim]`."""
    return float(((values - right).norm(dim=-1) / right.norm(dim=-1)).max())


class Race:
    """The cuts of one cell, each compared with the package's, which enters first."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device = cell, device
        self.layers = Layers(cell, device)
        self.results: list[Result] = []
        self.today: torch.Tensor | None = None

    def enter(self, cut: DecodeCut) -> Result | None:
        """Measure a cut, once; None where it is wrong or fails."""
        known = [result for result in self.results if result.cut == cut]
        if known:
            return known[0]
        layers = self.layers
        with mock.patch.object(paged, "decode_cut", return_value=cut):
            try:
                layers.all()
                values = torch.stack(layers.outputs).float()
                us = timed(layers.all, len(layers.outputs), self.device)
            except Exception as problem:
                print(f"FAILED {self.cell} {cut}: {type(problem).__name__}: {str(problem)[:300]}")
                return None
        self.today = values if self.today is None else self.today
        delta = float((values - self.today).abs().max())
        error = max(far(values[0], layers.expected), far(values, self.today))
        if not error < TOLERANCE:
            print(f"WRONG {self.cell} {cut}: relative error {error:.1e}, max|Δ| {delta:.1e}")
            return None
        self.results.append(Result(self.cell, cut, us, delta, error))
        return self.results[-1]

    def improve(self, best: Result) -> None:
        """Try tiles, then splits."""
        tiles = [dict(zip(("step", "warps", "stages"), tile, strict=True)) for tile in TILES]
        for changes in (tiles, [{"splits": splits} for splits in SPLITS]):
            found = [self.enter(replace(best.cut, **change)) for change in changes]
            best = min([best, *(result for result in found if result)], key=lambda result: result.us)


def show(result: Result, us: float, apart: float) -> None:
    """One line; `us`: the package's."""
    cell, cut = result.cell, result.cut
    name = (
        f"{cell.model} {cell.kv:4} S={cell.sequences:<3} L={cell.context:<5}{'mixed' if cell.mixed else '':6}"
    )
    tile = f"{cut.splits} of {cut.step}, {cut.warps} warps, {cut.stages} stages"
    print(
        f"{name}{tile:32}{result.us:8.2f} µs{result.us - us:+7.2f}  (apart {apart:.2f})"
        f"  max|Δ| {result.delta:.1e}, error {result.error:.1e}",
        flush=True,
    )


def measure(cell: Cell, device: torch.device, quick: bool) -> dict[str, Any]:
    """One cell: the package's cut, then the best that is found."""
    race = Race(cell, device)
    heads, _, dim = HEADS[cell.model]
    query = torch.empty(cell.sequences, heads, dim, dtype=race.layers.dtype, device=device)
    apart = timed(race.layers.apart, len(race.layers.cache.storage), device)
    today = race.enter(paged.decode_cut(query))
    assert today is not None, "what runs today is wrong"
    if not quick:
        race.improve(today)
    best = min(race.results, key=lambda result: result.us)
    for shown in [today] if best is today else [today, best]:
        show(shown, today.us, apart)
    return {"cell": asdict(cell), "apart_us": apart, "results": [asdict(each) for each in race.results]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["2b", "4b"], choices=HEADS)
    parser.add_argument("--kv", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1100, 4096])
    parser.add_argument("--mixed", action="store_true", help="contexts from short to the given ones")
    parser.add_argument("--quick", action="store_true", help="no search for better cuts")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = [
        Cell(model, kv, sequences, context, args.mixed)
        for model in args.models
        for kv in args.kv
        for sequences in args.sequences
        for context in args.contexts
    ]
    found = []
    for cell in cells:
        found.append(measure(cell, args.device, args.quick))
        if args.out:  # after each: time on a GPU may end
            args.out.write_text(json.dumps({"machine": machine.describe(), "cells": found}))


if __name__ == "__main__":
    main()
