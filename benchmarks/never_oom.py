"""Two thousand requests of hostile sizes on a small card, while another process grows by 500 MiB.

    python benchmarks/never_oom.py FOLDER WEIGHTS [--free-mib 7200] [--requests 2000] [--out FILE]
    python benchmarks/never_oom.py pocket auto --device cpu --free-mib 900 --requests 60

A ballast leaves the card `--free-mib`, beside a neighbour's empty context; `snugvl serve` plans for that.
Sixteen clients send text and pictures of all sizes (from one pixel to 24 megapixels, up to eight of them, up
to more text than the context holds), leave early, ask for several choices; halfway the neighbour takes 500
MiB more, as far as they can be had within five seconds, and gives them back in the end. Passed when every
answer is a complete one or a clean refusal (4xx, or 503 with Retry-After), the engine never restarted, its
process stayed below its cap, and its KV cache is whole again. With `--device cpu`
all of it runs without a GPU; the server is then told `--memory`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

import machine
from ballast import MIB, Ballast, Neighbour
from serving import NAME, Served, gpu_peak_bytes, served
from snugvl.bench.memory import GpuWatch, LedgerWatch
from snugvl.bench.pictures import picture_url
from snugvl.errors import SnugvlError

# Large pictures are rare: decoding 24 megapixels takes longer than all else.
SIZES = {
    (1, 1): 3, (32, 32): 3, (64, 4000): 2, (512, 512): 4, (1024, 1024): 4, (1920, 1080): 2, (4032, 3024): 1,
    (6000, 4000): 1,
}  # fmt: skip
CLIENTS = 16
GROWTH_MIB = 500
COMES_BACK_S = 25.0  # the engine waits for ten seconds whether the room lasts


class Load:
    """The requests, and what became of them."""

    def __init__(self, url: str, total: int, limit_s: float) -> None:
        self.url = url
        self.left = total
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.ledger: Any = None
        self._total = total
        self._end = time.perf_counter() + limit_s
        self._random = random.Random(7)
        self._pictures = [picture_url(*size, seed) for seed, size in enumerate(SIZES)]

    def body(self) -> dict[str, Any]:
        """One request, nothing sensible about it."""
        dice = self._random
        words = dice.choice([1, 20, 200, 1500, 6000, 40000])
        content: list[dict[str, Any]] = [{"type": "text", "text": "word " * words}]
        urls = dice.choices(self._pictures, [*SIZES.values()], k=dice.choice([0, 1, 1, 1, 2, 8]))
        content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"model": NAME, "messages": [{"role": "user", "content": content}], "stream": True}
        body |= {"max_tokens": dice.choice([1, 8, 8, 32, 64, 400]), "n": dice.choice([1, 1, 1, 3])}
        greedy = dice.random() < 0.7
        return body | ({"temperature": 0, "ignore_eos": True} if greedy else {"temperature": 1.0, "seed": 3})

    async def run(self, halfway: Callable[[], None]) -> None:
        """All of it; `halfway` is called once in the middle."""
        async with httpx.AsyncClient(base_url=self.url, timeout=300, trust_env=False) as http:
            watch = LedgerWatch(http, "/memory")
            watching = asyncio.create_task(watch.watch())
            clients = [asyncio.create_task(self._client(http)) for _ in range(CLIENTS)]
            while self.left > self._total // 2:
                await asyncio.sleep(0.1)
            await asyncio.to_thread(halfway)
            await asyncio.gather(*clients)
            watching.cancel()
            await watch.look()
            self.ledger = watch.take()

    async def _client(self, http: httpx.AsyncClient) -> None:
        """Ask until nothing is left to ask."""
        while self.left > 0:
            if time.perf_counter() > self._end:
                self.left = 0
                return
            self.left -= 1
            self.sent += 1
            body, leaves = self.body(), self._random.random() < 0.1
            try:
                outcome = await self._one(http, body, leaves=leaves)
            except httpx.HTTPError as error:
                outcome = f"broken: {type(error).__name__}"
                self.wrong.append(outcome)
            self.outcomes[outcome] += 1

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool) -> str:
        """What became of a request."""
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return self._refused(response, (await response.aread()).decode())
            ended = False
            async for line in response.aiter_lines():
                if line.startswith("data:") and '"error"' in line[:20]:
                    self.wrong.append(line[:300])
                    return "error in the stream"
                ended = ended or line == "data: [DONE]"
                if leaves:
                    return "left early"
            if not ended:
                self.wrong.append("a stream without its end")
            return "answered" if ended else "cut"

    def _refused(self, response: httpx.Response, text: str) -> str:
        status = response.status_code
        clean = status < 500 or (status == 503 and "retry-after" in response.headers)
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError):
            error, clean = {}, False
        if not clean:
            self.wrong.append(f"{status}: {text[:300]}")
        return f"refused: {status} {error.get('code') or error.get('type') or '?'}"


def soak(server: Served, neighbour: Neighbour, requests: int, limit_s: float) -> dict[str, Any]:
    """Everything, against a server that runs."""
    load, grown = Load(server.url, requests, limit_s), []
    start = time.perf_counter()
    asyncio.run(load.run(lambda: grown.append(neighbour.grow(GROWTH_MIB))))
    memory = server.memory()
    neighbour.leave()
    came_back_s = came_back(server)
    process, cap = load.ledger.process_bytes, load.ledger.cap_bytes
    return {
        "requests": load.sent,
        "seconds": time.perf_counter() - start,
        "outcomes": dict(load.outcomes.most_common()),
        "wrong": load.wrong,
        "neighbour_grew_mib": grown[0],
        "kv_came_back_s": came_back_s,
        "process_peak_bytes": process,
        "cap_bytes": cap,
        "least_free_bytes": load.ledger.free_bytes,
        "restarts": memory["health"]["restarts"],
        "memory": memory,
    }


def came_back(server: Served) -> float | None:
    """Seconds until the KV cache has all of its blocks again; None: not in time."""
    start = time.perf_counter()
    while (passed_s := time.perf_counter() - start) < COMES_BACK_S:
        load = server.memory()["load"]
        if load["num_blocks"] >= load["planned_blocks"]:
            return passed_s
        time.sleep(0.2)
    return None


def failures(result: dict[str, Any]) -> list[str]:
    """What went wrong. Nothing: clean refusals alone, nothing over the cap, a whole cache, answers."""
    over = 0 if result["cap_bytes"] is None else result["process_peak_bytes"] - result["cap_bytes"]
    found = {
        f"{len(result['wrong'])} wrong answers": bool(result["wrong"]),
        f"{result['restarts']} restarts": bool(result["restarts"]),
        f"its process peaked {over / 1024:,.0f} KiB above its cap": over > 0,
        "its KV cache didn't become whole again": result["kv_came_back_s"] is None,
        "nothing was answered": not result["outcomes"].get("answered", 0),
    }
    return [what for what, so in found.items() if so]


def show(result: dict[str, Any]) -> None:
    """For people."""
    print(f"{result['requests']:,} requests in {result['seconds']:.0f} s")
    for outcome, count in result["outcomes"].items():
        print(f"  {outcome:<44}{count:>6,}")
    cap = "–" if result["cap_bytes"] is None else f"{result['cap_bytes'] / MIB:,.0f}"
    card = result["card_peak_bytes"]
    print(
        f"  engine's process, peak MiB {result['process_peak_bytes'] / MIB:,.0f} of its cap {cap}; ", end=""
    )
    print(f"all processes {card / MIB:,.0f} of {result['free_bytes'] / MIB:,.0f}" if card else "no GPU")
    load = result["memory"]["load"]
    print(
        f"  KV blocks beside it {load['num_blocks']} of {load['planned_blocks']}; "
        f"steps that ran out of memory {load['shortages']}"
    )
    back = result["kv_came_back_s"]
    print(
        "  they didn't come back" if back is None else f"  all of them again {back:.1f} s after it had left"
    )
    print(f"  the neighbour grew by {result['neighbour_grew_mib']} of {GROWTH_MIB} MiB, ", end="")
    print(f"least free {result['least_free_bytes'] / MIB:,.0f} MiB; engine restarts {result['restarts']}")
    print(f"FAILED: {', '.join(why)}" if (why := failures(result)) else "PASSED", flush=True)
    print(*result["wrong"][:5], sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--free-mib", type=int, default=7200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--limit-s", type=float, default=240.0, help="Nothing new is asked after so long.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, free = arguments.device, arguments.free_mib
    options = ["--weights", arguments.weights, "--context", "4096", "--device", device]
    options += ["--memory", f"{free}MiB"] if device == "cpu" else []
    with Neighbour(device) as neighbour, Ballast(free, device) as ballast, GpuWatch() as watch:
        try:
            with served(arguments.model, options) as server:
                result = soak(server, neighbour, arguments.requests, arguments.limit_s)
        except SnugvlError as error:
            sys.exit(str(error))
        result |= {"free_bytes": ballast.free_bytes, "card_peak_bytes": gpu_peak_bytes(watch)}
    show(result)
    machine.save("never_oom", result, arguments.out)
    sys.exit(bool(failures(result)))


if __name__ == "__main__":
    main()
