"""How long streams stand still for kernels and CUDA graphs, on a machine that never ran the model before.

    python benchmarks/pauses.py MODEL [--ahead none kernels graphs] [--settled] [--out FILE] [-- OPTIONS]

For each value of SNUGVL_AHEAD a server starts with an empty folder for compiled kernels, and is asked a mix:
texts of 10 to 1,500 tokens and pictures of several sizes, from few clients and from many. Printed is what
requests felt, what was compiled or recorded meanwhile, and what the server's log says of it. With `--settled`
the requests come when the server has nothing left to do ahead; else as soon as it takes them. OPTIONS are
those of `snugvl serve`.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from machine import save
from serving import NAME, Served, serve
from snugvl.bench.load import Level, Record, read
from snugvl.bench.workload import Manner, Workload, body

PICTURES = ((256, 256), (512, 384), (768, 768), (1024, 1024), (1280, 720))
CLIENTS = (1, 3, 8, 16, 32)
FELT_S = 0.25  # a stream that stands still for longer is listed
QUIET_S = 5.0  # without a line in the log: nothing is left to do ahead
SETTLED_S = 180.0
SNAPSHOT_S = 1.0  # until /memory knows of the last request
COUNTERS = ("kernel_compilations", "graph_captures")
LINES = ("compiled", "captured the CUDA graph")


def mix(count: int, seed: int) -> list[bytes]:
    """Requests, half of them with a picture, no two alike."""
    dice = random.Random(seed)
    made = []
    for index in range(count):
        image = dice.choice(PICTURES) if index % 2 else None
        tokens = None if image else int(10 * 150 ** dice.random())
        made.append(
            body(Workload(image, tokens, dice.randrange(16, 64), False, seed), Manner(NAME), seed + index)
        )
    return made


async def ask(base: str, bodies: list[bytes], clients: int) -> list[Record]:
    """All of them from so many clients."""
    async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
        level = Level(http, f"{base}/v1/chat/completions")
        await level.run(bodies, clients)
    return [read(exchange) for exchange in level.done]


def settle(server: Served) -> float:
    """Seconds until the log has been quiet for a while."""
    begun = changed = time.monotonic()
    count = 0
    while time.monotonic() - changed < QUIET_S or not _compiled(server.log()):
        now = len(server.log())
        if now != count:
            count, changed = now, time.monotonic()
        if time.monotonic() - begun > SETTLED_S:
            break
        time.sleep(0.1)
    return changed - begun


def _compiled(log: list[str]) -> bool:
    return any("kernels are compiled" in line for line in log)


def level_of(server: Served, clients: int, seed: int) -> dict[str, Any]:
    """One level: what its requests felt."""
    before = server.get("/memory")["load"]
    records = asyncio.run(ask(server.url, mix(max(4, 2 * clients), seed), clients))
    time.sleep(SNAPSHOT_S)
    after = server.get("/memory")["load"]
    firsts = sorted(record.first_token_s for record in records if record.first_token_s is not None)
    gaps = sorted(gap for record in records for gap in record.gaps_s)
    return {
        "clients": clients,
        "failed": [record.message or record.error for record in records if record.error is not None],
        "first_token_median_s": firsts[len(firsts) // 2],
        "first_token_most_s": firsts[-1],
        "gap_most_s": gaps[-1],
        "gaps_felt": sum(gap > FELT_S for gap in gaps),
        **{name: after[name] - before[name] for name in COUNTERS},
    }


def measure(arguments: argparse.Namespace, ahead: str) -> dict[str, Any]:
    """A server on a machine that has compiled nothing."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": folder, "SNUGVL_AHEAD": ahead}
        with serve(arguments.model, arguments.options, quiet=False) as server:
            settled = settle(server) if arguments.settled and ahead != "none" else None
            levels = [level_of(server, clients, 1000 * clients) for clients in CLIENTS]
            log = [line for line in server.log() if any(word in line for word in LINES)]
            return {
                "ahead": ahead,
                "ready_s": server.ready_s,
                "settled_s": settled,
                "levels": levels,
                "log": log,
            }


def show(found: dict[str, Any]) -> None:
    """One server, a line a level."""
    settled = "" if found["settled_s"] is None else f", nothing left to do after {found['settled_s']:.0f} s"
    print(f"\nSNUGVL_AHEAD={found['ahead']}: ready after {found['ready_s']:.1f} s{settled}")
    print(
        "clients  first token: median  most   longest gap  gaps > 0.25 s  kernels compiled  graphs recorded"
    )
    for level in found["levels"]:
        first, most = level["first_token_median_s"], level["first_token_most_s"]
        print(
            f"{level['clients']:>7}{first:>20.2f} s{most:>6.2f} s{level['gap_most_s']:>11.2f} s"
            f"{level['gaps_felt']:>15}{level['kernel_compilations']:>18}{level['graph_captures']:>17}"
        )
        if level["failed"]:
            print(f"        {len(level['failed'])} FAILED: {level['failed'][0]}")
    print("\n".join(found["log"]))


def main() -> None:
    """Measure each value."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--ahead", nargs="+", default=["none", "kernels"])
    parser.add_argument("--settled", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments, options = parser.parse_known_args()
    arguments.options = [option for option in options if option != "--"]
    results = []
    for ahead in arguments.ahead:
        results.append(measure(arguments, ahead))
        show(results[-1])
    save("pauses", {"model": arguments.model, "servers": results}, arguments.out)


if __name__ == "__main__":
    main()
