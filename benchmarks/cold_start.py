"""How long a user waits, and what it costs: whole commands from cold, as processes of their own.

    python benchmarks/cold_start.py [--runs 5] [--out FILE]

Prints the median, minimum and maximum of wall seconds, and the peak resident memory of each command. The
bytecode of modules is kept, as it is anywhere but where PYTHONDONTWRITEBYTECODE forbids it.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

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


def run(arguments: list[str]) -> tuple[float, int]:
    """One run: wall seconds, peak resident bytes."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "snugvl", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(HERE / "src")},
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{arguments}: exit code {process.returncode}\n{errors.decode()}")
    return seconds, usage.ru_maxrss * 1024


def main() -> None:
    """Measure each command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(f"{'command':<28}{'median s':>9}{'min':>7}{'max':>7}{'peak RSS MiB':>14}")
    results = {}
    for name, command in COMMANDS.items():
        run(command)  # warms the page cache; "cold" means a new process, not a new disk
        runs = [run(command) for _ in range(arguments.runs)]
        seconds, peak = [value for value, _ in runs], max(value for _, value in runs)
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
