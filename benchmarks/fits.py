"""The smallest card that serves: free memory in steps of 64 MiB, process context included, over HTTP.

    python benchmarks/fits.py 2b-fp8=/ck/2b-fp8:fp8:3.2:3.9 … [--out FILE]

Each argument is NAME=FOLDER:WEIGHTS:LOW:HIGH in GiB. A ballast process (`ballast.py`) holds the rest of the
card; a size counts when `snugvl serve` starts there with a context of 2,048 tokens and answers a 1024×1024
picture with 128 tokens. Bisected; the largest size that failed is printed with what the server said.

    --roomy    context 4,096 and a 4032×3024 photo at 7,200 MiB instead
"""

import argparse
from pathlib import Path
from typing import Any

import machine
from ballast import MIB, Ballast
from gpu_serving import Peak, Server, picture, question

STEP = 64


def attempt(folder: Path, weights: str, free_mib: int, *, roomy: bool) -> dict[str, Any]:
    """Start, ask once, stop."""
    size = (4032, 3024) if roomy else (1024, 1024)
    options = ["--weights", weights, "--context", "4096" if roomy else "2048"]
    options += [] if roomy else ["--max-pixels", str(1024 * 1024)]
    with Ballast(free_mib) as ballast:
        peak = Peak()
        with Server(folder, options) as server:
            row: dict[str, Any] = {"free_bytes": ballast.free_bytes, "ready_s": server.ready_s}
            if not server.ready:
                row["refused"] = server.refusal
            else:
                row |= server.ask(question(picture(*size, 1), 128))
                row["memory"] = server.memory()
        row["peak_bytes"] = peak.close()
    row["served"] = "ttft_s" in row
    return row


def smallest(folder: Path, weights: str, low: int, high: int) -> list[dict[str, Any]]:
    """Every attempt of a bisection between `low` (fails) and `high` (serves), MiB."""
    rows = []
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        middle = middle if middle > low else low + STEP
        row = {"free_mib": middle, **attempt(folder, weights, middle, roomy=False)}
        rows.append(row)
        print(f"    {middle:,} MiB: {'served' if row['served'] else row.get('refused') or row.get('error')}")
        low, high = (low, middle) if row["served"] else (middle, high)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--roomy", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    for model in arguments.models:
        name, _, rest = model.partition("=")
        folder, weights, low, high = rest.split(":")
        print(name, flush=True)
        if arguments.roomy:
            row = attempt(Path(folder), weights, 7200, roomy=True)
            results[name] = [row]
            said = row.get("refused") or row.get("error") or f"{row.get('usage')}"
            print(f"    7,200 MiB: {said}; peak {row['peak_bytes'] / MIB:,.0f} MiB")
            continue
        rows = smallest(Path(folder), weights, int(float(low) * 1024), int(float(high) * 1024))
        results[name] = rows
        served = [row for row in rows if row["served"]]
        if served:
            best = min(served, key=lambda row: row["free_mib"])
            print(
                f"  {name}: {best['free_mib']:,} MiB = {best['free_mib'] / 1024:.2f} GiB "
                f"(peak {best['peak_bytes'] / MIB:,.0f} MiB, ready {best['ready_s']:.1f} s, "
                f"first token {best['ttft_s'] * 1000:.0f} ms, {best['tokens_s']:.0f} tokens/s)",
                flush=True,
            )
    machine.save("fits_roomy" if arguments.roomy else "fits", {"results": results}, arguments.out)


if __name__ == "__main__":
    main()
