"""Which tiles the low-bit products run fastest in, on this GPU, shape by shape.

    python benchmarks/kernel_tiles.py --out results.json [--formats fp8 int4] [--tokens 1 8 32]

Each cell replays a CUDA graph over as many different weights as a model has layers, so that nothing comes
from the L2 cache, and prints microseconds and the share of the read bandwidth. Tiles are compiled by several
processes first: the compiler takes longer than the measurement.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product as combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch

from snugvl.layers.kernels import linear
from snugvl.layers.weights import Weights

READ_BANDWIDTH = 4.4e12  # bytes a second, measured on the H200 (shared/anchors.md)
SHAPES = {  # rows, columns, swiglu
    "2b": {
        "qkv": (4096, 2048, False),
        "o": (2048, 2048, False),
        "gate_up": (12288, 2048, True),
        "down": (2048, 6144, False),
    },
    "4b": {
        "qkv": (6144, 2560, False),
        "o": (2560, 4096, False),
        "gate_up": (19456, 2560, True),
        "down": (2560, 9728, False),
    },
    "8b": {
        "qkv": (6144, 4096, False),
        "o": (4096, 4096, False),
        "gate_up": (24576, 4096, True),
        "down": (4096, 12288, False),
    },
}


def random_weights(kind: str, rows: int, columns: int) -> Weights:
    device = "cuda"
    if kind == "bf16":
        return Weights("bf16", rows, columns, torch.randn(rows, columns, device=device).bfloat16() * 0.02)
    if kind == "fp8":
        data = torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn)
        return Weights("fp8", rows, columns, data, torch.rand(-(-rows // 128), columns // 128, device=device))
    scale = torch.rand(rows, columns // 128, device=device).bfloat16() * 0.01
    if kind == "int8":
        data = torch.randint(-127, 128, (rows, columns), device=device, dtype=torch.int8)
        return Weights("int8", rows, columns, data, scale)
    data = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), device=device, dtype=torch.int32)
    return Weights("int4", rows, columns, data, scale, torch.full_like(scale, 7.5))


def replay_us(run: Callable[[], None], calls: int) -> float:
    """Median microseconds of one call, from replays of a graph of `calls` of them."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return float(median(times[2:]))


def tiles(tokens: int, swiglu: bool, matrix: bool) -> Iterator[tuple[int, ...]]:
    if tokens == 1 and not matrix:
        yield from combinations((2, 4, 8, 16), (4, 8, 16), (2, 4, 8))
    else:
        bm = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
        if tokens > 64:
            yield from (
                (bm, bn, 1, warps, stages)
                for bm, bn, warps, stages in combinations((64, 128), (64, 128), (4, 8), (2, 3, 4))
            )
            return
        for bn, split, warps, stages in combinations((32, 64, 128), (1, 2, 4, 8), (4, 8), (3, 5)):
            if bn * (2 if swiglu else 1) <= 128:
                yield bm, bn, split, warps, stages


def cells(args: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    return [
        (size, name, kind, tokens)
        for size in args.sizes
        for name in SHAPES[size]
        for kind in args.formats
        for tokens in args.tokens
    ]


def measure(
    cell: tuple[str, str, str, int], *, quick: bool, shard: tuple[int, int], matrix: bool
) -> list[dict[str, Any]]:
    size, name, kind, tokens = cell
    rows, columns, swiglu = SHAPES[size][name]
    copies = 1 if quick else max(4, int(200e6 / (rows * columns * (2 if kind == "bf16" else 1))))
    stored = [random_weights(kind, rows, columns) for _ in range(copies)]
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(columns, device="cuda", dtype=torch.bfloat16)
    fused = norm if tokens == 1 and not matrix and name in ("qkv", "gate_up") else None
    outputs = rows // 2 if swiglu else rows
    residual = (
        torch.zeros(tokens, outputs, device="cuda", dtype=torch.bfloat16) if name in ("o", "down") else None
    )
    results = []
    for index, tile in enumerate(tiles(tokens, swiglu, matrix)):
        if index % shard[1] != shard[0]:
            continue
        chosen = "vector_tile" if tokens == 1 and not matrix else "matrix_tile"
        setattr(linear, chosen, lambda *_, tile=tile, **__: tile)

        if matrix:
            linear.VECTOR_ROWS = 0

        def run() -> None:
            for weights in stored:
                linear.product(x, weights, norm=fused, eps=1e-6, residual=residual, swiglu=swiglu)

        try:
            if quick:
                run()
                continue
            us = replay_us(run, copies)
        except Exception as error:
            if not quick:
                print(f"{cell} {tile}: {type(error).__name__}: {str(error)[:100]}")
            continue
        share = stored[0].nbytes / us / 1e-6 / READ_BANDWIDTH
        results.append(
            {"size": size, "shape": name, "format": kind, "tokens": tokens, "tile": tile, "us": us,
             "bandwidth": share, "tflops": 2 * rows * columns * tokens / us / 1e6}
        )  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["2b", "4b"])
    parser.add_argument("--formats", nargs="+", default=["fp8", "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--matrix", action="store_true", help="the kernel for several rows also for one")
    parser.add_argument("--compile", help="SHARD/SHARDS: only compile")
    args = parser.parse_args()
    if args.compile:
        shard, shards = map(int, args.compile.split("/"))
        for cell in cells(args):
            measure(cell, quick=True, shard=(shard, shards), matrix=args.matrix)
        return
    again = [sys.executable, *sys.argv, "--compile"]
    workers = [subprocess.Popen([*again, f"{i}/{args.processes}"]) for i in range(args.processes)]
    for worker in workers:
        worker.wait()
    everything = []
    for cell in cells(args):
        results = sorted(measure(cell, quick=False, shard=(0, 1), matrix=args.matrix), key=lambda r: r["us"])
        everything += results
        for r in results[:3]:
            print(
                f"{r['size']} {r['shape']:8} {r['format']} M={r['tokens']:<5} {r['tile']!s:24} "
                f"{r['us']:8.2f} us "
                f"{r['bandwidth']:5.0%} {r['tflops']:6.0f} TFLOP/s"
            )
    if args.out:
        args.out.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
