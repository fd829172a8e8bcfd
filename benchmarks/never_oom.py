"""Thousands of requests of hostile sizes on a small card, while another process grows by 500 MiB.

    python benchmarks/never_oom.py NAME=FOLDER:WEIGHTS … [--runs 3] [--requests 2000] [--out FILE]
    python benchmarks/never_oom.py NAME=FOLDER:WEIGHTS --unseen 150
    python benchmarks/never_oom.py pocket=pocket:auto --device cpu --free-mib 900 --requests 60

A ballast leaves the card `--free-mib`, beside a neighbour's empty context; `snugvl serve` plans for that.
Each model is served twice: "cold", as on a machine's first start, with cache folders that are new and empty,
and then "warm", with what that start left in them. One server takes all runs of its life. With `--unseen MIB`
both lives are on a card whose driver takes so much more than any that we know, and a little more while it
runs; with `--untold` the engine isn't told what its process holds, as under WSL2 (`unseen_card/` of the
tests does both). Sixteen clients send what `hostile.py` draws, other requests in each run. After 40 % of them
the neighbour takes 500 MiB more, as far as they can be had within five seconds, and after 80 % it gives them
back. A run has passed
when all of it was asked in time, every answer is a complete one or a clean refusal (4xx, or 503 with Retry-
After), the neighbour got its 500 MiB, the engine never restarted, its process stayed below its cap (NVML,
every 10 ms), and its KV cache is whole again. With `--device cpu` all of it runs without a GPU; the server is
then told `--memory`, and nobody is fed.

The first lines say what the driver takes in the engine's process beside torch's memory, and how that grows.
"""

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx

import machine
from ballast import MIB, Ballast, Device, Neighbour
from driver_bytes import DRIVER, DriverTrace, ProcessPeak
from hostile import Load
from serving import Served, gpu_peak_bytes, serve
from snugvl.bench.measure import GpuWatch, LedgerWatch
from snugvl.errors import SnugvlError

GROWTH_MIB = 500
GROWS, LEAVES = 0.4, 0.8  # of all requests
LIVES: Final = ("cold", "warm")
UNSEEN: Final = Path(__file__).parents[1] / "tests" / "backends" / "native" / "unseen_card"
COMES_BACK_S = 25.0  # the engine waits for ten seconds whether the room lasts


class Beside:
    """What happens beside the requests: the neighbour comes and goes, ledger and driver are watched."""

    def __init__(self, neighbour: Neighbour) -> None:
        self._neighbour = neighbour
        self.trace = DriverTrace()
        self.grew_mib, self.grew_s = 0, 0.0
        self.blocks: dict[str, int] = {}  # before, while and after the neighbour was there
        self.ledger: Any = None

    async def __call__(self, load: Load) -> None:
        async with httpx.AsyncClient(base_url=load.url, timeout=60, trust_env=False) as http:
            watch = LedgerWatch(http, "/memory")
            watching = [asyncio.create_task(watch.watch())]
            watching.append(asyncio.create_task(self.trace.watch(load.url, load)))
            await load.until(GROWS)
            self.blocks["before"] = await _blocks(http)
            begun = time.perf_counter()
            self.grew_mib = await asyncio.to_thread(self._neighbour.grow, GROWTH_MIB)
            self.grew_s = time.perf_counter() - begun
            await load.until(LEAVES)
            self.blocks["beside"] = await _blocks(http)
            await asyncio.to_thread(self._neighbour.leave)
            await load.until(1.0)
            for task in watching:
                task.cancel()
            await watch.look()
            self.ledger = watch.take()


async def _blocks(http: httpx.AsyncClient) -> int:
    load: dict[str, int] = (await http.get("/memory")).json()["load"]
    return load["num_blocks"]


def soak(
    server: Served, neighbour: Neighbour, peak: ProcessPeak, requests: int, limit_s: float, seed: int
) -> dict[str, Any]:
    """One run against a server that runs."""
    load, beside = Load(server.url, requests, limit_s, seed), Beside(neighbour)
    begun = time.perf_counter()
    peak.take()
    asyncio.run(load.run(beside))
    seconds = time.perf_counter() - begun
    came_back_s = came_back(server)
    memory, ledger = server.memory(), beside.ledger
    return {
        "asked": requests,
        "requests": load.sent,
        "seconds": seconds,
        "outcomes": dict(load.outcomes.most_common()),
        "wrong": load.wrong,
        "neighbour_grew_mib": beside.grew_mib,
        "neighbour_took_s": beside.grew_s,
        "kv_blocks": beside.blocks | {"after": memory["load"]["num_blocks"]},
        "kv_came_back_s": came_back_s,
        "process_peak_bytes": max(ledger.process_bytes, peak.take() or 0),
        "cap_bytes": ledger.cap_bytes,
        "least_free_bytes": ledger.free_bytes,
        "driver": {str(n): beside.trace.at(n) for n in (0, 200, requests)},
        "driver_largest_step_bytes": beside.trace.largest_step,
        "restarts": memory["health"]["restarts"],
        "memory": memory,
    }


def came_back(server: Served) -> float | None:
    """Seconds until the KV cache has all of its blocks again; None: not in time."""
    begun = time.perf_counter()
    while (passed_s := time.perf_counter() - begun) < COMES_BACK_S:
        load = server.memory()["load"]
        if load["num_blocks"] >= load["planned_blocks"]:
            return passed_s
        time.sleep(0.2)
    return None


def failures(result: dict[str, Any]) -> list[str]:
    """What went wrong. Nothing: clean refusals, nothing over the cap, a fed neighbour, a whole cache."""
    over = 0 if result["cap_bytes"] is None else result["process_peak_bytes"] - result["cap_bytes"]
    got = result["neighbour_grew_mib"]
    found = {
        f"{len(result['wrong'])} wrong answers": bool(result["wrong"]),
        f"{result['restarts']} restarts": bool(result["restarts"]),
        f"its process peaked {over / 1024:,.0f} KiB above its cap": over > 0,
        f"the neighbour got {got} of {GROWTH_MIB} MiB": result["cap_bytes"] is not None and got < GROWTH_MIB,
        "its KV cache didn't become whole again": result["kv_came_back_s"] is None,
        "nothing was answered": not result["outcomes"].get("answered", 0),
        f"{result['requests']} of {result['asked']} requests in time": result["requests"] < result["asked"],
    }
    return [what for what, so in found.items() if so]


def show(result: dict[str, Any]) -> None:
    """For people."""
    print(f"  {result['requests']:,} requests in {result['seconds']:.0f} s")
    for outcome, count in result["outcomes"].items():
        print(f"    {outcome:<44}{count:>6,}")
    cap = "–" if result["cap_bytes"] is None else f"{result['cap_bytes'] / MIB:,.2f}"
    print(
        f"    engine's process, peak MiB {result['process_peak_bytes'] / MIB:,.2f} of its cap {cap}; ", end=""
    )
    card = result["card_peak_bytes"]
    print(f"all processes {card / MIB:,.0f} of {result['free_bytes'] / MIB:,.0f}" if card else "no GPU")
    blocks, load = result["kv_blocks"], result["memory"]["load"]
    print(
        f"    KV blocks {blocks['before']}, beside the neighbour {blocks['beside']}, then {blocks['after']}; "
        f"steps that ran out of memory so far {load['shortages']}"
    )
    print(
        f"    the neighbour grew by {result['neighbour_grew_mib']} of {GROWTH_MIB} MiB in "
        f"{result['neighbour_took_s']:.1f} s, least free {result['least_free_bytes'] / MIB:,.0f} MiB"
    )
    held = ", ".join(f"{n}: {each / MIB:,.1f}" for n, each in result["driver"].items() if each)
    step = result["driver_largest_step_bytes"] / MIB
    print(f"    the driver's own MiB after so many requests: {held or 'unknown'}; largest step {step:.1f}")
    print(f"    FAILED: {', '.join(why)}" if (why := failures(result)) else "    PASSED", flush=True)
    print(*(f"      {line}" for line in result["wrong"][:5]), sep="\n")


def variables(folder: str, unseen_mib: int, *, untold: bool) -> dict[str, str]:
    """Those of a life whose caches are in `folder`, on a card whose driver takes `unseen_mib` more.

    `untold`: NVML doesn't say what a process holds.
    """
    path = os.pathsep.join(filter(None, (str(UNSEEN), os.environ.get("PYTHONPATH"))))
    found = {"XDG_CACHE_HOME": f"{folder}/cache", "TRITON_CACHE_DIR": f"{folder}/triton", "PYTHONPATH": path}
    return found | {"SNUGVL_UNSEEN_MIB": str(unseen_mib), "SNUGVL_UNTOLD": "1" if untold else ""}


def measure(argument: str, life: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """All runs of one life of a model's server."""
    name, _, rest = argument.partition("=")
    model, _, weights = rest.rpartition(":")
    device: Device = chosen.device
    options = ["--weights", weights, "--context", str(chosen.context), "--device", device]
    options += ["--memory", f"{chosen.free_mib}MiB"] if device == "cpu" else []
    options += shlex.split(chosen.serve)
    runs: list[dict[str, Any]] = []
    with (
        Neighbour(device) as neighbour,
        Ballast(chosen.free_mib, device) as ballast,
        GpuWatch() as watch,
        serve(model, options) as server,
        ProcessPeak((neighbour.pid, ballast.pid)) as peak,
    ):
        told = server.memory()
        rows = {row["name"]: row for row in told["ledger"]["rows"]}
        plan = ", ".join(f"{row} {(each['planned_bytes'] or 0) / MIB:,.1f}" for row, each in rows.items())
        print(f"\n{name}, {life}: ready in {server.ready_s:.1f} s; planned MiB: {plan}", flush=True)
        if changed := (told["plan"] or {}).get("changed"):
            print(f"  {changed}", flush=True)
        for run in range(chosen.runs):
            result = soak(server, neighbour, peak, chosen.requests, chosen.limit_s, chosen.seed + run)
            result |= {"free_bytes": ballast.free_bytes, "card_peak_bytes": gpu_peak_bytes(watch)}
            runs.append(result)
            show(result)
    return {"name": name, "life": life, "weights": weights, "at_start": told, "runs": runs}


def table(results: list[dict[str, Any]]) -> None:
    """A line a run."""
    print(f"\n{'':<18}{'run':>4}{'requests':>9}{'s':>5}{'answered':>9}{'below its cap':>15}", end="")
    print(f"{'driver, planned':>17}{'taken':>7}{'neighbour':>11}{'in s':>6}  ")
    for result in results:
        title = f"{result['name']}, {result['life']}"
        for number, run in enumerate(result["runs"], 1):
            below = "–" if run["cap_bytes"] is None else run["cap_bytes"] - run["process_peak_bytes"]
            room = below if isinstance(below, str) else f"{below / 1024:,.0f} KiB"
            print(f"{title:<18}{number:>4}{run['requests']:>9,}{run['seconds']:>5.0f}", end="")
            print(f"{run['outcomes'].get('answered', 0):>9,}{room:>15}{driver_of(result, run)}", end="")
            print(f"{run['neighbour_grew_mib']:>11}", end="")
            print(f"{run['neighbour_took_s']:>6.1f}  {'; '.join(failures(run)) or 'passed'}")
        if "said" in result:
            print(f"{title:<18}  not measured: {result['said'][:300]}")


def driver_of(result: dict[str, Any], run: dict[str, Any]) -> str:
    """MiB that the driver was planned to take in the engine's process, late kernels included, and took."""
    rows = {row["name"]: row["planned_bytes"] or 0 for row in result["at_start"]["ledger"]["rows"]}
    planned = sum(rows.get(name, 0) for name in DRIVER) / MIB
    taken = max((each for each in run["driver"].values() if each), default=None)
    return f"{planned:>17,.0f}{'–' if taken is None else f'{taken / MIB:,.0f}':>7}"


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--free-mib", type=int, default=7200)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--limit-s", type=float, default=150.0, help="Nothing new is asked after so long.")
    parser.add_argument("--seed", type=int, default=7, help="Of the first run; the next has the next.")
    parser.add_argument("--unseen", type=int, default=0, metavar="MIB", help="That the driver takes more.")
    parser.add_argument(
        "--untold", action="store_true", help="NVML names no process's memory, as under WSL2."
    )
    parser.add_argument("--serve", default="", help='More options of the server: --serve="--experts cpu".')
    parser.add_argument("--lives", nargs="+", choices=LIVES, default=LIVES)
    chosen = parser.parse_args()
    results: list[dict[str, Any]] = []
    for argument in chosen.models:
        with tempfile.TemporaryDirectory() as folder:
            for life in chosen.lives:
                try:
                    with patch.dict(os.environ, variables(folder, chosen.unseen, untold=chosen.untold)):
                        results.append(measure(argument, life, chosen))
                except SnugvlError as error:
                    print(f"\n{argument}, {life}: {error}", flush=True)
                    name = argument.partition("=")[0]
                    results.append({"name": name, "life": life, "said": str(error), "runs": []})
                # After every life: the command may be ended before the last.
                machine.save("never_oom", {"results": results, "unseen_mib": chosen.unseen}, chosen.out)
    table(results)
    bad = [run for result in results for run in result["runs"] if failures(run)]
    sys.exit(bool(bad or any("said" in result for result in results)))


if __name__ == "__main__":
    main()
