"""Which tiles products of one row run fastest in, in a layer: on a GPU, shape by shape.

    export PYTHONPATH=benchmarks
    python benchmarks/kernels/layer_tiles.py --sizes 4b 8b --out results.json  # int4
    python benchmarks/kernels/layer_tiles.py --sizes qwen3.5-4b --format bf16
    python benchmarks/kernels/layer_tiles.py --sizes 4b --only  # what the package takes, and nothing else
    python benchmarks/kernels/layer_tiles.py --sizes 2b --format fp8 --multiprocessors 30  # `bandwidth.py`'s

A product alone, one after the other (`kernel_tiles.py`), says little about one that others come before and
after: kernels start while the one before them ends. So a CUDA graph of all layers of a decoder is replayed,
each with weights of its own, attention to a short context between its products, and what counts is
microseconds a layer. Tiles of one product after the other are tried, each with the best of the others, twice.
Every one is compared with the package's own result first. Tiles are compiled by several processes before.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product as combinations
from statistics import median
from typing import Any
from unittest import mock

import torch

import machine
from bandwidth import held_to
from kernels.kernel_tiles import SHAPES, TOLERANCE, copy, in_parts, random_weights
from snugvl.layers.kernels.attention import paged
from snugvl.layers.kernels.products import linear, tiles
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.weights import FormatName, Weights

CONTEXT = 320  # tokens
PRODUCTS = ("gate_up", "down", "qkv", "o")
HEADS = {  # heads, KV heads, dim, layers; of Qwen3.5 as if all had attention, as wide as the linear ones
    "2b": (16, 8, 128, 28),
    "4b": (32, 8, 128, 36),
    "8b": (32, 8, 128, 36),
    "qwen3.5-4b": (16, 8, 256, 32),
}
Tile = tuple[int, int, int, bool]  # as `Fragments`
CODES: tuple[Tile, ...] = (
    *combinations((16, 32), (2, 4, 8, 16), (0,), (False, True)),
    *combinations((16,), (2, 4, 8, 16), (1, 2, 3, 4, 6), (False,)),
)
BYTE: tuple[Tile, ...] = tuple(combinations((2, 4, 8, 16), (1, 2, 4, 8), (0,), (False, True)))
BYTE_ROUNDS: tuple[Tile, ...] = tuple(combinations((4, 8, 16), (1, 2, 4), (2, 4, 8), (False,)))
BF16: tuple[Tile, ...] = tuple(combinations((2, 4, 8), (2, 4, 8, 16), (0,), (False, True)))
BF16_ROUNDS: tuple[Tile, ...] = tuple(combinations((2, 4, 8), (2, 4, 8), (2, 4, 8), (False,)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tile of one of a size's products; None: the package's."""

    size: str
    product: str
    tile: Tile | None


def tiles_of(kind: FormatName, size: str, name: str) -> tuple[Tile, ...]:
    """What is tried; as far as a thread's registers have room."""
    rows, columns, _ = SHAPES[size][name]
    if kind == "int4":  # registers of a slice: 36 of 16 rows, and as many of the next ones, 10 of the input
        slices = {tile: -(-columns // (512 * tile[1])) for tile in CODES}
        return tuple(
            tile for tile in CODES if slices[tile] * (36 * tile[0] // 16 * (1 + bool(tile[2])) + 10) <= 250
        )  # fmt: skip
    tried, slice_ = (BF16 + BF16_ROUNDS, 256) if kind == "bf16" else (BYTE + BYTE_ROUNDS, 512)
    tried = tried if rows >= 6144 else tuple(tile for tile in tried if not tile[2])
    return tuple(tile for tile in tried if tile[0] * -(-columns // (slice_ * tile[1])) <= 32)


def candidates(sizes: list[str], kind: FormatName) -> list[Candidate]:
    return [
        Candidate(size, name, tile)
        for size in sizes
        for name in PRODUCTS
        for tile in (None, *tiles_of(kind, size, name))
    ]


def key(size: str, name: str) -> tuple[int, int, bool]:
    """What the package's choice of a tile is asked with."""
    rows, columns, swiglu = SHAPES[size][name]
    return (rows // 2 if swiglu else rows), columns, swiglu


@contextmanager
def chosen(size: str, wanted: dict[str, Tile | None]) -> Iterator[None]:
    """The package takes these tiles."""
    by_shape = {key(size, name): tiles.Fragments(*tile) for name, tile in wanted.items() if tile is not None}

    def taking(own: Callable[..., tiles.Fragments]) -> Callable[..., tiles.Fragments]:
        def tile_of(outputs: int, weights: Weights, *units: int, swiglu: bool) -> tiles.Fragments:
            found = by_shape.get((outputs, weights.columns, swiglu))
            return found or own(outputs, weights, *units, swiglu=swiglu)

        return tile_of

    with (
        mock.patch.object(linear, "codes_tile", taking(tiles.codes_tile)),
        mock.patch.object(linear, "planes_tile", taking(tiles.planes_tile)),
        mock.patch.object(linear, "bf16_tile", taking(tiles.bf16_tile)),
        mock.patch.object(linear, "byte_tile", taking(tiles.byte_tile)),
    ):
        yield


class Layers:
    """All layers of a decoder, with random weights."""

    def __init__(self, size: str, kind: FormatName) -> None:
        self.heads, kv_heads, self.dim, self.count = HEADS[size]
        self.swiglu = {name: SHAPES[size][name][2] for name in PRODUCTS}
        first = {name: random_weights(kind, *SHAPES[size][name][:2]) for name in PRODUCTS}
        self.weights = [{name: copy(each) for name, each in first.items()} for _ in range(self.count)]
        self.nbytes = sum(each.nbytes for each in first.values())
        blocks = -(-CONTEXT // 16)
        self.cache = KVCache(
            num_layers=self.count, num_blocks=1 + blocks, block_size=16, num_kv_heads=kv_heads,
            head_dim=self.dim, dtype=torch.bfloat16, device=torch.device("cuda"),
        )  # fmt: skip
        self.gated = size.startswith("qwen3.5")
        bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.tables = torch.arange(1, 1 + blocks, dtype=torch.int32, device="cuda")[None]
        self.lengths = torch.tensor([CONTEXT], dtype=torch.int32, device="cuda")
        self.slots = torch.tensor([16 + CONTEXT - 1], device="cuda")
        self.gain = torch.ones(SHAPES[size]["qkv"][1], **bf16)
        self.head_gain = torch.ones(self.dim, **bf16)
        self.rotation = torch.ones(1, self.dim, **bf16), torch.zeros(1, self.dim, **bf16)
        self.x = torch.randn(1, len(self.gain), **bf16)

    def product(self, layer: int, name: str, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """`beside`: the norm of a first product, the residual of a second one."""
        first = name in ("qkv", "gate_up")
        more: dict[str, Any] = {"norm" if first else "residual": beside}
        made = linear.product(x, self.weights[layer][name], eps=1e-6, swiglu=self.swiglu[name], **more)
        assert made is not None
        return made

    def run(self) -> torch.Tensor:
        """A decode step without its head."""
        x = self.x
        for layer in range(self.count):
            qkv = self.product(layer, "qkv", x, self.gain).view(1, -1, self.dim)
            where = self.cache.layer(layer)
            norms = (self.head_gain, self.head_gain)
            written = (qkv, norms, 1e-6, self.rotation, self.slots, *where, self.heads)
            query = paged.write(*written, gated=self.gated)
            attended = paged.decode(query, *where, self.tables, self.lengths, 16, self.dim**-0.5)
            x = self.product(layer, "o", attended.flatten(1), x)
            x = self.product(layer, "down", self.product(layer, "gate_up", x, self.gain), x)
        return x

    def layer_us(self, repeats: int) -> float:
        """Microseconds a layer."""
        self.run()  # compiles, which a recording can't
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        times = []
        for _ in range(3 + repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / self.count)
        return float(median(times[3:]))


def prepare(part: int, parts: int, sizes: list[str], kind: FormatName) -> None:
    """Compile every `parts`-th tile, and compare its result with the package's."""
    for candidate in candidates(sizes, kind)[part::parts]:
        size, name, tile = candidate.size, candidate.product, candidate.tile
        torch.manual_seed(1)
        rows, columns, swiglu = SHAPES[size][name]
        weights = random_weights(kind, rows, columns)
        x = torch.randn(1, columns, device="cuda").bfloat16()
        first = name in ("qkv", "gate_up")
        beside = torch.rand(1, columns if first else rows, device="cuda").bfloat16() + 0.5
        more: dict[str, Any] = {"norm": beside[0]} if first else {"residual": beside}
        right = linear.product(x, weights, eps=1e-6, swiglu=swiglu, **more)
        with chosen(size, {name: tile}):
            found = linear.product(x, weights, eps=1e-6, swiglu=swiglu, **more)
        assert right is not None
        assert found is not None
        right, found = right.float(), found.float()
        error = float((found - right).norm() / right.norm())
        if not error < TOLERANCE:
            print(f"WRONG {candidate}: relative error {error:.1e}", flush=True)


def measure(size: str, kind: FormatName, repeats: int, *, only: bool) -> dict[str, Any]:
    """Try tiles of one product after the other, twice; `only`: the package's."""
    layers = Layers(size, kind)
    before = layers.layer_us(repeats)
    print(f"{size}: {layers.nbytes / 1e6:.1f} MB a layer, {before:.2f} µs", flush=True)
    if only:
        return {"size": size, "bytes": layers.nbytes, "us": before}
    best: dict[str, Tile | None] = dict.fromkeys(PRODUCTS)
    tried: list[dict[str, Any]] = []
    for _ in range(2):
        for name in PRODUCTS:
            times: list[tuple[float, Tile | None]] = []
            for tile in (None, *tiles_of(kind, size, name)):
                with chosen(size, best | {name: tile}):
                    times.append((layers.layer_us(repeats), tile))
            own = times[0][0]
            times.sort(key=lambda each: each[0])
            best[name] = times[0][1]
            shown = "  ".join(f"{tile} {us:.2f}" for us, tile in times[:8])
            print(f"  {name}: the package's {own:.2f} µs;  {shown}", flush=True)
            tried += [{"product": name, "tile": tile, "us": us} for us, tile in times]
    with chosen(size, best):
        after = layers.layer_us(repeats)
    print(f"  {before:.2f} µs a layer, with the best {after:.2f}: {best}", flush=True)
    figures = {"us": before, "best_us": after, "best": best, "tried": tried}
    return {"size": size, "bytes": layers.nbytes, **figures}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["2b", "4b", "8b"], choices=HEADS)
    parser.add_argument("--format", default="int4", choices=["int4", "int5", "int6", "bf16", "fp8", "int8"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", action="store_true", help="the package's tiles")
    parser.add_argument("--multiprocessors", type=int, help="to which the process is held")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        prepare(args.part, args.processes, args.sizes, args.format)
        return
    if not args.only:
        print(*in_parts(args.processes), sep="", flush=True)
    found: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"machine": machine.describe()}
    with ExitStack() as held:
        if args.multiprocessors:
            held.enter_context(held_to(args.multiprocessors, torch.device("cuda"), figures))
        found += [measure(size, args.format, args.repeats, only=args.only) for size in args.sizes]
    if args.out:
        args.out.write_text(json.dumps(figures | {"results": found}))


if __name__ == "__main__":
    main()
