"""Decode attention in two kernels and in one, and how contexts are best cut: on a GPU, shape by shape.

    python benchmarks/decode_attention.py --out results.json [--models 2b 4b] [--kv bf16 fp8] [--replays 2000]
    TRITON_INTERPRET=1 python benchmarks/decode_attention.py --device cpu --models tiny   # without a GPU

A cell replays a CUDA graph of as many layers as exceed the L2 cache: norm, rotation and the write of the new
token, then attention, as a decode step has them, so that what overlaps there overlaps here. `apart` is the
first of both alone. Of each way come: microseconds a layer, the difference to the way of today, the largest
difference of any value to today's, and the largest relative error of any head's output to plain torch in
float32. With `--replays` the graph of the fastest cut in one kernel runs so often; its outputs must be the
same each time, bit by bit, and its counters 0.

`today`: two kernels as they are. `two`, `one`: in two kernels and in one. Cuts are tried one property after
the other, each beside the best so far: tiles (step, warps, stages), splits, the least tokens of a split,
tokens fetched ahead. A cut that is wrong or fails is told and left out.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import machine
from kernel_tiles import replay_us
from snugvl.layers.kernels import attention
from snugvl.layers.kernels.decode_cut import DecodeCut, counters, cut_by_load
from snugvl.layers.kernels.device import hardware_of
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
LEAST = (0, 64, 128, 256)
AHEAD = (0, 64, 128)


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
    """One way through one cell; `delta`: the largest to today's values, `error`: relative, to plain torch."""

    cell: Cell
    way: str
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
        return attention.write(*self.written, *self.cache.layer(layer), self.heads)

    def apart(self) -> None:
        """All layers without attention."""
        for layer in range(len(self.cache.storage)):
            self.query(layer)

    def all(self) -> None:
        """All layers."""
        self.outputs = []
        for layer in range(len(self.cache.storage)):
            where = (*self.cache.layer(layer), self.tables, self.lengths, BLOCK, self.scale)
            self.outputs.append(attention.decode(self.query(layer), *where))

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


@contextmanager
def chosen(one_kernel: bool, cut: DecodeCut) -> Iterator[None]:
    """Attention is computed in this way."""
    with (
        mock.patch.object(attention, "ONE_KERNEL", one_kernel),
        mock.patch.object(attention, "decode_cut", return_value=cut),
    ):
        yield


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
    """The ways through one cell, each compared with today's."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device = cell, device
        self.layers = Layers(cell, device)
        self.results: list[Result] = []
        self.today: torch.Tensor | None = None

    def enter(self, way: str, cut: DecodeCut) -> Result | None:
        """Measure a cut, once; None where it is wrong or fails."""
        known = [result for result in self.results if (result.way, result.cut) == (way, cut)]
        if known:
            return known[0]
        layers = self.layers
        with chosen(way == "one", cut):
            try:
                layers.all()
                values = torch.stack(layers.outputs).float()
                us = timed(layers.all, len(layers.outputs), self.device)
            except Exception as problem:
                print(f"FAILED {self.cell} {way} {cut}: {type(problem).__name__}: {str(problem)[:300]}")
                return None
        self.today = values if self.today is None else self.today
        delta = float((values - self.today).abs().max())
        error = max(far(values[0], layers.expected), far(values, self.today))
        if not error < TOLERANCE:
            print(f"WRONG {self.cell} {way} {cut}: relative error {error:.1e}, max|Δ| {delta:.1e}")
            return None
        self.results.append(Result(self.cell, way, cut, us, delta, error))
        return self.results[-1]

    def improve(self, way: str, cut: DecodeCut) -> Result | None:
        """The best cut of one way, from a first one on: one property after the other."""
        best = self.enter(way, cut)
        tiles = [dict(zip(("step", "warps", "stages"), tile, strict=True)) for tile in TILES]
        one = way == "one"
        more = ([{"least": least} for least in LEAST], [{"ahead": ahead} for ahead in AHEAD]) if one else ()
        for changes in (tiles, [{"splits": splits} for splits in SPLITS], *more):
            found = [self.enter(way, replace(best.cut if best else cut, **change)) for change in changes]
            best = min([r for r in (best, *found) if r], key=lambda result: result.us, default=None)
        return best

    def replay(self, cut: DecodeCut, replays: int) -> int:
        """How many of so many replays of one kernel differ from the first in any bit."""
        with chosen(True, cut):
            self.layers.all()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.layers.all()
        graph.replay()
        first = torch.stack(self.layers.outputs)
        different = torch.zeros((), dtype=torch.int64, device=self.device)
        for _ in range(replays):
            graph.replay()
            different += (torch.stack(self.layers.outputs) != first).any()
        left = counters(self.device, self.cell.sequences * HEADS[self.cell.model][1])
        assert not left.any(), "a counter was left above 0"
        return int(different)


def show(result: Result, us: float, apart: float) -> None:
    """One line; `us`: today's."""
    cell, cut = result.cell, result.cut
    name = (
        f"{cell.model} {cell.kv:4} S={cell.sequences:<3} L={cell.context:<5}{'mixed' if cell.mixed else '':6}"
    )
    tile = (
        f"{cut.splits}×≥{cut.least} of {cut.step}, {cut.warps} warps, {cut.stages} stages, ahead {cut.ahead}"
    )
    print(
        f"{name}{result.way:6}{tile:46}{result.us:8.2f} µs{result.us - us:+7.2f}  (apart {apart:.2f})"
        f"  max|Δ| {result.delta:.1e}, error {result.error:.1e}",
        flush=True,
    )


def measure(cell: Cell, device: torch.device, replays: int, quick: bool) -> dict[str, Any]:
    """One cell: today's way, the best in two kernels and in one, and one kernel as the package cuts it."""
    race = Race(cell, device)
    heads, kv_heads, dim = HEADS[cell.model]
    query = torch.empty(cell.sequences, heads, dim, dtype=race.layers.dtype, device=device)
    default = attention.decode_cut(query, kv_heads)
    by_load = cut_by_load(cell.sequences * kv_heads, hardware_of(device).units, default.step)
    apart = timed(race.layers.apart, len(race.layers.cache.storage), device)
    today = race.enter("today", default)
    assert today is not None, "what runs today is wrong"
    ways = [today, race.enter("one", default), race.enter("one", by_load)]
    if not quick:
        ways += [race.improve("two", replace(by_load, least=0)), race.improve("one", by_load)]
    shown = [way for way in ways if way]
    for way in shown:
        show(way, today.us, apart)
    ones = [way for way in shown if way.way == "one"]
    differ = None
    if replays and ones:
        differ = race.replay(ones[-1].cut, replays)
        print(f"      {differ} of {replays} replays of the last differ", flush=True)
    everything = [asdict(result) for result in race.results]
    return {"cell": asdict(cell), "apart_us": apart, "replays_that_differ": differ, "results": everything}


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
    parser.add_argument("--replays", type=int, default=0)
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
        found.append(measure(cell, args.device, args.replays, args.quick))
        if args.out:  # after each: time on a GPU may end
            args.out.write_text(json.dumps({"machine": machine.describe(), "cells": found}))


if __name__ == "__main__":
    main()
