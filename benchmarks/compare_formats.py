"""`snugvl compare` in a part of a card: seconds, and peak memory beside its plan.

    python benchmarks/compare_formats.py /ck/8b-bf16 [--weights int4] [--free-mib 7200] [--pictures 10]
    python benchmarks/compare_formats.py src/snugvl/pocket --device cpu --pictures 2      # without a GPU

A ballast process (`ballast.py`) holds the rest of the card. The peak is the driver's, of the whole command
with its context; beside each stage's plan stands what torch held, which the context isn't part of. Main
memory's peak is that of the process. Random weights answer nonsense, so their KL says nothing; time and
memory don't depend on the values. `warm`: the page cache has room for the files, and may have had them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

import machine
from ballast import MIB, Ballast
from serving import gpu_peak_bytes
from snugvl.bench.measure import GpuWatch
from snugvl.checkpoint.safetensors import weight_files


def draw(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Random fields of colour, the same every time: pocket refuses what looks like a photograph."""
    generator = np.random.default_rng(0)
    for number in range(count):
        colours = Image.fromarray(generator.integers(0, 256, (3, 3, 3), dtype=np.uint8))
        colours.resize(size, Image.Resampling.NEAREST).save(folder / f"{number:02}.png")


def compare(given: argparse.Namespace, pictures: Path, free_bytes: int | None) -> dict[str, Any]:
    """Run the command; what it says of itself, and what was seen of it."""
    command = [sys.executable, "-m", "snugvl", "compare", str(given.folder), str(pictures), "--json"]
    command += ["--weights", given.weights, "--passes", str(given.passes), "--device", given.device]
    command += ["--max-tokens", str(given.max_tokens)]
    if given.device == "cpu":
        command += ["--memory", f"{given.free_mib}MiB"]  # there is no ballast
    if given.max_pixels:
        command += ["--max-pixels", str(given.max_pixels)]
    with GpuWatch() as watch:
        began = time.monotonic()
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        seconds = time.monotonic() - began
        peak = gpu_peak_bytes(watch)
    if ran.returncode:
        sys.exit(f"snugvl compare ended with {ran.returncode}")
    records = [json.loads(line) for line in ran.stdout.splitlines()]
    return {
        "free_bytes": free_bytes,
        "seconds": seconds,
        "gpu_peak_bytes": peak,
        "main_memory_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "run": records[-1]["run"],
        "summaries": [record for record in records if "summary" in record],
        "tokens": [record["result"]["tokens"] for record in records if "result" in record],
    }


def show(found: dict[str, Any], files_bytes: int) -> None:
    """A table of the stages, and the whole."""
    print(f"\n{'stage':<14}{'planned, MiB':>14}{'torch held, MiB':>17}")
    for row in found["run"]["memory"]:
        planned, held = row["planned_bytes"] / MIB, row["held_bytes"] / MIB
        print(f"{row['stage']:<14}{planned:>14,.0f}{held:>17,.0f}")
    for each in found["summaries"]:
        summary = each["summary"]
        print(f"{each['variant']}: {summary['answers']} answers, {summary['tokens']} tokens, ", end="")
        print(f"KL {summary['kl']:.5f}, likeliest token {summary['likeliest']:.2%}")
    peak = found["gpu_peak_bytes"]
    shown = "no GPU" if peak is None else f"{peak / MIB:,.0f} MiB of the GPU"
    print(
        f"{found['seconds']:.1f} s in all ({found['run']['seconds']:.1f} s of work), {shown}, "
        f"{found['main_memory_peak_bytes'] / MIB:,.0f} MiB of main memory; "
        f"files of {files_bytes / 2**30:.1f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--free-mib", type=int, default=7200)
    parser.add_argument("--pictures", type=int, default=10)
    parser.add_argument("--size", default="2016x1512", help="of the pictures")
    parser.add_argument("--max-pixels", type=int)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    width, _, height = given.size.partition("x")
    files_bytes = sum(path.stat().st_size for path in weight_files(given.folder))
    os.environ.setdefault("PYTHONPATH", str(Path(machine.__file__).parents[1] / "src"))
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), given.pictures, (int(width), int(height)))
        with Ballast(given.free_mib, given.device) as ballast:
            free_bytes = ballast.free_bytes if given.device == "cuda" else None
            found = compare(given, Path(folder), free_bytes)
    show(found, files_bytes)
    said = {name: str(value) for name, value in vars(given).items() if name != "out"}
    cached = psutil.virtual_memory().available > files_bytes
    found |= {"asked": said, "warm": cached, "files_bytes": files_bytes}
    machine.save("h200/compare_formats", found, given.out)


if __name__ == "__main__":
    main()
