"""What a closed model leaves in its process: rounds of load, ask, close, for several models in turn.

    python benchmarks/close.py MODEL [MODEL …] [--rounds 10] [--memory 20GiB] [--out FILE]

Nothing here helps: no garbage is collected for it, no cache of torch's emptied, and the closed model is still
referred to when memory is read, a moment after the end of its `with`. A round asks until CUDA graphs are
captured, once with a grammar. On a GPU a row says what the driver counts for this process, what torch has
reserved and allocated, and page-locked memory; everywhere host memory, threads and open files.

`--interrupt` adds a load that ends at half of its weights (Ctrl+C) to each round.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import machine
import snugvl
from snugvl.backends.measure import process_reader

PICTURE = Path(__file__).parents[1] / "examples" / "images" / "shapes.png"
LATER_S = 0.3
ASKED = 3  # times the same: graphs are captured of what comes again
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """What this process holds, in bytes where it says nothing else. None: nobody can tell."""

    what: str
    process: int | None
    reserved: int
    allocated: int
    page_locked: int
    rss: int
    threads: int
    files: int


def look(what: str, device: torch.device) -> Row:
    """Memory now."""
    this = psutil.Process()
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    pinned = torch.cuda.host_memory_stats() if on_gpu else {}
    return Row(
        what,
        process_reader(device)() if on_gpu else None,
        torch.cuda.memory_reserved(device) if on_gpu else 0,
        torch.cuda.memory_allocated(device) if on_gpu else 0,
        # The name varies with torch's version.
        max(pinned.get(f"{each}_bytes.current", 0) for each in ("segment", "allocated", "reserved")),
        this.memory_info().rss,
        this.num_threads(),
        this.num_fds(),
    )


def say(row: Row) -> None:
    """One line of the table."""
    process = "" if row.process is None else f"{row.process / MIB:,.1f}"
    print(
        f"{row.what:<34}{process:>12}{row.reserved / MIB:>12,.1f}{row.allocated / MIB:>12,.2f}"
        f"{row.page_locked / MIB:>12,.1f}{row.rss / MIB:>10,.1f}{row.threads:>9}{row.files:>7}",
        flush=True,
    )


def ask(model: snugvl.Model) -> None:
    """Until graphs are there; once with a grammar."""
    for _ in range(ASKED):
        model.ask(PICTURE, "How many shapes are there?", sampling=snugvl.SamplingParams(max_tokens=16))
    prompt = snugvl.user("Name a colour.")
    grammar = snugvl.SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7, seed=1)
    model.chat(prompt, grammar)
    with suppress(snugvl.OutputError):  # random weights see no scene
        model.scene(PICTURE, sampling=snugvl.SamplingParams(max_tokens=64))


def interrupted(name: str, options: dict[str, Any]) -> None:
    """A load that somebody ends when half of the weights are there."""

    def progress(_: str, done: float) -> None:
        if done > 0.5:
            raise KeyboardInterrupt

    try:
        snugvl.load(name, progress=progress, **options)
    except KeyboardInterrupt:
        return
    raise AssertionError("nothing was interrupted")


def rounds(arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """What is left after each close."""
    options = {"device": str(device), "memory": arguments.memory}
    for number in range(1, arguments.rounds + 1):
        for name in arguments.models:
            short = Path(name).name
            with snugvl.load(name, **options) as model:
                ask(model)
                say(look(f"{number} {short}, open", device))
            time.sleep(LATER_S)
            yield look(f"{number} {short}, closed", device)
            if arguments.interrupt:
                interrupted(name, options)
                time.sleep(LATER_S)
                yield look(f"{number} {short}, interrupted", device)


def main() -> None:
    """Go round, and print a table."""
    parser = machine.parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--memory", help="most that each may take, such as 20GiB")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--interrupt", action="store_true", help="end a load half way in each round, too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(f"{'MiB':<34}{'process':>12}{'reserved':>12}{'allocated':>12}{'page-locked':>12}{'RSS':>10}"
          f"{'threads':>9}{'files':>7}")  # fmt: skip
    rows: list[Row] = []
    for row in rounds(arguments, device):
        rows.append(row)
        say(row)
    last, turn = rows[-1], len(arguments.models) * (1 + arguments.interrupt)
    first = rows[min(turn, len(rows)) - 1]
    grown = {name: getattr(last, name) - getattr(first, name) for name in ("rss", "threads", "files")}
    if last.process is not None and first.process is not None:
        grown["process"] = last.process - first.process
    print(f"\nfrom the end of round 1 to the last: {grown}; torch still holds {last.reserved:,} bytes")
    values = {"models": [Path(name).name for name in arguments.models], "memory": arguments.memory}
    machine.save("close", {**values, "grown": grown, "rows": [asdict(row) for row in rows]}, arguments.out)
    sys.exit(int(last.reserved > 0 or grown.get("process", 0) > 0))


if __name__ == "__main__":
    main()
