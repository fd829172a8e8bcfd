"""From the start of `snugvl serve` to the first token over HTTP, and where the time goes.

    python benchmarks/start_timeline.py FOLDER [--weights fp8] [--runs 5] [--first 3] [--out FILE]
    python benchmarks/start_timeline.py pocket --device cpu                   # without a GPU

What the engine's process reached (`start` of `/memory`, by its own clock), when a client sees the server
answer at all and be ready (`/health`), then the first token of an answer about a 1024×1024 picture, in
seconds since the command was started. Weights are in the page cache: the first start is not counted.

`--first`: so often all of this again, each time in new folders, where no kernel is compiled and nothing kept.
The first start of all may read torch from the disk.
"""

import os
from contextlib import nullcontext
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import machine
from serving import question, serve


def once(model: str, options: list[str], asked: bytes) -> dict[str, float]:
    """One start: seconds at which each thing was reached."""
    with serve(model, options) as server:
        first = server.first_token_s(asked)
        seen = {"HTTP answers": server.stages[0][0]} if server.stages else {}
        return server.steps() | seen | {"ready over HTTP": server.ready_s, "first token": first}


def timeline(runs: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Median, least and most of every stage, in order; `seen`: runs that were not too fast for it."""
    names = dict.fromkeys(name for run in runs for name in run)
    rows = []
    for name in names:
        values = [run[name] for run in runs if name in run]
        rows.append(
            {"stage": name, "median_s": median(values), "least_s": min(values), "most_s": max(values)}
            | {"seen": len(values)}
        )
    return sorted(rows, key=lambda row: float(row["median_s"]))


def show(name: str, runs: list[dict[str, float]]) -> None:
    """The first start in a line, then what the later ones reached."""
    first, later = runs[0], runs[1:]
    ready, token = first["ready over HTTP"], first["first token"]
    print(f"{name}: the first start ready after {ready:.1f} s, its first token after {token:.1f} s")
    what = f"s since the process started, of {len(later)} later ones"
    print(f"{what:<52}{'median':>8}{'least':>8}{'most':>8}")
    for row in timeline(later):
        print(f"{row['stage']:<52}{row['median_s']:>8.2f}{row['least_s']:>8.2f}{row['most_s']:>8.2f}")


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="first starts, in new folders")
    arguments = parser.parse_args()
    # Where this is set, every start compiles our sources anew; installed packages are compiled once.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["--weights", arguments.weights, "--device", arguments.device, "--context", "4096"]
    asked = question((1024, 1024), 2)
    found = []
    for _ in range(max(arguments.first, 1)):
        with TemporaryDirectory() if arguments.first else nullcontext() as folder:
            if folder is not None:
                os.environ |= {"TRITON_CACHE_DIR": f"{folder}/kernels", "XDG_CACHE_HOME": f"{folder}/cache"}
            runs = [once(arguments.model, options, asked) for _ in range(arguments.runs + 1)]
        found.append({"stages": timeline(runs[1:]), "runs": runs})
        show(f"{arguments.model} {arguments.weights}", runs)
    machine.save("start_timeline", {"model": arguments.model, "starts": found}, arguments.out)


if __name__ == "__main__":
    main()
