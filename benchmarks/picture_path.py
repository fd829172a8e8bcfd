"""A picture's way over HTTP to the engine, stage by stage: where the time to the first token goes.

    python benchmarks/picture_path.py [--clients 1 8] [--requests 16] [--side 1024] [--out FILE]
    python benchmarks/picture_path.py --checkpoint FOLDER --device cuda

Runs a server in whose processes the functions on that way tell when they begin and end
(`picture_path_stages.py`), and asks it as `snugvl bench` does: each request has a new JPEG in a data URL. A
line a stage, in milliseconds: when it ended since the request was sent, how long it took, how much of that
its own thread had a processor, and how many pages of memory it was the first to touch. Medians of all
requests, after two of each client that are not counted. Below, what a request cost each process in all.

Without --checkpoint the model is pocket with Qwen3-VL's limits of pixels, and its network computes nothing:
so much Python as --network tells (encode, prefill) stands in for it, as the host of a GPU is busy with
starting kernels. What lies before and behind is measured.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx
import psutil

from picture_path_stages import CLIENT, FILE, STAGES, STAND_IN
from snugvl.bench.workload import Manner, Workload, bodies

POCKET = Path(__file__).parent.parent / "src" / "snugvl" / "pocket"
LIMITS = {"longest_edge": 4096 * 4096, "shortest_edge": 256 * 256}  # pixels, in spite of the names
START_S = 60.0
WARM = 2
TOKENS = 4
CONTENT = b'"content":"'
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Stage:
    """Medians of one stage, in milliseconds.

    Attributes:
        end: since the request was sent.
        wall: from its beginning.
        cpu: of its own thread.
        faults: pages of memory that the thread was the first to touch, no time.
    """

    name: str
    end: float
    wall: float
    cpu: float
    faults: float


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of one request, in seconds of the machine's monotonic clock."""

    ended: float
    began: float | None = None
    cpu_s: float = 0.0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, as its client saw it: when it was sent, and when its first token came."""

    sent: float
    first: float


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has had so far: processor time in milliseconds, and pages that it touched first."""

    cpu_ms: float
    faults: float


def used(server: psutil.Process) -> dict[str, Used]:
    """Of the server, its engine, and all decoders together."""
    found: dict[str, list[Used]] = defaultdict(list)
    for process in (server, *server.children(recursive=True)):
        name = "server" if process == server else "decoders"
        if "engine" in process.cmdline():
            name = "engine"
        times = process.cpu_times()
        # pid (name) state …: minor faults are the tenth field of the line, the eighth after the name.
        faults = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7]
        found[name].append(Used(1e3 * (times.user + times.system), int(faults)))
    return {
        name: Used(sum(each.cpu_ms for each in all_), sum(each.faults for each in all_))
        for name, all_ in found.items()
    }


def spent(before: dict[str, Used], after: dict[str, Used], requests: int) -> dict[str, Used]:
    """For each request, between two moments."""
    found = {}
    for name, now in after.items():
        then = before.get(name, Used(0, 0))
        found[name] = Used((now.cpu_ms - then.cpu_ms) / requests, (now.faults - then.faults) / requests)
    return found


@contextmanager
def served(
    checkpoint: Path, device: str, network: str | None, spans: Path
) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server that is ready, and its process."""
    script = Path(__file__).with_name("picture_path_stages.py")
    environment = {**os.environ, FILE: str(spans), **({STAND_IN: network} if network else {})}
    command = [sys.executable, str(script), "server", str(checkpoint), device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        base = f"http://127.0.0.1:{int(process.stdout.readline())}"
        end = time.monotonic() + START_S
        while not _ready(base):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield base, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _ready(base: str) -> bool:
    try:
        return bool(httpx.get(f"{base}/health", timeout=5).json()["state"] == "ready")
    except httpx.TransportError:
        return False


async def asked(base: str, wanted: Sequence[bytes], clients: int) -> dict[str, Sent]:
    """Send everything, so many at once; what came of each, by the server's name for it."""
    found: dict[str, Sent] = {}
    left = list(wanted)

    async def client(http: httpx.AsyncClient) -> None:
        while left:
            body, begin = left.pop(), time.monotonic()
            url = f"{base}/v1/chat/completions"
            async with http.stream("POST", url, content=body, headers=HEADERS) as response:
                response.raise_for_status()
                text = b""
                first = 0.0
                async for piece in response.aiter_raw():
                    text += piece
                    # The role comes first, with a text that is empty.
                    if not first and text.replace(b'"content":""', b"").count(CONTENT):
                        first = time.monotonic()
                if not first:
                    raise SystemExit(f"no token came: {text!r}")
                found[response.headers["x-request-id"]] = Sent(begin, first)

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return found


def by_request(lines: Sequence[str]) -> dict[str, dict[str, Span]]:
    """The stages of each request. The engine knows one as "submit N"; whoever packs it knows both names."""
    entries = [json.loads(line) for line in lines]
    names = {key.partition(" ")[2]: key.partition(" ")[0] for key, *_ in entries if key.count(" ") == 2}
    found: dict[str, dict[str, Span]] = defaultdict(dict)
    for key, stage, *span in entries:
        stages, one = found[names.get(key) or key.partition(" ")[0]], Span(*span)
        stages[stage] = both(stages[stage], one) if stage in stages else one
    return found


def both(first: Span, then: Span) -> Span:
    """A stage that came in two parts, as one."""
    return Span(then.ended, first.began, first.cpu_s + then.cpu_s, first.faults + then.faults)


def medians(requests: dict[str, Sent], spans: dict[str, dict[str, Span]]) -> list[Stage]:
    """What each stage took."""
    rows: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for name, request in requests.items():
        own = {**spans[name], CLIENT: Span(request.first)}
        before = request.sent
        for stage in (stage for stage in STAGES if stage in own):
            span = own[stage]
            began = before if span.began is None else span.began
            times = (span.ended - request.sent, span.ended - began, span.cpu_s)
            rows[stage].append((*(1e3 * each for each in times), span.faults))
            if not STAGES[stage]:
                before = span.ended
    return [
        Stage(stage, *(median(column) for column in zip(*rows[stage], strict=True)))
        for stage in STAGES
        if stage in rows
    ]


def show(clients: int, stages: Sequence[Stage], cost: dict[str, Used]) -> None:
    """Two tables."""
    print(f"\n{clients} at once: ms {'ended at':>27}{'took':>10}{'CPU':>10}{'pages':>8}")
    for stage in stages:
        name = "  " * (1 + STAGES[stage.name]) + stage.name
        work = f"{stage.cpu:10.2f}{stage.faults:8.0f}" if stage.cpu else ""
        print(f"{name:<38}{stage.end:10.2f}{stage.wall:10.2f}{work}")
    for name, each in cost.items():
        print(f"  each request, {name + ':':<42}{each.cpu_ms:10.2f}{each.faults:8.0f}", flush=True)


def large_pocket(folder: Path) -> Path:
    """Pocket with Qwen3-VL's limits of pixels."""
    copy = shutil.copytree(POCKET, folder / "pocket")
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": LIMITS}))
    return copy


def main() -> None:
    """Measure each number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--network", help="encode and prefill in ms, such as 12,18; computed with --checkpoint"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=16, help="of each number of clients, at least")
    parser.add_argument("--side", type=int, default=1024, help="of the square pictures, in pixels")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, spans = Path(temporary), Path(temporary) / "spans"
        spans.touch()
        checkpoint = arguments.checkpoint or large_pocket(folder)
        network = arguments.network or (None if arguments.checkpoint else "12,18")
        workload = Workload((arguments.side, arguments.side), None, TOKENS, False, 0)
        manner = Manner("pocket")
        seed = 1
        with served(checkpoint, arguments.device, network, spans) as (base, process):
            for clients in arguments.clients:
                count = max(arguments.requests, 3 * clients)
                wanted = bodies(workload, manner, seed, count + WARM * clients)
                seed += len(wanted)
                asyncio.run(asked(base, wanted[count:], clients))
                before = used(process)
                requests = asyncio.run(asked(base, wanted[:count], clients))
                cost = spent(before, used(process), count)
                stages = medians(requests, by_request(spans.read_text().splitlines()))
                show(clients, stages, cost)
                results[clients] = {
                    "stages": [asdict(stage) for stage in stages],
                    "spent": {name: asdict(each) for name, each in cost.items()},
                }
    if arguments.out:
        import machine  # it loads torch

        machine.save("picture_path", {"levels": results}, arguments.out)


if __name__ == "__main__":
    main()
