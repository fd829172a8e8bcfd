"""Many clients at once that do everything clients do, against a real `snugvl serve`; and what is left of it.

    python -m tests.server.load [--requests 5000] [--concurrent 200]
                                [--limit 256] [--cpus 0,1] [--seed 0] [--out FILE]

Each of the clients sends one request after the other: text and pictures, whole and streamed, in every
protocol, with tools and schemas; some leave in the middle, some send rubbish. Checked: every answer has its
status and its end, nothing but 429 and 503 with Retry-After is refused without a reason, afterwards nothing
runs and every KV block is free, and memory, open files and threads of server and engine stay as they were.
Exits with 1 if any of it doesn't hold. Afterwards twice as many clients as are let in ask at once.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import linear_regression, quantiles
from typing import Any

import httpx
from benchmarks.serving import Held, Served, serve

from tests.server.client_requests import KINDS, MODEL, Kind, chat

GIB = 1024**3
MIB = 1024**2
SAMPLE = 500  # requests between two looks at memory
SETTLE = 2000  # requests after which memory should no longer grow: caches and `core/resources.py` are full
GROWTH_MIB = 16.0  # over 4,000 requests; 4 KiB a request would be a leak
FILES = 16  # more open than before: what a pool of connections may keep
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went.

    Attributes:
        first_s: until the first event of a stream.
        failure: what was wrong with the answer.
        status: 0 where the client left before there was one.
    """

    kind: str
    status: int
    seconds: float
    first_s: float | None = None
    failure: str | None = None


async def send(client: httpx.AsyncClient, kind: Kind, random: Random) -> Outcome:
    """One request to its end."""
    started = time.perf_counter()
    try:
        match kind.manner:
            case "whole":
                status, first_s, failure = await _whole(client, kind, random)
            case "stream":
                status, first_s, failure = await _stream(client, kind, random)
            case "leave in the stream":
                status, first_s, failure = await _stream(client, kind, random, leave=random.randint(1, 20))
            case "leave at once":
                status, first_s, failure = await _leave(client, kind, random)
            case "head only":
                status, first_s, failure = await _head_only(client, kind)
    except (httpx.HTTPError, OSError) as error:
        status, first_s, failure = 0, None, f"{type(error).__name__}: {error}"
    return Outcome(kind.name, status, time.perf_counter() - started, first_s, failure)


Result = tuple[int, float | None, str | None]


def _content(kind: Kind, random: Random) -> dict[str, Any]:
    body = kind.body(random)
    if isinstance(body, bytes):
        return {"content": body, "headers": {"Content-Type": "application/json"}}
    return {"json": body}


async def _whole(client: httpx.AsyncClient, kind: Kind, random: Random) -> Result:
    answer = await client.post(kind.path, **_content(kind, random))
    return answer.status_code, None, _refusal(kind, answer) or _wrong(kind, answer)


def _wrong(kind: Kind, answer: httpx.Response) -> str | None:
    return kind.ended(answer.json()) if answer.status_code == kind.status else None


def _refusal(kind: Kind, answer: httpx.Response) -> str | None:
    """What is wrong with a status."""
    if answer.status_code == kind.status:
        return None
    if answer.status_code in (429, 503):
        return None if int(answer.headers.get("retry-after", 0)) >= 1 else "no Retry-After"
    return f"{answer.status_code} instead of {kind.status}: {answer.text[:300]}"


async def _stream(
    client: httpx.AsyncClient, kind: Kind, random: Random, *, leave: int | None = None
) -> Result:
    started = time.perf_counter()
    first_s, events = None, []
    async with client.stream("POST", kind.path, **_content(kind, random)) as answer:
        if answer.status_code != kind.status:
            await answer.aread()
            return answer.status_code, None, _refusal(kind, answer)
        lines = kind.path.startswith("/api/")
        async for line in answer.aiter_lines():
            if line.startswith("data: ") or (lines and line):
                events.append(line.removeprefix("data: "))
                first_s = first_s or time.perf_counter() - started
                if len(events) == leave:
                    break
    return answer.status_code, first_s, None if leave else kind.ended(events)


async def _leave(client: httpx.AsyncClient, kind: Kind, random: Random) -> Result:
    """Close the connection before there is an answer, or soon after it began."""
    content = _content(kind, random)
    try:
        async with asyncio.timeout(random.expovariate(10)):
            answer = await client.post(kind.path, **content)
    except TimeoutError:
        return 0, None, None
    return answer.status_code, None, _refusal(kind, answer)


async def _head_only(client: httpx.AsyncClient, kind: Kind) -> Result:
    """Announce a body and send only a part of it."""
    url = client.base_url
    assert url.port is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {kind.path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {GIB}\r\n\r\n{{".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), TIMEOUT_S)
    writer.close()
    status = int(answer.split()[1])
    return status, None, None if status in (kind.status, 429, 503) else f"{status} instead of {kind.status}"


class Run:
    """All requests of one run, each kind at least once, and what was measured beside them."""

    def __init__(self, served: Served, total: int, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self.samples: list[tuple[int, dict[str, Held]]] = []
        self._served = served
        self._random = Random(seed)
        self._deck = [*KINDS, *self._random.choices(KINDS, [kind.weight for kind in KINDS], k=total)][:total]
        self._random.shuffle(self._deck)

    async def clients(self, count: int) -> None:
        """So many clients, each with one request after the other, until all are sent."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=count)
        async with httpx.AsyncClient(base_url=self._served.url, timeout=TIMEOUT_S, limits=limits) as client:
            await asyncio.gather(*(self._client(client) for _ in range(count)))

    async def _client(self, client: httpx.AsyncClient) -> None:
        while self._deck:
            kind = self._deck.pop()
            self.outcomes.append(await send(client, kind, Random(self._random.random())))
            if len(self.outcomes) % SAMPLE == 0:
                self.samples.append((len(self.outcomes), self._served.held()))
                print(_sample(*self.samples[-1]), flush=True)


def _sample(count: int, held: dict[str, Held]) -> str:
    parts = [
        f"{name} {one.rss_bytes / MIB:7.1f} MiB {one.files:4} files {one.threads:3} threads"
        for name, one in held.items()
    ]
    return f"{count:>7,}  " + "   ".join(parts)


def slope_mib(samples: Sequence[tuple[int, dict[str, Held]]], name: str) -> float | None:
    """How much resident memory grows in 4,000 requests, by least squares after it has settled."""
    points = [(count, held[name].rss_bytes / MIB) for count, held in samples if count >= SETTLE]
    if len(points) < 3:
        return None
    return linear_regression(*zip(*points, strict=True)).slope * 4000


async def beyond_the_limit(base: str, clients: int) -> Counter[int]:
    """So many clients at exactly one moment: statuses."""
    body = chat(Random(0), max_tokens=4)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=TIMEOUT_S, limits=limits) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=body) for _ in range(clients))
        )
    wrong = [a.text for a in answers if a.status_code == 429 and int(a.headers.get("retry-after", 0)) < 1]
    assert not wrong, wrong[0]
    return Counter(answer.status_code for answer in answers)


def idle(served: Served, seconds: float = 300.0) -> str | None:
    """What is still held when everybody has left."""
    end = time.monotonic() + seconds
    while True:
        load = served.get("/memory")["load"]
        held = load["num_blocks"] - load["free_blocks"]
        if not (load["running"] or load["waiting"] or held):
            return None
        if time.monotonic() > end:
            return f"{load['running']} run, {load['waiting']} wait, {held} KV blocks are held"
        time.sleep(0.1)


def left_behind(before: dict[str, Held], after: dict[str, Held], samples: Any) -> list[str]:
    """Memory, files and threads that didn't come back."""
    found = []
    for name in ("server", "engine"):
        grown = slope_mib(samples, name)
        if grown is not None and grown > GROWTH_MIB:
            found.append(f"the {name}'s memory grows by {grown:.1f} MiB in 4,000 requests")
        if after[name].files > before[name].files + FILES:
            found.append(f"the {name} has {after[name].files} files open; {before[name].files} before")
    return found


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row a kind: how many, statuses, seconds."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    rows = []
    for name in (*(kind.name for kind in KINDS), "all"):
        some = list(outcomes) if name == "all" else by_kind[name]
        if not some:
            continue
        rows.append(
            {
                "kind": name,
                "count": len(some),
                "statuses": dict(Counter(outcome.status or "left" for outcome in some)),
                "seconds": _percentiles([outcome.seconds for outcome in some]),
                "first_s": _percentiles([o.first_s for o in some if o.first_s is not None]),
            }
        )
    return rows


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {name: value for name in ("p50", "p95", "p99") for value in values}
    cuts = quantiles(values, n=100, method="inclusive")
    return {f"p{q}": round(cuts[q - 1], 4) for q in (50, 95, 99)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table."""
    heads = ("p50 s", "p95 s", "p99 s", "first 50", "95 s")
    print(f"\n{'kind':<28}{'count':>6}" + "".join(f"{head:>9}" for head in heads) + "  statuses")
    for row in rows:
        cells = [row["seconds"].get(q) for q in ("p50", "p95", "p99")]
        first = [row["first_s"].get(q) for q in ("p50", "p95")]
        numbers = "".join(f"{'' if value is None else format(value, '.2f'):>9}" for value in (*cells, *first))
        statuses = ", ".join(f"{count} × {status}" for status, count in row["statuses"].items())
        print(f"{row['kind']:<28}{row['count']:>6}{numbers}  {statuses}")


def measure(served: Served, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Load and look: figures, and what went wrong."""
    before, counted = served.held(), served.get("/memory")["load"]
    run = Run(served, arguments.requests, arguments.seed)
    started = time.perf_counter()
    asyncio.run(run.clients(arguments.concurrent))
    seconds = time.perf_counter() - started
    wrong = [f"{o.kind}: {o.failure}" for o in run.outcomes if o.failure is not None]
    if len(run.outcomes) != arguments.requests:
        wrong.append(f"{len(run.outcomes)} of {arguments.requests} requests came back")
    wrong += [still] if (still := idle(served)) else []
    load, after = served.get("/memory")["load"], served.held()
    wrong += left_behind(before, after, run.samples)
    beyond = asyncio.run(beyond_the_limit(served.url, 2 * arguments.limit))
    if set(beyond) - {200, 429}:
        wrong.append(f"beyond the limit: {beyond}")
    wrong += [still] if (still := idle(served)) else []
    figures = {
        "requests": arguments.requests,
        "concurrent": arguments.concurrent,
        "cpus_of_server_and_engine": arguments.cpus or "all",
        "ready_s": round(served.ready_s, 2),
        "seconds": round(seconds, 1),
        "requests_per_s": round(arguments.requests / seconds, 2),
        "generated_tokens_per_s": round(
            (load["generated_tokens"] - counted["generated_tokens"]) / seconds, 1
        ),
        "prompt_tokens_per_s": round((load["prompt_tokens"] - counted["prompt_tokens"]) / seconds, 1),
        "images_per_s": round((load["items_encoded"] - counted["items_encoded"]) / seconds, 2),
        "growth_mib_in_4000_requests": {name: slope_mib(run.samples, name) for name in ("server", "engine")},
        "held": {
            "before": {name: asdict(one) for name, one in before.items()},
            "after": {name: asdict(one) for name, one in after.items()},
            "by_requests": {count: {n: asdict(h) for n, h in held.items()} for count, held in run.samples},
        },
        "twice_the_limit_at_once": dict(beyond),
        "kinds": table(run.outcomes),
    }
    return figures, wrong


def tell(figures: dict[str, Any], wrong: Sequence[str], log: str, out: Path | None) -> None:
    """Print and save the figures; exits with 1, and the end of the server's log, where anything was wrong."""
    show(figures["kinds"])
    for name in ("ready_s", "seconds", "requests_per_s", "generated_tokens_per_s", "prompt_tokens_per_s"):
        print(f"{name:<28}{figures[name]:>10}")
    print(f"growth in 4,000 requests    {figures['growth_mib_in_4000_requests']} MiB")
    print(f"twice the limit at once     {figures['twice_the_limit_at_once']}")
    for what, count in Counter(wrong).most_common(20):
        print(f"WRONG, {count} times: {what}")
    # Imported last: it loads torch, which the clients should not share their memory and time with.
    from benchmarks import machine

    print(machine.describe())
    machine.save("server/load", {**figures, "wrong": list(wrong)}, out)
    if wrong:
        print(f"\nthe end of the server's log:\n{log}")
        sys.exit(1)


def main() -> None:
    """Serve, load, look, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--limit", type=int, default=256, help="requests that the server lets in at once")
    parser.add_argument("--cpus", default="", help="of server and engine, such as 0,1; all without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cpus = [int(number) for number in arguments.cpus.split(",") if number]
    options = ["--served-model-name", MODEL, "--max-concurrent", str(arguments.limit)]
    with serve(MODEL, options, cpus=cpus, quiet=False) as served:
        figures, wrong = measure(served, arguments)
        log = served.tail()
    tell(figures, wrong, log, arguments.out)


if __name__ == "__main__":
    main()
