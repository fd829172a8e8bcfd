"""Does the native engine keep to its plan? Loaded under a limit, filled to the brim, measured by component.

    python benchmarks/plan_vs_native.py CHECKPOINT… [--weights fp8 int8 int4] [--jobs 6] [--out FILE]
    python benchmarks/plan_vs_native.py pocket --weights auto --device cpu --cells 512:256:2:2GiB

A cell is CONTEXT:SIDE:REQUESTS:MEMORY, in a process of its own, held to MEMORY as `snugvl serve --memory`
holds it: a prompt that fills the context with an image of SIDE×SIDE pixels; so many streams, greedy and
drawn, and that image encoded beside them; then every size of a batch. SIDE is 0 for a model that reads text
alone. Several cells run side by side on one card: each is capped, and the driver counts each process by
itself. No cell's plan learns from another.

Prints planned and measured bytes in all, the most that tensors filled at once (`live`: the workspace is
claimed whole at the start) and, over all cells, the first two by row of the ledger. The goal: within 2 % or
64 MiB, never more than 64 MiB below what is taken.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Self

import machine

MIB = 1 << 20
GOAL_SHARE, GOAL_BYTES = 0.02, 64 * MIB
CELLS = (
    "2048:512:1:20GiB",
    "4096:1024:4:7200MiB",
    "4096:1024:32:20GiB",
    "8192:2048:16:20GiB",
    "18432:4096:8:20GiB",
)
CELL_PATIENCE_S = 240


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration. `side`: of the largest image, in pixels; `requests`: at once."""

    context: int
    side: int
    requests: int
    memory: str

    @classmethod
    def of(cls, text: str) -> Self:
        """From CONTEXT:SIDE:REQUESTS:MEMORY."""
        context, side, requests, memory = text.split(":")
        return cls(int(context), int(side), int(requests), memory)


def measure(checkpoint: str, weights: Any, cell: Cell, device: str) -> dict[str, Any]:
    """Load, fill, measure, in this process."""
    import torch

    import snugvl
    from snugvl.backends.measure import Meter
    from snugvl.backends.native.loading import load_engine
    from snugvl.core.options import LoadOptions
    from snugvl.model import Model

    began, pixels = time.perf_counter(), cell.side**2 or None
    try:
        wanted: dict[str, Any] = {"context": cell.context, "max_pixels": pixels, "memory": cell.memory}
        loaded = load_engine(LoadOptions(checkpoint, device=device, weights=weights, **wanted))
    except snugvl.DoesNotFit as error:
        return {"refused": str(error)}
    load_s = time.perf_counter() - began
    kv_bytes = loaded.backend.memory()["kv_cache"]
    on_gpu = loaded.place.device.type == "cuda"
    after_loading = torch.cuda.max_memory_reserved() if on_gpu else 0
    meter = Meter(loaded.place.device, loaded.planned, loaded.weights, kv_bytes, cap_bytes=loaded.cap_bytes)
    found = loaded.backend.capabilities
    fill(Model(loaded.backend), cell.requests, partial(picture_tokens, checkpoint))
    stats = loaded.backend.stats()
    ledger = meter.read(loaded.backend.memory(), stats)
    loaded.backend.close()
    return {
        "weights": found.weights,
        "context": found.context_tokens,
        "max_pixels": found.max_pixels,
        "planned_bytes": sum(loaded.planned.values()),
        "process_bytes": ledger.process_bytes,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "loading_peak_bytes": after_loading,
        "cap_bytes": loaded.cap_bytes,
        "faults": stats.faults,
        "rows": {row.name: [row.planned_bytes, row.measured_bytes] for row in ledger.rows},
        "subject": loaded.allocation.subject,
        "load_s": load_s,
        "fill_s": time.perf_counter() - began - load_s,
    }


def picture_tokens(checkpoint: str, side: int, max_pixels: int) -> int:
    """Of a prompt, for a picture of `side`² pixels: by the model's own rules."""
    from snugvl.checkpoint.read import facts_of

    vision = facts_of(checkpoint, offline=True).vision
    assert vision is not None, "asked of a model that sees"
    return vision.rule.tokens(side, side, max_pixels)


def fill(model: Any, requests: int, tokens_of: Callable[[int, int], int]) -> None:
    """The largest request, then the same beside streams, then batches of all sizes.

    `tokens_of`: what a picture takes of a prompt, by its side and the most pixels that it keeps.
    """
    from PIL import Image

    import snugvl

    can = model.capabilities
    side = int(can.max_pixels**0.5)
    pictures = [Image.effect_noise((side, side), 80).convert("RGB")] if can.images else []
    taken = tokens_of(side, can.max_pixels) if can.images else 0
    room = max(can.context_tokens - taken - 256, 1)
    each = -(-len(model.backend.tokenize("word " * 64).ids) // 64)  # tokens of a word
    words = "word " * (room // max(each, 1))
    model.chat(snugvl.user(*pictures, words), snugvl.SamplingParams(max_tokens=32, ignore_eos=True))
    greedy = snugvl.SamplingParams(max_tokens=96, ignore_eos=True)
    drawn = snugvl.SamplingParams(max_tokens=96, ignore_eos=True, temperature=1.0, top_p=0.9, seed=1)
    for params in (greedy, drawn):
        with ThreadPoolExecutor(requests) as pool:
            streams = [
                pool.submit(model.chat, snugvl.user(f"hello {i}"), params) for i in range(requests - 1)
            ]
            time.sleep(0.1)  # they decode before the image comes
            # Another one: it is encoded again.
            pictures = [picture.transpose(Image.Transpose.ROTATE_90) for picture in pictures]
            streams.append(pool.submit(model.chat, snugvl.user(*pictures, "hello"), params))
            for stream in streams:
                stream.result()
    for together in (size for size in (1, 2, 4, 8, 16, 32) if size <= requests):
        with ThreadPoolExecutor(together) as pool:
            list(pool.map(lambda i: model.chat(snugvl.user(f"bye {i}"), greedy), range(together)))


def run(checkpoint: str, weights: str, cell: str, device: str) -> dict[str, Any]:
    """A cell in a process of its own."""
    command = [sys.executable, __file__, checkpoint, "--weights", weights, "--cells", cell]
    row: dict[str, Any] = {"checkpoint": Path(checkpoint).name, "wished": weights, "cell": cell}
    row["memory"] = Cell.of(cell).memory
    began = time.perf_counter()
    try:
        ran = subprocess.run(
            [*command, "--device", device, "--one"],
            capture_output=True,
            text=True,
            timeout=CELL_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return row | {"failed": f"no end after {CELL_PATIENCE_S} s"}
    row["wall_s"] = time.perf_counter() - began
    if ran.returncode:
        row["failed"] = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    else:
        row |= json.loads(ran.stdout.splitlines()[-1])
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    """One cell, in a line; MiB."""
    name = f"{row['checkpoint']:<10}{row['wished']:<6}{row['cell']:<22}"
    if "rows" not in row:
        print(f"{name} {(row.get('refused') or row['failed'])[:150]}", flush=True)
        return
    planned, taken = row["planned_bytes"] / MIB, row["process_bytes"] / MIB
    good = "" if within(row) else "  BEYOND THE GOAL"
    print(
        f"{name}{row['weights']:<16}planned {planned:>8,.0f}  taken {taken:>8,.0f}  {planned - taken:>+6.0f} "
        f"{planned / taken - 1:>+7.1%}  live {live(row) / MIB:>8,.0f}  faults {row['faults']}  "
        f"{row['wall_s']:.0f} s{good}",
        flush=True,
    )


def live(row: dict[str, Any]) -> int:
    """Most bytes that tensors filled at once, with the context: what is reserved beyond was never touched."""
    context = row["rows"].get("CUDA context and libraries", (0, 0))[1] or 0
    return int(row["allocated_peak_bytes"] + context)


def within(row: dict[str, Any]) -> bool:
    """Whether a cell meets the goal."""
    over: int = row["planned_bytes"] - row["process_bytes"]
    most: float = max(GOAL_BYTES, GOAL_SHARE * row["process_bytes"])
    return -GOAL_BYTES <= over <= most


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all cells that ran: the total, and each component's planned minus measured bytes."""
    ran = [row for row in rows if "rows" in row]
    over = [row["planned_bytes"] - row["process_bytes"] for row in ran]
    parts: dict[str, list[int]] = {}
    for row in ran:
        for name, (planned, measured) in row["rows"].items():
            parts.setdefault(name, []).append((planned or 0) - (measured or 0))
    return {
        "cells": len(ran),
        "refused": sum("refused" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "within_goal": sum(within(row) for row in ran),
        "faults": sum(row["faults"] for row in ran),
        "in all": _spread(over),
        "components": {name: _spread(values) for name, values in parts.items()},
    }


def _spread(values: list[int]) -> dict[str, float]:
    return {"least": min(values), "median": median(values), "most": max(values)} if values else {}


def print_summary(found: dict[str, Any]) -> None:
    """The table of components: how far the plan lies above (+) or below (−) what was taken."""
    print(
        f"\n{found['cells']} cells ran, {found['within_goal']} within the goal; {found['refused']} refused, "
        f"{found['failed']} failed, {found['faults']} faults"
    )
    print(f"{'planned − taken, MiB':<32}{'least':>9}{'median':>9}{'most':>9}")
    for name, each in {**found["components"], "in all": found["in all"]}.items():
        if each:
            print(f"{name:<32}" + "".join(f"{each[k] / MIB:>9.1f}" for k in ("least", "median", "most")))


def main() -> None:
    """Every checkpoint in every format in every cell."""
    parser = machine.parser(__doc__)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--weights", nargs="+", default=["auto"])
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    checkpoints, weights, cells = arguments.checkpoints, arguments.weights, arguments.cells
    if arguments.one:
        print(json.dumps(measure(checkpoints[0], weights[0], Cell.of(cells[0]), arguments.device)))
        return
    began = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        every = product(checkpoints, weights, cells)
        running = [pool.submit(run, *each, arguments.device) for each in every]
        rows = [each.result() for each in running]
    found = summary(rows)
    print_summary(found)
    print(f"{time.perf_counter() - began:.0f} s with {arguments.jobs} at a time")
    machine.save("plan_vs_native_cells", {"summary": found, "results": rows}, arguments.out)


if __name__ == "__main__":
    main()
