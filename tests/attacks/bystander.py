"""What attacks on a server do to those who only stand by, against a real `snugvl serve` on the CPU.

    python -m tests.attacks.bystander [--only NAME…] [--part 1/8] [--list] [--patience 60] [--out FILE]

Each attack: somebody streams text without end, somebody asks for /health twenty times a second, and then
attackers begin, in a process of their own, for 15 seconds at most. When they have left, "hi" is asked once;
when that is answered, the bystanders go, too, and whatever the server works on then it does for nobody.

    largest gap of the stream                   ≤ 1 s, or twice that without an attack
    slowest /health                             ≤ 0.5 s, likewise
    memory of the engine; of the rest           ≤ 256 MiB more than before
    "hi" is answered after attackers left       ≤ 2 s
    work when everybody has left                ≤ 2 s
    --max-concurrent                            never exceeded by answers at the same time or by the engine

A server that doesn't recover is killed, and the next attack gets a new one; so is one that takes 3 GiB. What
attackers were answered is in the JSON: refusals are right. Exits with 1 if anything failed.
"""

import argparse
import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from benchmarks.serving import Served, serve

from tests.attacks.content import ALL, act_out, png, seen
from tests.attacks.kit import ATTACK_S, Address, Attack
from tests.attacks.watch import MIB, Sampler, exchange, health, held, idle_after, kill, request, stream
from tests.server.client_requests import MODEL

GAP_S, HEALTH_S, MEMORY_MIB, NEXT_S, AFTERWARDS_S = 1.0, 0.5, 256.0, 2.0, 2.0
MAX_CONCURRENT = 256
GUARD_MIB = 3072  # beyond what it held: then it is killed, before the machine is
KEPT_MIB = 96  # kept from an attack: the next one gets a new server
SETTLE_S = 0.4  # of bystanders before attackers begin
STUCK_S = 90.0  # beyond which no process of ours takes to end
OPTIONS = ("--device", "cpu", "--served-model-name", MODEL)
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}

spawn = multiprocessing.get_context("spawn")


@dataclass(slots=True)
class Row:
    """How bystanders fared; seconds and MiB. `next_s` None: not within the time there was.

    `waited`: attackers stood in the engine's queue until they left: the row says nothing of their requests.
    """

    name: str
    finding: str
    what: str
    attack_s: float = 0.0
    gap_s: float = 0.0
    health_s: float = 0.0
    engine_mib: float = 0.0
    server_mib: float = 0.0
    next_s: float | None = None
    afterwards_s: float = 0.0
    most: int = 0
    limit: int = MAX_CONCURRENT
    engine_died: bool = False
    killed: bool = False
    waited: bool = False
    attackers: dict[str, Any] = field(default_factory=dict)
    bystander: dict[str, Any] = field(default_factory=dict)
    load: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class Servers:
    """One server at a time; a new one for other options, and after one that didn't get over an attack."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._options: tuple[str, ...] | None = None
        self._served: Served | None = None
        self._fresh: dict[str, int] = {}

    def get(self, options: tuple[str, ...]) -> Served:
        """A healthy server with these options."""
        if self._served is None or options != self._options or not self._as_new():
            self.stop()
            print("    (a new server)", flush=True)
            server = serve(MODEL, [*OPTIONS, *options], quiet=False)
            self._options, self._served = options, self._stack.enter_context(server)
            _warm(address_of(self._served))
            self._fresh = held(self._served)
        return self._served

    def stop(self, *, at_once: bool = False) -> None:
        """End it; `at_once`: without asking."""
        if self._served is not None and at_once:
            kill(self._served)
        self._stack.close()
        self._served = None

    def _as_new(self) -> bool:
        assert self._served is not None
        now = held(self._served)
        return all(now[name] - self._fresh[name] < KEPT_MIB * MIB for name in now)


def address_of(served: Served) -> Address:
    """Where it listens."""
    parts = urlsplit(served.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _warm(address: Address) -> None:
    """What the first of its kind costs is no attack's: a grammar, a picture, a stream."""
    where = f"http://{address[0]}:{address[1]}/v1/chat/completions"
    json_object = {**HI, "response_format": {"type": "json_object"}}
    for body in (HI, json_object):
        httpx.post(where, json=body, timeout=60)
    httpx.post(where, content=seen(png(8, 8)), headers={"Content-Type": "application/json"}, timeout=60)
    time.sleep(0.6)


class Bystanders:
    """Both of them, from when the first text came until `leave`."""

    def __init__(self, address: Address) -> None:
        self._stop = spawn.Event()
        self._pipes: list[Connection] = []
        self._processes = []
        for watch in (stream, health):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=watch, args=(address, self._stop, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(STUCK_S), "a bystander gets no answer before any attack"
            pipe.recv()

    def leave(self) -> list[dict[str, Any]]:
        """What they saw: the stream's, then /health's."""
        self._stop.set()
        found = [pipe.recv() if pipe.poll(STUCK_S) else {} for pipe in self._pipes]
        for process in self._processes:
            process.join(STUCK_S)
        return found


def run(attack: Attack, served: Served, patience_s: float) -> Row:
    """One attack and what came of it."""
    address = address_of(served)
    row = Row(attack.name, attack.finding, attack.what)
    if "--max-concurrent" in attack.serve:
        row.limit = int(attack.serve[attack.serve.index("--max-concurrent") + 1])
    ours, theirs = spawn.Pipe()
    attackers = spawn.Process(target=act_out, args=(attack.name, address, theirs), daemon=True)
    attackers.start()
    assert ours.poll(120), f"{attack.name} can't be prepared"
    ours.recv()
    restarts = served.get("/health")["restarts"]
    bystanders = Bystanders(address)
    sampler = Sampler(served, address, GUARD_MIB * MIB)
    try:
        time.sleep(SETTLE_S)
        began = time.monotonic()
        ours.send("go")
        left, row.attackers = ours.recv() if ours.poll(ATTACK_S + STUCK_S) else (time.monotonic(), {})
        row.attack_s = round(left - began, 2)
        row.next_s = _next_s(address, left, patience_s, sampler)
        streamed, asked = bystanders.leave()
        # Who doesn't recover isn't waited for once more.
        row.afterwards_s = patience_s if row.next_s is None else idle_after(served, patience_s)
    finally:
        sampler.stop()
        attackers.terminate()
    row.engine_mib, row.server_mib = sampler.beyond_mib("engine"), sampler.beyond_mib("server")
    row.killed, row.load = sampler.killed, sampler.load
    row.gap_s = _longest(streamed.get("gaps", []), began)
    row.health_s = _longest(asked.get("waits", []), began)
    row.most = max(row.attackers.get("live_200", 0) + 1, row.load["in_engine"] if row.limit < 256 else 0)
    row.bystander = {
        "pieces": streamed.get("pieces"),
        "refused": streamed.get("refused"),
        "health": asked.get("statuses"),
    }
    with suppress(httpx.HTTPError):
        row.engine_died = served.get("/health")["restarts"] != restarts
    return row


def _next_s(address: Address, left: float, patience_s: float, sampler: Sampler) -> float | None:
    """Seconds from then until "hi" is answered, whatever it is answered before."""
    while (now := time.monotonic()) < left + patience_s and not sampler.killed:
        answer = exchange(address, request("/v1/chat/completions", HI), min(now + 10, left + patience_s))
        if answer is not None and answer[9:12] == b"200":
            return time.monotonic() - left
        time.sleep(0.05)
    return None


def _longest(times: Sequence[tuple[float, float]], since: float) -> float:
    """The longest of those that ended after a moment."""
    return max((seconds for ended, seconds in times if ended >= since), default=0.0)


def judge(row: Row, quiet: Sequence[Row], attack: Attack) -> None:
    """Compare with the limits. Gaps and waits: twice those without attack are the machine's, not ours."""
    gap_s = max([GAP_S, *(2 * one.gap_s for one in quiet)])
    health_s = max([HEALTH_S, *(2 * one.health_s for one in quiet)])
    slowest_s = row.attackers.get("slowest_answer_s", 0.0)
    checks = {
        "gap": row.gap_s > gap_s,
        "/health": row.health_s > health_s,
        "engine's memory": row.engine_mib > MEMORY_MIB,
        "server's memory": row.server_mib > MEMORY_MIB,
        "next": row.next_s is None or row.next_s > NEXT_S,
        "works for nobody": row.afterwards_s > AFTERWARDS_S,
        "--max-concurrent": row.most > row.limit,
        "engine died": row.engine_died,
        "killed": row.killed,
        "unanswered": attack.answered_s is not None and slowest_s > attack.answered_s,
    }
    statuses = row.attackers.get("statuses", {})
    row.waited = set(statuses) == {"left"} and row.load["waiting"] > 0 and row.load["running"] <= 2
    row.failed = [what for what, wrong in checks.items() if wrong]


HEADS = ("gap s", "health s", "engine +MiB", "server +MiB", "next s", "after s", "at once")


def line(row: Row) -> str:
    """Of the table."""
    next_s = "never" if row.next_s is None else f"{row.next_s:.2f}"
    cells = (
        f"{row.gap_s:.2f}", f"{row.health_s:.2f}", f"{row.engine_mib:.0f}", f"{row.server_mib:.0f}", next_s,
        f"{row.afterwards_s:.1f}", f"{row.most}",
    )  # fmt: skip
    good = "ok, but attackers only waited for slots" if row.waited else "ok"
    verdict = f"FAILED: {', '.join(row.failed)}" if row.failed else good
    return f"{row.finding:<8}{row.name:<36}" + "".join(f"{cell:>12}" for cell in cells) + f"  {verdict}"


def head() -> str:
    """Of the table."""
    return f"{'finding':<8}{'attack':<36}" + "".join(f"{name:>12}" for name in HEADS)


def attack_all(chosen: Sequence[Attack], patience_s: float) -> list[Row]:
    """A row for each attack, printed as they come."""
    servers, rows, quiet, measured = Servers(), list[Row](), list[Row](), list[Attack]()
    print(head(), flush=True)
    try:
        for attack in chosen:
            row = _tried(attack, servers, patience_s)
            if row is None:
                continue
            quiet += [row] if attack.finding == "control" else []
            judge(row, quiet, attack)
            rows.append(row)
            measured.append(attack)
            print(line(row), flush=True)
            broken = row.killed or row.engine_died or row.next_s is None or row.afterwards_s > 10
            if broken:
                servers.stop(at_once=True)
    except KeyboardInterrupt:
        print("stopped; what there is, is saved", flush=True)
    finally:
        servers.stop(at_once=True)
    for row, attack in zip(rows, measured, strict=True):  # a control at the end may say more of the machine
        judge(row, quiet, attack)
    return rows


def _tried(attack: Attack, servers: Servers, patience_s: float) -> Row | None:
    """A row; tried again with a new server where an old one wasn't well before the attack.

    None: nor was the new one, on a machine that has too much else to do.
    """
    for _ in range(2):
        try:
            return run(attack, servers.get(attack.serve), patience_s)
        except (AssertionError, EOFError, OSError, httpx.HTTPError) as error:
            print(f"    ({attack.name}: not measured: {type(error).__name__} {error})", flush=True)
        servers.stop(at_once=True)
    return None


def by_attack(row: Row) -> dict[str, Any]:
    """As JSON, numbers rounded."""
    values = {name: getattr(row, name) for name in Row.__dataclass_fields__}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def main() -> None:
    """Attack, look, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="attacks, by any part of their names")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth of them, from the Kth on")
    parser.add_argument("--list", action="store_true", help="name the attacks and do nothing")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a server may recover")
    parser.add_argument("--out", type=Path, help="the JSON; the table goes beside it as .txt")
    arguments = parser.parse_args()
    wanted = arguments.only or [""]
    chosen = [attack for attack in ALL if any(part in attack.name for part in wanted)]
    part, parts = map(int, arguments.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    if arguments.list:
        for attack in chosen:
            print(f"{attack.finding:<8}{attack.name:<36}{attack.what}")
        return
    # Also where it runs in the background, whose shell lets it ignore SIGINT: what there is, is saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    rows = attack_all(chosen, arguments.patience)
    failed = [row.name for row in rows if row.failed]
    # Imported last: it loads torch, which bystanders should not share their memory and time with.
    from benchmarks import machine

    verdict = f"{len(rows) - len(failed)} of {len(rows)} held, in {time.monotonic() - began:.0f} s"
    table = "\n".join([head(), *map(line, rows), "", verdict, str(machine.describe())])
    print(f"\n{table}")
    saved = machine.save("server/bystander", {"attacks": list(map(by_attack, rows))}, arguments.out)
    saved.with_suffix(".txt").write_text(table + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
