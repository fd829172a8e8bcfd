"""Two checkouts of the server over an engine that computes nothing, in turns: what each protocol costs.

    python -m tests.server.protocol_pairs OTHER [ROUNDS]    OTHER: a checkout with the code to compare with

Microseconds of a request, asked by one client and by 8 at once, and of a streamed delta, each with the
processor time of the server, which a busy machine changes least: of the clock the least of all rounds, of
the processor medians, and of its ratios, this checkout over OTHER, the median of the rounds' ratios.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

WORDS, REQUESTS, STREAMS = 400, 120, 8
SAID = {"role": "user", "content": "Describe the harbour in the picture and count the boats. " * 20}
TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [SAID], "tools": [{"type": "function", "function": TOOL}]}),
    "responses": ("/v1/responses", {"input": [SAID], "tools": [{"type": "function", **TOOL}]}),
    "anthropic": ("/v1/messages", {"model": "m", "max_tokens": 500, "messages": [SAID]}),
    "ollama": ("/api/chat", {"model": "m", "messages": [SAID], "stream": False}),
}
SERVER = """
import sys, socket
from collections import deque
from snugvl.server import run
from snugvl.server.settings import ServerSettings
from tests.server.fake import FakeService, Script
words = tuple(f" word{i}" for i in range(int(sys.argv[1])))
long = lambda request: request.sampling.seed == 1 or request.template
service = FakeService(lambda request: Script(words if long(request) else words[:8]))
service.requests = deque(maxlen=1)
settings = ServerSettings(port=0, names=("m",))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
run.run(service, settings, listener, lambda health: None)
"""


@contextmanager
def served(checkout: Path) -> Iterator[tuple[int, psutil.Process]]:
    """A server of the code of a checkout: its port, its process."""
    environment = {"PYTHONPATH": f"{checkout / 'src'}:{checkout}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", SERVER, str(WORDS)]
    child = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield int(child.stdout.readline()), psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()


async def ask(port: int, path: str, body: dict[str, Any], times: int) -> None:
    """Answers to a request that is sent so many times on one connection, one after the other."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    for _ in range(times):
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200"), answer
        if b"content-length: " in answer:
            await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


def processor_s(process: psutil.Process) -> float:
    """Seconds of processors that all threads of a process have had, to the nanosecond (Linux)."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def timed(server: tuple[int, psutil.Process], work: Any, count: int) -> tuple[float, float]:
    """Microseconds of wall clock and of the server's processors for each of `count`."""
    before, started = processor_s(server[1]), time.perf_counter()
    asyncio.run(work)
    wall, used = time.perf_counter() - started, processor_s(server[1]) - before
    return 1e6 * wall / count, 1e6 * used / count


async def at_once(port: int, path: str, body: dict[str, Any]) -> None:
    """The same of eight clients."""
    await asyncio.gather(*[ask(port, path, body, REQUESTS // 8) for _ in range(8)])


def measured(
    server: tuple[int, psutil.Process], path: str, body: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """Microseconds, wall and processor, of a request and of a delta."""
    streamed = (
        {**body, "stream": True, "options": {"seed": 1}}
        if path.startswith("/api")
        else {**body, "stream": True}
    )
    streamed |= {} if path.startswith("/api") else {"think": True}  # what asks for the long answer
    port = server[0]
    return {
        "request": timed(server, ask(port, path, body, REQUESTS), REQUESTS),
        "request of 8": timed(server, at_once(port, path, body), REQUESTS // 8 * 8),
        "delta": timed(server, ask(port, path, streamed, STREAMS), STREAMS * WORDS),
    }


def main() -> None:
    """Print the table."""
    here, other = Path(__file__).resolve().parents[2], Path(sys.argv[1]).resolve()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    found: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(served(checkout)) for checkout in (here, other))
        time.sleep(5)
        for number in range(-1, rounds):
            for protocol, (path, body) in PROTOCOLS.items():
                pair = [
                    measured(server, path, body)
                    for server in ((ours, theirs) if number % 2 else (theirs, ours))
                ]
                mine, its = pair if number % 2 else pair[::-1]
                for what in mine if number >= 0 else ():
                    found[protocol, what].append((*mine[what], *its[what]))
    columns = f"{'here':>10}{'other':>10}{'ratio':>8}"
    print(f"µs{'':24}{columns}   processor:{columns}")
    for (protocol, what), rows in found.items():
        _, used, _, used2 = (statistics.median(column) for column in zip(*rows, strict=True))
        wall, wall2 = (min(row[i] for row in rows) for i in (0, 2))
        walls, useds = wall / wall2, statistics.median(row[1] / row[3] for row in rows)
        print(
            f"{protocol:12}{what:14}{wall:10.1f}{wall2:10.1f}{walls:8.3f}{used:23.1f}{used2:10.1f}{useds:8.3f}"
        )


if __name__ == "__main__":
    main()
