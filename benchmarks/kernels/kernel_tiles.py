"""Which kernel and which tiles the products with stored weights run fastest in, on this GPU, shape by shape.

    export PYTHONPATH=benchmarks
    python benchmarks/kernels/kernel_tiles.py --out FILE [--sizes 2b] [--formats fp8 int4] [--tokens 1 8]

Each cell replays a CUDA graph over as many different weights as a model has layers, so that nothing comes
from the L2 cache, and prints microseconds and the share of the read bandwidth: what the package takes by
itself (`default`), then the best of the others. Every one is compared with torch's product of the dequantized
weights first. Tiles are compiled by several processes before: the compiler takes longer than the measurement.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from unittest import mock

import torch
from torch.nn.functional import silu

import machine
from snugvl.core.formats import FORMATS
from snugvl.layers.kernels.products import linear
from snugvl.layers.kernels.products.dequantize import swiglu as swiglu_into
from snugvl.layers.kernels.rows import normed
from snugvl.layers.weights import WORDS, FormatName, Weights

READ_BANDWIDTH = 4.43e12  # bytes a second, measured on the H200 (benchmarks/bandwidth.py)


def shapes(hidden: int, qkv: int, attended: int, mlp: int, words: int) -> dict[str, tuple[int, int, bool]]:
    """A decoder's products: rows, columns, swiglu."""
    return {
        "qkv": (qkv, hidden, False),
        "o": (hidden, attended, False),
        "gate_up": (2 * mlp, hidden, True),
        "down": (hidden, mlp, False),
        "head": (words, hidden, False),
    }


SHAPES = {
    "2b": shapes(2048, 4096, 2048, 6144, 151936),
    "4b": shapes(2560, 6144, 4096, 9728, 151936),
    "qwen3.5-4b": shapes(2560, 12288, 4096, 9216, 248320),
    "8b": shapes(4096, 6144, 4096, 12288, 151936),
}
HEADS: tuple[FormatName, ...] = ("bf16", "int8")  # formats that a head may have
TOLERANCE = 1e-2  # relative error: bf16 rounds by some thousandths
Tile = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One product: a layer's shape, a format, rows of input."""

    size: str
    shape: str
    format: FormatName
    tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """How long a product took in one kernel and tile."""

    cell: Cell
    kernel: str
    tile: Tile
    us: float
    bandwidth: float
    error: float


def random_weights(kind: FormatName, rows: int, columns: int) -> Weights:
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
    zero = torch.full_like(scale, 2 ** (FORMATS[kind].bits - 1) - 0.5)
    upper = None
    if bits := FORMATS[kind].upper:
        most = torch.iinfo(WORDS[bits])
        upper = torch.randint(most.min, most.max + 1, data.shape, device=device, dtype=WORDS[bits])
    return Weights(kind, rows, columns, data, scale, zero, upper=upper)


def copy(weights: Weights) -> Weights:
    """The same numbers in other memory."""
    parts = (weights.data, weights.scale, weights.zero, weights.upper)
    data, scale, zero, upper = (None if part is None else part.clone() for part in parts)
    assert data is not None
    return replace(weights, data=data, scale=scale, zero=zero, upper=upper)


def by_library(
    x: torch.Tensor,
    weights: Weights,
    *,
    norm: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    swiglu: bool,
) -> torch.Tensor:
    """What `linear.product` computes, by torch where that is quicker."""
    x = x if norm is None else normed(x, norm, eps, 0.0)
    if residual is not None:
        return torch.addmm(residual, x, weights.data.T)
    y = torch.mm(x, weights.data.T)
    if not swiglu:
        return y
    out = torch.empty(len(y), y.shape[1] // 2, dtype=y.dtype, device=y.device)
    swiglu_into(y, out, 0)
    return out


def replay_us(run: Callable[[], None], calls: int) -> float:
    """Median microseconds of one call, from replays of a graph of `calls` of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return float(median(times[2:]))


def skinny_tiles(cell: Cell) -> tuple[Tile, ...]:
    """Rows, warps, groups at once, early start, and whether the norm has a kernel of its own."""
    if cell.format == "bf16":
        return (
            (16, 1, 1, 1), (16, 1, 2, 1), (16, 2, 2, 1), (16, 2, 4, 1), (16, 4, 4, 1), (16, 4, 8, 1),
            (16, 8, 8, 1), (32, 1, 1, 1), (32, 1, 2, 1), (32, 2, 2, 1), (32, 2, 4, 1), (32, 4, 4, 1),
            (32, 4, 8, 1), (32, 8, 8, 1),
        )  # fmt: skip
    if cell.tokens > 16:
        return (32, 4, 4, 1), (32, 8, 8, 1), (16, 8, 8, 1)
    both: tuple[Tile, ...] = (16, 8, 8, 1), (16, 8, 16, 1), (32, 8, 8, 1), (32, 4, 4, 1), (32, 4, 8, 1)
    if cell.tokens > 1:
        return both
    normed = cell.shape in ("qkv", "gate_up")
    return (
        *both, (16, 4, 4, 1), (16, 4, 8, 1), (16, 4, 16, 1), (16, 16, 16, 1), (32, 8, 16, 1), (64, 4, 4, 1),
        (16, 8, 16, 0), (32, 8, 8, 0), *((*tile, 1) for tile in both if normed),
    )  # fmt: skip


def variants(cell: Cell) -> Iterator[tuple[str, Tile]]:
    """What the package takes, then kernels and tiles to try."""
    yield "default", ()
    if cell.format == "bf16":
        yield "library", ()
    if cell.tokens <= 32:
        yield from (("skinny", tile) for tile in skinny_tiles(cell))


@contextmanager
def chosen(kernel: str, tile: Tile) -> Iterator[None]:
    """The package takes this kernel in this tile."""
    if kernel == "default":
        yield
        return
    if kernel == "library":
        with mock.patch.object(linear, "product", by_library):
            yield
        return
    with (
        mock.patch.object(linear, "SKINNY_ROWS", 64 if kernel == "skinny" else 0),
        mock.patch.object(linear, "SKINNY_BYTES", 0),
        mock.patch.object(linear, "LONE", frozenset()),
        mock.patch.object(linear, "VECTOR_ROWS", 0),
        mock.patch.object(linear, f"{kernel}_tile", return_value=tile[:4]),
        mock.patch.object(linear, "NORM_APART", len(tile) == 5),
    ):
        yield


def cells(args: argparse.Namespace) -> list[Cell]:
    """What to measure; heads have formats of their own."""
    return [
        Cell(size, shape, kind, tokens)
        for size in args.sizes
        for shape in SHAPES[size]
        for kind in (args.formats if shape != "head" else HEADS)
        for tokens in args.tokens
    ]


class Products:
    """A cell's weights and input: as many matrices as exceed the L2 cache, or one."""

    def __init__(self, cell: Cell, *, only: int = 0) -> None:
        rows, columns, self.swiglu = SHAPES[cell.size][cell.shape]
        torch.manual_seed(0)
        first = random_weights(cell.format, rows, columns)
        copies = only or max(2, int(120e6 / first.nbytes))
        self.stored = [first, *(copy(first) for _ in range(copies - 1))]
        self.x = torch.randn(cell.tokens, columns, device="cuda", dtype=torch.bfloat16)
        fused = cell.tokens == 1 and cell.shape in ("qkv", "gate_up")
        self.norm = torch.randn(columns, device="cuda", dtype=torch.bfloat16) if fused else None
        shape = cell.tokens, rows // 2 if self.swiglu else rows
        added = cell.shape in ("o", "down")
        self.residual = torch.randn(shape, device="cuda", dtype=torch.bfloat16) if added else None

    def one(self, weights: Weights) -> torch.Tensor:
        """The product as the package computes it."""
        made = linear.product(
            self.x, weights, norm=self.norm, eps=1e-6, residual=self.residual, swiglu=self.swiglu
        )
        assert made is not None
        return made

    def all(self) -> None:
        """One after the other."""
        for weights in self.stored:
            self.one(weights)

    def expected(self) -> torch.Tensor:
        """Torch's product of the first, float32."""
        x = self.x.float()
        if self.norm is not None:
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.norm.float()
        y = x @ self.stored[0].wide(torch.float32).T
        if self.swiglu:
            gate, up = y.chunk(2, -1)
            y = silu(gate) * up
        return y if self.residual is None else y + self.residual.float()


def measure(cell: Cell) -> list[Result]:
    """Every variant of one cell, the fastest first; one that is wrong or fails is told and left out."""
    products = Products(cell)
    expected, results = products.expected(), []
    for kernel, tile in variants(cell):
        with chosen(kernel, tile):
            try:
                error = float((products.one(products.stored[0]).float() - expected).norm() / expected.norm())
                us = replay_us(products.all, len(products.stored))
            except Exception as problem:
                print(f"FAILED {cell} {kernel} {tile}: {type(problem).__name__}: {str(problem)[:300]}")
                continue
        if not error < TOLERANCE:
            print(f"WRONG {cell} {kernel} {tile}: relative error {error:.2e}")
            continue
        share = products.stored[0].nbytes / us / 1e-6 / READ_BANDWIDTH
        results.append(Result(cell, kernel, tile, us, share, error))
    return sorted(results, key=lambda result: result.us)


def in_parts(processes: int) -> list[str]:
    """Run this script in so many processes, each told its `--part`; what each printed."""
    again = [sys.executable, *sys.argv, "--part"]
    workers = [
        subprocess.Popen([*again, str(part)], stdout=subprocess.PIPE, text=True) for part in range(processes)
    ]
    return [worker.communicate()[0] for worker in workers]


def compile_only(args: argparse.Namespace) -> None:
    """Run a share of all variants once, so that the cache on disk has them."""
    everything = [(cell, *variant) for cell in cells(args) for variant in variants(cell)]
    for cell, kernel, tile in everything[args.part :: args.processes]:
        products = Products(cell, only=1)
        with chosen(kernel, tile), suppress(Exception):  # the measurement tells
            products.all()


def show(results: list[Result]) -> None:
    """What the package takes by itself, and the best."""
    default = [result for result in results if result.kernel == "default"]
    others = [result for result in results if result.kernel != "default"]
    for r in default + others[:4]:
        name = f"{r.cell.size} {r.cell.shape:8}{r.cell.format:5} M={r.cell.tokens:<4}"
        tile = " ".join(map(str, r.tile))
        print(f"{name} {r.kernel:8}{tile:14}{r.us:8.2f} us {r.bandwidth:5.0%}  {r.error:.1e}", flush=True)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["fp8", "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        compile_only(args)
        return
    start = time.perf_counter()
    in_parts(args.processes)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    everything: list[Result] = []
    for cell in cells(args):
        results = measure(cell)
        everything += results
        show(results)
    if args.out:
        args.out.write_text(json.dumps([asdict(result) for result in everything]))


if __name__ == "__main__":
    main()
