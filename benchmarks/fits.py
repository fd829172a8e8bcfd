"""The smallest card that serves: free memory in steps of 64 MiB, process context included, over HTTP.

    python benchmarks/fits.py 2b-fp8=/ck/2b-fp8:fp8:3.2:3.9 … [--out FILE]
    python benchmarks/fits.py pocket=pocket:auto:0.3:0.8 --device cpu         # the same without a GPU

Each argument is NAME=FOLDER:WEIGHTS:LOW:HIGH in GiB. A ballast process (`ballast.py`) holds the rest of the
card; a size counts when `snugvl serve` starts there with a context of 2,048 tokens and answers a 1024×1024
picture with 128 tokens. Bisected between LOW, which should fail, and HIGH, which is tried first.

    --roomy    context 4,096 and a 4032×3024 photo at 7,200 MiB instead: one attempt a model
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import machine
from ballast import MIB, Ballast, Device
from serving import gpu_peak_bytes, question, serve
from snugvl.bench.measure import GpuWatch
from snugvl.errors import SnugvlError

STEP = 64
ROOMY_MIB = 7200
TOKENS = 128


def attempt(model: str, weights: str, free_mib: int, device: Device, *, roomy: bool) -> dict[str, Any]:
    """Start, ask once, stop."""
    size = (4032, 3024) if roomy else (1024, 1024)
    options = ["--weights", weights, "--context", "4096" if roomy else "2048", "--device", device]
    options += [] if roomy else ["--max-pixels", str(1024 * 1024)]
    options += ["--memory", f"{free_mib}MiB"] if device == "cpu" else []
    with Ballast(free_mib, device) as ballast, GpuWatch() as watch:
        row: dict[str, Any] = {"free_mib": free_mib, "free_bytes": ballast.free_bytes, "served": False}
        try:
            with serve(model, options) as server:
                record = server.ask(question(size, TOKENS))
                answer = asdict(record) | {"first_token_s": record.first_token_s}
                answer["tokens_per_s"] = record.decode_tokens_per_s
                row |= {"ready_s": server.ready_s, "answer": answer, "memory": server.memory()}
                row["served"] = record.error is None and record.output_tokens == TOKENS
                row["said"] = record.message
        except SnugvlError as error:
            row["said"] = str(error)
        row["peak_bytes"] = gpu_peak_bytes(watch)
    return row


def smallest(low: int, high: int, tried: Callable[[int], bool]) -> int | None:
    """The least multiple of `STEP` above `low`, up to `high`, that serves; None: not even `high` does.

    Bisected: more memory is taken to serve wherever less does.
    """
    high = -(-high // STEP) * STEP
    if not tried(high):
        return None
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        middle = middle if middle > low else low + STEP
        low, high = (low, middle) if tried(middle) else (middle, high)
    return high


def show(row: dict[str, Any]) -> None:
    """One attempt, in a line."""
    if not row["served"]:
        print(f"    {row['free_mib']:,} MiB: refused: {(row['said'] or 'a short answer')[:300]}", flush=True)
        return
    answer, peak = row["answer"], row["peak_bytes"]
    shown = f"{peak / MIB:,.0f} MiB" if peak is not None else "no GPU"
    print(
        f"    {row['free_mib']:,} MiB: served; peak {shown}, ready {row['ready_s']:.1f} s, first token "
        f"{answer['first_token_s'] * 1000:.0f} ms, {answer['tokens_per_s']:.0f} tokens/s",
        flush=True,
    )


def measure(argument: str, device: Device, *, roomy: bool) -> tuple[str, dict[str, Any]]:
    """All attempts of one model."""
    name, _, rest = argument.partition("=")
    model, weights, low, high = rest.split(":")
    print(name, flush=True)
    rows: list[dict[str, Any]] = []

    def tried(free_mib: int) -> bool:
        rows.append(attempt(model, weights, free_mib, device, roomy=roomy))
        show(rows[-1])
        return bool(rows[-1]["served"])

    if roomy:
        best = ROOMY_MIB if tried(ROOMY_MIB) else None
    else:
        best = smallest(int(float(low) * 1024), int(float(high) * 1024), tried)
    return name, {"smallest_mib": best, "attempts": rows}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--roomy", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    found = [measure(model, arguments.device, roomy=arguments.roomy) for model in arguments.models]
    results = dict(found)
    print(f"\n{'':<14}{'MiB':>8}{'GiB':>8}")
    for name, result in results.items():
        best = result["smallest_mib"]
        print(f"{name:<14}{best:>8,}{best / 1024:>8.2f}" if best else f"{name:<14}       –  not served")
    machine.save("fits_roomy" if arguments.roomy else "fits", {"results": results}, arguments.out)


if __name__ == "__main__":
    main()
