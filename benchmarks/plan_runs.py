"""What is said is what runs: the plan that is printed, the engine's configuration, and the ledger's plan.

    python benchmarks/plan_runs.py 2b=FOLDER 4b=FOLDER … [--free-mib 7200 20480] [--for chat documents]

On a card of which a ballast leaves so many MiB: `snugvl plan MODEL --for X --json` is compared with what
`snugvl serve MODEL --for X` says of its plan in `/memory`, with what `/v1/models` and the KV pool have, and
the ledger's planned rows with the plan's footprint. Then requests fill it: the largest image and a prompt of
nearly the whole context, alone and in company; what the process took at most stands beside what was planned.
With `--device cpu` it runs without a GPU.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

import machine
from ballast import MIB, Ballast, Device
from driver_bytes import ProcessPeak
from serving import NAME, Served, serve
from snugvl.bench.workload import picture_url
from snugvl.errors import SnugvlError

AT_ONCE = 6
ANSWER = 24


def printed(model: str, purpose: str, device: Device, more: list[str]) -> dict[str, Any]:
    """The plan as `snugvl plan` tells it."""
    words = [
        sys.executable,
        "-m",
        "snugvl.cli",
        "plan",
        model,
        "--for",
        purpose,
        "--backend",
        "native",
        *more,
    ]
    words += ["--gpu", "none"] if device == "cpu" else []
    done = subprocess.run([*words, "--json", "--offline"], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"settings": None, "said": (done.stdout + done.stderr)[-300:]}
    plan = json.loads(done.stdout)
    return {"settings": plan["choice"]["settings"], "total_bytes": plan["choice"]["total_bytes"]}


async def fill(server: Served, context: int, pixels: int) -> None:
    """The largest image and nearly the whole context, first alone, then several at once."""
    side = int(pixels**0.5) // 32 * 32
    image = {"type": "image_url", "image_url": {"url": picture_url(side, side, 1)}}
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http:

        async def ask(words: int, *, see: bool) -> None:
            content = [{"type": "text", "text": "word " * words}, *([image] if see and side else [])]
            body = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": ANSWER}
            answer = await http.post(
                "/v1/chat/completions", json=body | {"temperature": 0, "ignore_eos": True}
            )
            if answer.status_code not in (200, 413):
                raise SnugvlError(f"{answer.status_code}: {answer.text[:300]}")

        seen = pixels // 1024 + 100
        await ask(max(context - seen - 200, 8), see=True)
        await ask(context - 200, see=False)
        await asyncio.gather(*(ask(max(context // 4 - 100, 8), see=n % 2 == 0) for n in range(AT_ONCE)))


def differences(told: dict[str, Any], said: dict[str, Any], cards: dict[str, Any]) -> list[str]:
    """Where the printed plan, the configuration and the ledger disagree; `told`: `/memory`."""
    plan, settings = told["plan"], told["plan"]["settings"]
    found = [
        f"{name}: printed {value}, run {settings[name]}"
        for name, value in (said["settings"] or {}).items()
        if settings[name] != value
    ]
    blocks = told["load"]["planned_blocks"]
    if blocks * 16 != max(settings["pool_tokens"] // 16 * 16, settings["context"] * settings["concurrency"]):
        found.append(f"the pool has {blocks * 16:,} tokens, planned {settings['pool_tokens']:,}")
    if cards["max_model_len"] != settings["context"]:
        found.append(f"served context {cards['max_model_len']}, planned {settings['context']}")
    rows = sum(row["planned_bytes"] or 0 for row in told["ledger"]["rows"])
    if rows != plan["total_bytes"]:
        found.append(f"the ledger plans {rows:,}, the plan {plan['total_bytes']:,}")
    return found + ([plan["changed"]] if plan["changed"] else [])


def measure(name: str, model: str, free_mib: int, purpose: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """One start."""
    device: Device = chosen.device
    more = ["--weights", chosen.weights]
    options = ["--for", purpose, *more, "--device", device]
    with Ballast(free_mib, device) as ballast:
        said = printed(model, purpose, device, more)
        with serve(model, options) as server, ProcessPeak((ballast.pid,)) as peak:
            told = server.memory()
            cards = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]
            asyncio.run(fill(server, cards["max_model_len"], cards["max_pixels"] or 0))
            after = server.memory()
            taken = max(peak.take() or 0, after["ledger"]["process_bytes"])
            result = {
                "name": name, "free_mib": free_mib, "for": purpose, "settings": told["plan"]["settings"],
                "differences": differences(told, said, cards) if said["settings"] else [said["said"]],
                "planned_bytes": told["plan"]["total_bytes"], "taken_bytes": taken,
                "cap_bytes": after["ledger"]["cap_bytes"], "ready_s": server.ready_s, "memory": after,
            }  # fmt: skip
    show(result)
    return result


def show(result: dict[str, Any]) -> None:
    """A line."""
    settings, planned, taken = result["settings"], result["planned_bytes"], result["taken_bytes"]
    formats = f"{settings['weights']}/{settings['head']}/{settings['vision_weights']}/{settings['kv']}"
    off = (taken - planned) / planned
    near = "ok" if abs(off) <= 0.02 or abs(taken - planned) <= 64 * MIB else "OFF"
    same = "same" if not result["differences"] else "; ".join(result["differences"])
    print(
        f"{result['name']:<12}{result['free_mib']:>7,} {result['for']:<10}{formats:<22}"
        f"{settings['context']:>7,}{(settings['max_pixels'] or 0) / 1e6:>6.1f}{settings['pool_tokens']:>9,}"
        f"{settings['sequences']:>4}{planned / MIB:>10,.0f}{taken / MIB:>10,.0f}{off:>+8.1%} {near:<4}{same}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--free-mib", type=int, nargs="+", default=[7200, 20480])
    parser.add_argument("--for", dest="purposes", nargs="+", default=["chat", "documents"])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print(
        f"{'':<12}{'MiB':>7} {'for':<10}{'weights/head/tower/kv':<22}{'context':>7}{'Mpx':>6}{'pool':>9}",
        end="",
    )
    print(f"{'seq':>4}{'planned':>10}{'taken':>10}{'':>8} printed = configured = ledger")
    results: list[dict[str, Any]] = []
    for argument in chosen.models:
        name, _, model = argument.partition("=")
        for free_mib in chosen.free_mib:
            for purpose in chosen.purposes:
                try:
                    results.append(measure(name, model, free_mib, purpose, chosen))
                except SnugvlError as error:
                    print(f"{name:<12}{free_mib:>7,} {purpose:<10}{error}", flush=True)
                    results.append({"name": name, "free_mib": free_mib, "for": purpose, "said": str(error)})
                machine.save("plan_runs", {"results": results}, chosen.out)
    bad = [each for each in results if each.get("differences") or "said" in each]
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
