"""How long a user waits, and what it costs: whole commands from cold, as processes of their own.

    python benchmarks/cold_start.py [--runs 5] [--out FILE] [--against TREE]

Prints the median, minimum and maximum of wall seconds, and the peak resident memory of each command. The
bytecode of modules is kept, as it is anywhere but where PYTHONDONTWRITEBYTECODE forbids it.

With `--against`, which names another checkout of the project, each command runs in both trees in turns;
printed are the medians of processor seconds, and of the pairs' ratios with their quartiles. On a busy machine
processor time says more than the clock.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

HERE = Path(__file__).parents[1]
PICTURE = str(HERE / "examples" / "images" / "shapes.png")
CARD = ["--gpu", "rtx-5060", "--os", "wsl2", "--held", "951MiB", "--offline"]
COMMANDS = {
    "snugvl --help": ["--help"],
    "snugvl plan 4B-FP8": ["plan", "Qwen/Qwen3-VL-4B-Instruct-FP8", *CARD],
    "snugvl plan": ["plan", *CARD],
    "snugvl caption IMAGE": ["caption", PICTURE],
    "snugvl ask IMAGE QUESTION": ["ask", PICTURE, "How many squares are there?"],
    "snugvl scene IMAGE": ["scene", PICTURE],
    "snugvl detect IMAGE": ["detect", PICTURE],
}


def run(arguments: list[str], tree: Path = HERE) -> tuple[float, int, float]:
    """One run: wall seconds, peak resident bytes, processor seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "snugvl", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(tree / "src")},
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{arguments}: exit code {process.returncode}\n{errors.decode()}")
    return seconds, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def compare(other: Path, runs: int) -> None:
    """Print each command's processor time in another tree and in this one, in turns."""
    print(f"{'command':<28}{'there s':>9}{'here s':>9}{'ratio':>8}  quartiles")
    for name, command in COMMANDS.items():
        run(command, other), run(command)
        pairs = [(run(command, other)[2], run(command)[2]) for _ in range(runs)]
        there, here = (median(values) for values in zip(*pairs, strict=True))
        low, middle, high = quantiles((after / before for before, after in pairs), n=4)
        print(f"{name:<28}{there:>9.3f}{here:>9.3f}{middle:>8.2f}  {low:.2f} to {high:.2f}")


def main() -> None:
    """Measure each command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path, metavar="TREE")
    arguments = parser.parse_args()
    if arguments.against is not None:
        compare(arguments.against.resolve(), arguments.runs)
        return
    print(f"{'command':<28}{'median s':>9}{'min':>7}{'max':>7}{'peak RSS MiB':>14}")
    results = {}
    for name, command in COMMANDS.items():
        run(command)  # warms the page cache; "cold" means a new process, not a new disk
        runs = [run(command) for _ in range(arguments.runs)]
        seconds, peak = [value for value, *_ in runs], max(value for _, value, _ in runs)
        print(
            f"{name:<28}{median(seconds):>9.2f}{min(seconds):>7.2f}{max(seconds):>7.2f}{peak / 2**20:>14.0f}"
        )
        results[name] = {"seconds": seconds, "peak_rss_bytes": peak}
    # Imported last: it loads torch, and a child's peak is never below that of the process that starts it.
    import machine

    print(machine.describe())
    machine.save("cold_start", {"commands": results}, arguments.out)


if __name__ == "__main__":
    main()
