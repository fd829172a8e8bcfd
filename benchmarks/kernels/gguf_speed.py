"""A GGUF on our own engine and a GPU: each type's products, whole models, planned beside taken.

    PYTHONPATH=.:src:benchmarks python benchmarks/kernels/gguf_speed.py [--only products] [--out FILE]
    PYTHONPATH=.:src:benchmarks python benchmarks/kernels/gguf_speed.py --tiles --only products --tokens 1

Products: of the shapes of Qwen3-VL-2B and -4B, one row of input (decoding alone), 8 and 64; microseconds
and the share of the GPU's read bandwidth, from CUDA graphs over more weights than the L2 cache holds;
beside our int4 in groups of 128. Each is compared with torch's product of the dequantized weights first.
`--tiles` tries other tiles for one row, too: rows of weights of a program, warps, early start. Several
processes compile all of it before, without a GPU's memory, and say how long each took. What is measured is
saved after each product.

Models: GGUF files with random weights (`random_gguf.py`), written to a temporary folder: tokens a second of
one answer, bytes planned beside taken in 7,200 MiB (`plan_vs_native.py` fills the engine).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver

import machine
from kernels import kernel_tiles
from kernels.kernel_tiles import READ_BANDWIDTH, SHAPES, TOLERANCE, Cell, Products, in_parts, replay_us
from snugvl.layers.ggml import LAYOUTS, GgmlType, parts_of
from snugvl.layers.kernels.compiler import ahead_of_time
from snugvl.layers.kernels.compiler.ahead_of_time import dry_run
from snugvl.layers.kernels.device import hardware_of
from snugvl.layers.kernels.products import ggml, linear
from snugvl.layers.kernels.products.tiles import Fragments
from snugvl.layers.weights import Weights

SIZES = ("2b", "4b")
TOKENS = (1, 8, 64)
TILES = tuple(
    Fragments(*tile)
    for tile in (
        (16, 2, 0, True), (16, 4, 0, True), (16, 8, 0, True), (16, 16, 0, True), (16, 8, 0, False),
        (32, 4, 0, True), (32, 8, 0, True), (16, 4, 0, False),
    )
)  # fmt: skip
WORDS = {"Q8_0": 34, "Q6_K": 30, "Q5_K": 28}  # registers of a slice's two rows, else 24
MODELS = (
    ("Qwen/Qwen3-VL-2B-Instruct", "Q4_K_M"),
    ("Qwen/Qwen3-VL-4B-Instruct", "Q4_K_M"),
    ("Qwen/Qwen3-VL-4B-Instruct", "Q8_0"),
)
CELL = "4096:1024:4:7200MiB"


def block_of(kind: str) -> GgmlType | None:
    """A type of blocks by its name; None: a format that isn't of blocks."""
    return next((each for each in LAYOUTS if each == kind), None)


def blocks(kind: Any, rows: int, columns: int) -> Weights:
    """Random codes with scales that a model could have."""
    name = block_of(kind)
    if name is None:
        return plain(kind, rows, columns)
    parts = parts_of([(name, rows)], columns)
    data = torch.randint(0, 256, (parts[0].nbytes(columns),), device="cuda", dtype=torch.uint8)
    halves = columns // LAYOUTS[name].block * LAYOUTS[name].planes[-1] // 2  # scales, and addends
    values = torch.full((rows, halves), 1e-4, dtype=torch.float16, device="cuda")
    parts[0].planes(data, columns)[-1].copy_(values.view(torch.uint8))
    return Weights("ggml", rows, columns, data, parts=parts)


plain = kernel_tiles.random_weights


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Every type, shape and number of rows."""
    for size, kind, tokens in product(args.sizes, args.types, args.tokens):
        for shape in SHAPES[size]:
            if shape != "head" or kind != "int4":
                yield Cell(size, shape, kind, tokens)


def held_of(cell: Cell) -> Products:
    """Its weights, more than the cache holds."""
    with mock.patch.object(kernel_tiles, "random_weights", blocks):
        return Products(cell)


def tiles_of(cell: Cell, others: bool) -> list[Fragments]:
    """What the package takes first, then the others that fit."""
    rows, columns, swiglu = SHAPES[cell.size][cell.shape]
    kind = block_of(cell.format)
    if kind is None:  # not of these kernels
        return [TILES[0]]
    own = ggml.lone_tile(rows // 2 if swiglu else rows, columns)
    if not others or cell.tokens > 1:
        return [own]
    return [own, *(tile for tile in TILES if tile != own and fits(tile, kind, columns))]


def fits(tile: Fragments, kind: GgmlType, columns: int) -> bool:
    """Whether every warp has something to do, in its registers."""
    slices = -(-columns // (256 * tile.warps))
    held = (slices if slices <= 4 else 2) * (WORDS.get(kind, 24) * tile.rows // 16 + 16)
    return 256 * tile.warps <= columns and held <= min(200, 2048 // tile.warps)


def taken(tile: Fragments) -> Any:
    """The package takes it."""
    return mock.patch.object(ggml, "lone_tile", return_value=tile)


def compile_only(args: argparse.Namespace) -> None:
    """Every so many-th tile; says how long each took."""
    hardware, launches = hardware_of(torch.device("cuda")), []
    todo = [(cell, tile) for cell in cells(args) for tile in tiles_of(cell, args.tiles)]
    for cell, tile in todo[args.part :: args.processes]:
        with torch.inference_mode(), dry_run(hardware) as found, taken(tile):
            without_memory(cell)
        launches += [(f"{cell.size} {cell.shape} {cell.format} {astuple(tile)}", launch) for launch in found]
    driver.set_active(ahead_of_time._DescribedDriver(hardware))
    for name, launch in launches:
        start = time.perf_counter()
        error = ahead_of_time._compile(launch)
        print(json.dumps([name, launch.name, time.perf_counter() - start, error and str(error)[:200]]))


def without_memory(cell: Cell) -> None:
    """The cell's product, of tensors that have none."""
    rows, columns, swiglu = SHAPES[cell.size][cell.shape]
    kind = block_of(cell.format)
    if kind is None:
        return
    parts = parts_of([(kind, rows)], columns)
    data = torch.empty(parts[0].nbytes(columns), dtype=torch.uint8, device="meta")
    x = torch.empty(cell.tokens, columns, dtype=torch.bfloat16, device="meta")
    norm = x[0] if cell.tokens == 1 and cell.shape in ("qkv", "gate_up") else None
    residual = None
    if cell.shape in ("o", "down"):
        residual = torch.empty(cell.tokens, rows, dtype=x.dtype, device="meta")
    stored = Weights("ggml", rows, columns, data, parts=parts)
    linear.product(x, stored, norm=norm, eps=1e-6, residual=residual, swiglu=swiglu)


def compile_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All tiles, by processes; the slowest kernels and those that failed are printed."""
    start, found = time.perf_counter(), []
    for printed in in_parts(args.processes):
        for line in printed.splitlines():
            product_, kernel, seconds, error = json.loads(line)
            found.append({"product": product_, "kernel": kernel, "seconds": seconds, "error": error})
            if error:
                print(f"DOES NOT COMPILE {product_} {kernel}: {error}", flush=True)
    found.sort(key=lambda each: -each["seconds"])
    taken_s = [each["seconds"] for each in found]
    print(
        f"{len(found)} kernels compiled in {time.perf_counter() - start:.0f} s, of which one takes", end=" "
    )
    print(f"{median(taken_s or [0]):.1f} s (median), {max(taken_s, default=0):.1f} s (most)", flush=True)
    for each in found[:5]:
        print(f"    {each['seconds']:.1f} s {each['kernel']} {each['product']}")
    return found


def measured(cell: Cell, others: bool) -> list[dict[str, Any]]:
    """As the package computes it, and by other tiles."""
    held = held_of(cell)
    expected, nbytes = held.expected(), held.stored[0].nbytes
    own, *more = tiles_of(cell, others)
    rows: list[dict[str, Any]] = []
    for tile in (own, *more):
        with taken(tile):
            try:
                error = float((held.one(held.stored[0]).float() - expected).norm() / expected.norm())
                us = replay_us(held.all, len(held.stored))
            except Exception as problem:  # a tile that needs more than a block has
                print(f"FAILED {cell} {tile}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                continue
        if not error < TOLERANCE:
            print(f"WRONG {cell} {tile}: relative error {error:.2e}", flush=True)
            continue
        share = nbytes / us / 1e-6 / READ_BANDWIDTH
        rows.append({
            "size": cell.size, "shape": cell.shape, "type": cell.format, "tokens": cell.tokens,
            "tile": astuple(tile), "own": tile == own, "us": us, "bandwidth": share, "error": error,
        })  # fmt: skip
    order = sorted(rows, key=lambda row: row["us"])
    for row in rows:
        best = row is order[0]
        if row["own"] or row in order[:3]:
            told = f"{row['us']:8.2f} us {row['bandwidth']:5.0%} {row['error']:.1e}"
            name = f"{cell.size} {cell.shape:8} {cell.format:5} M={cell.tokens:<3} {row['tile']!s:19}"
            print(f"{name} {told}{' own' if row['own'] else ''}{' best' if best else ''}", flush=True)
    return rows


def whole(model: str, kind: str, work: Path) -> dict[str, Any]:
    """One model: written, planned, run."""
    import snugvl

    path = work / f"{model.rpartition('/')[2]}-{kind}.gguf"
    pocket = Path(snugvl.__file__).parent / "pocket"
    command = ["-m", "benchmarks.random_gguf", model, str(pocket), str(path), "--type", kind]
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    speed = subprocess.run(
        [sys.executable, __file__, "--answer", str(path)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = {"model": model, "type": kind, "tokens_per_s": float(speed.stdout.split()[-1])}
    print(f"{model} {kind}: {found['tokens_per_s']:.1f} tokens/s", flush=True)
    out = work / "plan.json"
    plan = [sys.executable, "benchmarks/plan_vs_native.py", str(path), "--weights", "auto", "--cells", CELL]
    subprocess.run([*plan, "--jobs", "1", "--out", str(out)], check=False)
    found["plan"] = out.read_text() if out.exists() else None
    for each in work.glob("*.gguf"):
        each.unlink()
    return found


def main() -> None:
    """The command line."""
    parser = machine.parser(__doc__)
    parser.set_defaults(out=machine.RESULTS / "h200" / "gguf_speed.json")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SHAPES))
    parser.add_argument("--tiles", action="store_true", help="try other tiles for one row")
    parser.add_argument("--types", nargs="+", default=[*LAYOUTS, "int4"], choices=[*LAYOUTS, "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--processes", type=int, default=14, help="that compile tiles")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=["products", "models"], help="leave the others out")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        print(machine.answer_speed(args.answer, "one two three", device="cuda", language_only=True))
        return
    if args.part is not None:
        compile_only(args)
        return
    found: dict[str, Any] = {"products": []}
    if args.only != "models":
        if args.tiles:
            found["compiled"] = compile_all(args)
        for cell in cells(args):
            found["products"] += measured(cell, args.tiles)
            machine.save("h200/gguf_speed", found, args.out)
    if args.only != "products":
        with tempfile.TemporaryDirectory() as work:
            found["models"] = [whole(model, kind, Path(work)) for model, kind in MODELS]
    machine.save("h200/gguf_speed", found, args.out)


if __name__ == "__main__":
    main()
