"""Two thousand requests of hostile sizes on a small card, while another process grows by 500 MiB.

    python benchmarks/never_oom.py FOLDER WEIGHTS [--free-mib 7200] [--requests 2000] [--out FILE]

A ballast leaves the card `--free-mib`; `snugvl serve` plans for that. Sixteen clients send text and pictures
of all sizes (from one pixel to 24 megapixels, to eight pictures, to more text than the context holds), leave
early, ask for several choices; halfway a second process takes 500 MiB more. Passed when every answer is a
complete one or a clean refusal (4xx, 429, 503 with Retry-After), the server never restarted its engine, and
the peak stayed below what was free.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

import machine
from ballast import MIB, Ballast
from gpu_serving import Peak, Server, picture, question

SIZES = [(1, 1), (32, 32), (64, 4000), (512, 512), (1024, 1024), (1920, 1080), (4032, 3024), (6000, 4000)]
CLIENTS = 16
GROWTH_MIB = 500


class Load:
    """The requests, and what became of them."""

    def __init__(self, url: str, pictures: list[str], total: int) -> None:
        self.url = url
        self.pictures = pictures
        self.left = total
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.random = random.Random(7)

    def body(self) -> dict[str, Any]:
        """One request, nothing sensible about it."""
        dice = self.random
        images = dice.choice([0, 1, 1, 1, 2, 8])
        body = question(None, dice.choice([1, 8, 32, 64, 2000]), n=dice.choice([1, 1, 1, 3]))
        content = body["messages"][0]["content"]
        content[0]["text"] = "word " * dice.choice([1, 20, 200, 1500, 6000, 40000])
        content += [
            {"type": "image_url", "image_url": {"url": dice.choice(self.pictures)}} for _ in range(images)
        ]
        if body["max_tokens"] == 2000:
            body.pop("ignore_eos")
            body["temperature"] = 1.0
        return body

    async def client(self, http: httpx.AsyncClient) -> None:
        """Ask until nothing is left to ask."""
        while self.left > 0:
            self.left -= 1
            body, leaves = self.body(), self.random.random() < 0.1
            try:
                outcome = await self.one(http, body, leaves=leaves)
            except httpx.HTTPError as error:
                outcome = f"broken: {type(error).__name__}"
                self.wrong.append(outcome)
            self.outcomes[outcome] += 1

    async def one(self, http: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool) -> str:
        """What became of a request."""
        body = {**body, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            status = response.status_code
            if status != 200:
                text = (await response.aread()).decode()
                clean = status < 500 or (status == 503 and "retry-after" in response.headers)
                if not clean or "error" not in json.loads(text):
                    self.wrong.append(f"{status}: {text[:300]}")
                return f"refused with {status}"
            ended = False
            async for line in response.aiter_lines():
                if line.startswith('data: {"error"'):
                    self.wrong.append(line[:300])
                    return "error in the stream"
                ended = ended or line == "data: [DONE]"
                if leaves:
                    return "left"
            if not ended:
                self.wrong.append("a stream without its end")
            return "answered" if ended else "cut"

    async def run(self, halfway: Any) -> None:
        """All of it; `halfway` is called once in the middle."""
        middle = self.left // 2
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            clients = [asyncio.create_task(self.client(http)) for _ in range(CLIENTS)]
            while self.left > middle:
                await asyncio.sleep(0.2)
            await asyncio.to_thread(halfway)
            await asyncio.gather(*clients)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights")
    parser.add_argument("--free-mib", type=int, default=7200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pictures = [picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    grown: list[Ballast] = []
    with Ballast(arguments.free_mib) as ballast:
        peak = Peak()
        with Server(arguments.folder, ["--weights", arguments.weights, "--context", "4096"]) as server:
            if not server.ready:
                raise SystemExit(f"it did not start: {server.refusal}")
            load = Load(server.url, pictures, arguments.requests)

            def grow() -> None:
                from pynvml import (  # type: ignore[import-untyped]
                    nvmlDeviceGetHandleByIndex,
                    nvmlDeviceGetMemoryInfo,
                )

                free = nvmlDeviceGetMemoryInfo(nvmlDeviceGetHandleByIndex(0)).free
                grown.append(Ballast(max(int(free / MIB) - GROWTH_MIB, 0)).__enter__())

            start = time.perf_counter()
            asyncio.run(load.run(grow))
            seconds = time.perf_counter() - start
            memory = server.memory()
        held = peak.close()
    for each in grown:
        each.__exit__(None, None, None)
    print(f"free at the start {ballast.free_bytes / MIB:,.0f} MiB, peak of all {held / MIB:,.0f} MiB")
    print(f"{arguments.requests} requests in {seconds:.0f} s: {dict(load.outcomes)}")
    restarts = memory["health"]["restarts"]
    print(f"engine restarts: {restarts}; wrong: {len(load.wrong)}", *load.wrong[:5], sep="\n  ")
    values = {
        "free_bytes": ballast.free_bytes,
        "peak_bytes": held,
        "seconds": seconds,
        "outcomes": dict(load.outcomes),
        "wrong": load.wrong,
        "memory": memory,
    }
    machine.save("never_oom", values, arguments.out)


if __name__ == "__main__":
    main()
