"""What HTTP costs: the same streamed chats into the bare engine, into its process, and over HTTP.

    python benchmarks/server_overhead.py [--pairs 5] [--clients 1 16] [--cpus 0,1] [--out FILE]

    native      the engine in this benchmark's process, read by asyncio
    supervised  the engine in its child process, as the server has it, without HTTP
    http        `snugvl serve`; what reads it runs beside, on all CPUs that --cpus leaves

All three are loaded and wait; a pair asks each of them the same, in an order that is drawn. Every client
streams one answer of 256 to 512 tokens. Overhead: the median over pairs of (seconds / native seconds - 1).
CPU: processor time a token, of the engine and all that is between it and the socket.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from server_requests import ENDLESS, MODEL, question
from serving import only_on, serve

PATHS = ("native", "supervised", "http")
LEAST, MOST = 256, 512  # tokens of an answer
DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Ask:
    """One client's request."""

    text: str
    tokens: int


Read = Callable[[Ask], Awaitable[float]]  # → seconds until the first text


async def timed(read: Read, asks: Sequence[Ask], measured: psutil.Process) -> dict[str, float]:
    """All clients at once.

    Seconds until the last has its answer, the median until the first text, and processor seconds of
    `measured` and its children.
    """
    started, used = time.perf_counter(), processor_s(measured)
    firsts = await asyncio.gather(*(read(ask) for ask in asks))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "first_s": median(firsts), "cpu_s": processor_s(measured) - used}


def processor_s(process: psutil.Process) -> float:
    """Processor time that it and its children had so far."""
    times = [each.cpu_times() for each in (process, *process.children())]
    return sum(each.user + each.system for each in times)


async def over_http(host: str, port: int, ask: Ask) -> float:
    """A client that only looks for the first text and the end: what it costs is not the server's."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": ask.text}], "stream": True, **ENDLESS}
    data = json.dumps({**body, "max_tokens": ask.tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await reader.readuntil(b'"content":""')  # the role comes first
    await reader.readuntil(b'"content":"')
    first_s = time.perf_counter() - started
    count = 1
    while DONE not in (line := await reader.readline()):
        assert line, "the stream broke off"
        count += b'"content":"' in line
    writer.close()
    assert count >= ask.tokens * 0.9, f"{count} pieces for {ask.tokens} tokens"
    return first_s


def work(path: str) -> None:
    """A process that runs one of the other paths: asks come as lines of JSON, seconds go."""
    from snugvl.core.messages import Request, Stream, user
    from snugvl.core.sampling import SamplingParams

    bias = {int(token): bias for token, bias in ENDLESS["logit_bias"].items()}

    async def main() -> None:
        submit = await (_native() if path == "native" else _supervised())

        async def read(ask: Ask) -> float:
            started, first_s = time.perf_counter(), 0.0
            sampling = SamplingParams(max_tokens=ask.tokens, logit_bias=bias)
            stream: Stream = await submit(Request((user(ask.text),), sampling))
            async for _ in stream:
                first_s = first_s or time.perf_counter() - started
            return first_s

        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(
                json.dumps(await timed(read, [Ask(**each) for each in json.loads(line)], psutil.Process())),
                flush=True,
            )
        os._exit(0)

    uvloop.run(main())


async def _native() -> Callable[[Any], Awaitable[Any]]:
    import snugvl

    backend = snugvl.load(MODEL).backend

    async def submit(request: Any) -> Any:
        return await asyncio.to_thread(backend.submit, request)

    return submit


async def _supervised() -> Callable[[Any], Awaitable[Any]]:
    from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine

    service = SupervisedEngine(EngineChoice(MODEL))
    await service.start()
    while not service.health.ready:
        await asyncio.sleep(0.05)
    return service.submit


class Worker:
    """A process of `work`, from outside."""

    def __init__(self, path: str, cpus: Sequence[int]) -> None:
        command = [sys.executable, __file__, "--worker", path]
        with only_on(cpus):
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", f"{path} did not load"

    def __call__(self, asks: Sequence[Ask]) -> dict[str, float]:
        """Run the asks there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([{"text": a.text, "tokens": a.tokens} for a in asks]) + "\n")
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


Paths = dict[str, Callable[[Sequence[Ask]], dict[str, float]]]


def measure(paths: Paths, clients: int, pairs: int, random: Random) -> dict[str, Any]:
    """Pairs of runs, and the medians."""
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    tokens = []
    for number in range(pairs + 1):
        asks = [Ask(question(random), random.randint(LEAST, MOST)) for _ in range(clients)]
        for path in random.sample(PATHS, len(PATHS)):
            found = paths[path](asks)
            if number:  # the first pair warms up
                runs[path].append(found)
        tokens.append(sum(ask.tokens for ask in asks))
    figures: dict[str, Any] = {"clients": clients, "tokens": tokens[1:]}
    for path in PATHS:
        seconds = [run["seconds"] for run in runs[path]]
        ratios = [run / bare["seconds"] for run, bare in zip(seconds, runs["native"], strict=True)]
        figures[path] = {
            "seconds": seconds,
            "tokens_per_s": round(median(map(float.__truediv__, map(float, tokens[1:]), seconds)), 1),
            "first_s": round(median(run["first_s"] for run in runs[path]), 4),
            "cpu_ms_per_token": round(sum(run["cpu_s"] for run in runs[path]) / sum(tokens[1:]) * 1000, 3),
            "overhead": round(median(ratios) - 1, 4),
            "overhead_of_pairs": [round(ratio - 1, 4) for ratio in ratios],
        }
    return figures


def show(figures: dict[str, Any]) -> None:
    """Three lines for one number of clients."""
    for path in PATHS:
        row = figures[path]
        values = row["overhead_of_pairs"] if path != "native" else []
        spread = ", ".join(f"{value:+.1%}" for value in values)
        print(
            f"{figures['clients']:>7}  {path:<11}{row['tokens_per_s']:>10.1f}{row['first_s'] * 1000:>10.1f}"
            f"{row['cpu_ms_per_token']:>8.2f}{row['overhead']:>+10.1%}   {spread}",
            flush=True,
        )


def main() -> None:
    """Load all, measure each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--cpus", default="", help="of the engines and the server, such as 0,1; all without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=("native", "supervised"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    cpus = [int(number) for number in arguments.cpus.split(",") if number]
    if cpus:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - set(cpus) or cpus)
    with ExitStack() as stack:
        paths: Paths = {}
        for path in ("native", "supervised"):
            worker = Worker(path, cpus)
            stack.callback(worker.close)
            paths[path] = worker
        named = ["--served-model-name", MODEL]
        served = stack.enter_context(serve(MODEL, named, cpus=cpus, quiet=False))
        host, port = urlsplit(served.url).hostname, urlsplit(served.url).port
        assert host
        assert port
        paths["http"] = lambda asks: uvloop.run(
            timed(lambda ask: over_http(host, port, ask), asks, served.process)
        )
        print("clients  path        tokens/s  first ms  CPU ms  overhead   of each pair")
        random = Random(arguments.seed)
        results = [measure_and_show(paths, clients, arguments.pairs, random) for clients in arguments.clients]
    # Imported last: it loads torch.
    import machine

    print(machine.describe())
    machine.save("server/overhead", {"cpus": arguments.cpus or "all", "results": results}, arguments.out)


def measure_and_show(paths: Paths, clients: int, pairs: int, random: Random) -> dict[str, Any]:
    """Both."""
    figures = measure(paths, clients, pairs, random)
    show(figures)
    return figures


if __name__ == "__main__":
    main()
