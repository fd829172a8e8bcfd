"""Kills, errors and cancellations at random points of the engine's process and of its supervisor.

    python -m tests.backends.process.faults [--faults 300] [--seed 0] [--out FILE]

Some clients ask at once, for text, about pictures, for JSON, for several choices, and one of four leaves. In
the middle of it the process gets a signal, or a point of its threads or of the server's side raises an error
(`faults_child.py` has the points), or everybody leaves. Checked after each: every request has ended,
in a whole answer or an error, within 10 s of the fault; the service is ready by itself and answers; no block,
no piece of shared memory and no request is left. At the end: no thread, descriptor, file or process. Exits
with 1 if not.
"""

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import psutil
from PIL import Image

from snugvl.backends.process import life, wire
from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine, Supervision
from snugvl.core.messages import Grammar, Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import SnugvlError

COMMAND = (sys.executable, str(Path(__file__).with_name("faults_child.py")))
WATCHED = Supervision(ping_s=0.2, snapshot_s=0.05, settle_s=0.0, watchdog_s=600.0)
LIMIT_S = 10.0  # from the fault, or the request's beginning if that is later, to its end
PATIENCE_S = 300.0  # until something is taken for hung
LEAVE_S = (
    10.0  # until the last process has ended: a trial of a grammar sees by itself that nobody asks any more
)
POINTS = (
    "step", "memory", "forward", "picture", "mask", "text", "mailbox", "prompt", "grammar", "add", "abort",
    "stats", "measure", "go_on", "encode", "decode", "handle", "reply",
)  # fmt: skip
ERRORS = (
    "ValueError", "MemoryError", "EngineError", "DoesNotFit", "PanicError", "KeyboardInterrupt", "SystemExit",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT")
OURS = ("encode", "receive", "_deliver", "ping")  # points of the server's side
SCHEMA = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}'


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done, `delay_s` after the clients begin. `point`: or the signal; `count`: passes before it."""

    kind: str
    point: str = ""
    error: str = ""
    count: int = 0
    delay_s: float = 0.0

    @property
    def name(self) -> str:
        """Its row of the table."""
        return self.kind if self.kind == "everybody leaves" else f"{self.kind}: {self.point}"


@dataclass(slots=True)
class Found:
    """What was seen: of all faults, and by row of the table."""

    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ready_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def table(self) -> str:
        """One line for each kind of fault."""
        lines = [
            f"{'fault':32} {'times':>5} {'came':>5} {'deaths':>6} {'slowest end':>11} {'ready after':>11}"
        ]
        lines += [
            f"{name:32} {count:5} {self.raised[name]:5} {self.restarts[name]:6} "
            f"{self.slowest_s[name]:9.2f} s {self.ready_s[name]:9.2f} s"
            for name, count in sorted(self.faults.items())
        ]
        total = sum(self.faults.values()), sum(self.raised.values()), sum(self.restarts.values())
        lines.append(f"{'all':32} {total[0]:5} {total[1]:5} {total[2]:6}")
        return "\n".join([*lines, f"requests: {dict(self.ends)}", *(f"WRONG: {each}" for each in self.wrong)])


def fault_of(random: Random) -> Fault:
    """One of them, at random."""
    delay_s = random.uniform(0.0, 0.5)
    chance = random.random()
    if chance < 0.55:
        point, error = random.choice(POINTS), random.choice(ERRORS)
        return Fault("engine", point, error, random.choice((0, 0, 1, 3, 9)), delay_s)
    if chance < 0.8:
        return Fault("signal", random.choice(SIGNALS), delay_s=delay_s)
    if chance < 0.9:
        return Fault(
            "server", random.choice(OURS), random.choice(ERRORS[:2]), random.choice((0, 1, 3)), delay_s
        )
    return Fault("everybody leaves", delay_s=delay_s)


def request_of(random: Random) -> Request:
    """What one of the clients asks."""
    picture = Image.new("RGB", (random.randrange(60, 300), random.randrange(60, 300)), "red")
    sampling = SamplingParams(max_tokens=random.randrange(4, 60), ignore_eos=True)
    match random.randrange(5):
        case 0:
            return Request((user(picture, "What is in this image?"),), sampling)
        case 1:
            return Request(
                (user("hello"),), SamplingParams(max_tokens=30), grammar=Grammar("json_schema", SCHEMA)
            )
        case 2:
            return Request((user("hello"),), SamplingParams(max_tokens=20, n=3, temperature=1.0))
        case _:
            return Request((user("hello " * random.randrange(1, 60)),), sampling)


@contextmanager
def place() -> Iterator[Path]:
    """A folder for temporary files, of this process and all that it starts, with the pipe to the engine's."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, kept = Path(name), tempfile.tempdir
        (folder / "tmp").mkdir()
        os.mkfifo(folder / "told")
        (folder / "raised").touch()
        # Of all processes that descend from this one the path says so, whoever their parent is now.
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), name)))
        with patch.dict(
            os.environ,
            {
                "TMPDIR": str(folder / "tmp"),
                "FAULTS_TOLD": str(folder / "told"),
                "FAULTS_RAISED": str(folder / "raised"),
                "PYTHONPATH": path,
            },
        ):
            tempfile.tempdir = None
            try:
                yield folder
            finally:
                tempfile.tempdir = kept


class Round:
    """One fault, and what becomes of everybody."""

    def __init__(self, service: SupervisedEngine, fault: Fault, random: Random, folder: Path) -> None:
        self._service, self._fault, self._random, self._folder = service, fault, random, folder
        self._fault_at = 0.0
        self._ended: list[tuple[float, float]] = []  # of requests: when they began and ended
        self._raised = 0  # on the server's side

    async def run(self, found: Found) -> None:
        """Ask, do it, wait, look."""
        name, lives = self._fault.name, self._service._lives.count
        before = (self._folder / "raised").read_text()
        clients = [asyncio.create_task(self._client(found)) for _ in range(self._random.randrange(3, 7))]
        await asyncio.sleep(self._fault.delay_s)
        self._fault_at = time.monotonic()
        with self._server_side():
            self._do(clients)
            _, hung = await asyncio.wait(clients, timeout=PATIENCE_S)
        for each in hung:
            each.cancel()
            found.wrong.append(f"{self._fault}: a request hangs")
        for each in clients:
            if each.done() and not each.cancelled() and each.exception() is not None:
                found.wrong.append(f"{self._fault}: {each.exception()!r}")
        self._tell("clear")
        slowest_s = max((end - max(begun, self._fault_at) for begun, end in self._ended), default=0.0)
        await self._look(found)
        raised = (self._folder / "raised").read_text() != before or self._raised > 0
        found.faults[name] += 1
        found.raised[name] += raised or self._fault.kind in ("signal", "everybody leaves")
        found.restarts[name] += self._service._lives.count - lives
        found.slowest_s[name] = max(found.slowest_s[name], slowest_s)
        found.ready_s[name] = max(found.ready_s[name], time.monotonic() - self._fault_at)

    async def _client(self, found: Found) -> None:
        await asyncio.sleep(self._random.uniform(0.0, 0.3))
        leaves_s = self._random.uniform(0.0, 0.5) if self._random.random() < 0.25 else None
        asked = asyncio.create_task(self._ask())
        begun = time.monotonic()
        try:
            await asyncio.wait([asked], timeout=leaves_s)
            end = "left" if not asked.done() else "answered" if asked.exception() is None else "error"
            if asked.done() and asked.exception() is not None:
                error = asked.exception()
                ours = "on purpose" in str(error)
                if not (isinstance(error, SnugvlError) or ours):
                    raise AssertionError(f"a request ended with {error!r}")
        except asyncio.CancelledError:
            end = "left"
        asked.cancel()
        await asyncio.wait([asked])
        self._ended.append((begun, time.monotonic()))
        found.ends[end] += 1

    async def _ask(self) -> None:
        stream = await self._service.submit(request_of(self._random))
        with stream:
            deltas = [delta async for delta in stream]
        assert deltas[-1].usage is not None, "an answer ended in the middle"

    def _do(self, clients: list["asyncio.Task[None]"]) -> None:
        match self._fault.kind:
            case "engine":
                self._tell(f"{self._fault.point} {self._fault.error} {self._fault.count}")
            case "signal":
                if (pid := self._service.pid) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.Signals[self._fault.point])
            case "everybody leaves":
                for each in clients:
                    each.cancel()

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # nobody listens: it is starting
            pipe = os.open(self._folder / "told", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, f"{line}\n".encode())
            os.close(pipe)

    @contextmanager
    def _server_side(self) -> Iterator[None]:
        """The point of the server's side fails, if it is one."""
        if self._fault.kind != "server":
            yield
            return
        owner: Any = wire if self._fault.point in ("encode", "receive") else life.EngineProcess
        function, left = getattr(owner, self._fault.point), [self._fault.count]
        error = {"ValueError": ValueError, "MemoryError": MemoryError}[self._fault.error]

        def wrong(*arguments: Any, **options: Any) -> Any:
            # What is no request has no one who could be told: it can't fail but by a bug.
            if self._fault.point != "encode" or isinstance(arguments[0], wire.Submit):
                left[0] -= 1
                if left[0] == -1:
                    self._raised += 1
                    raise error("on purpose")
            return function(*arguments, **options)

        with patch.object(owner, self._fault.point, wrong):
            yield

    async def _look(self, found: Found) -> None:
        """Wait until it serves, and nothing is left of what ran."""

        def idle() -> bool:
            process, seen = self._service._life, self._service.snapshot
            return (
                process is not None
                and seen is not None
                and process.running == 0
                and (process._arena is None or not process._arena._used)
                and (seen.load.running, seen.load.waiting) == (0, 0)
                and seen.load.free_blocks == seen.load.num_blocks
            )

        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            while not self._service.health.ready and time.monotonic() < end:
                await asyncio.sleep(0.01)
            try:
                stream = await self._service.submit(
                    Request((user("hello"),), SamplingParams(max_tokens=2, ignore_eos=True))
                )
                assert [delta async for delta in stream][-1].usage is not None
                while not idle() and self._service.health.ready and time.monotonic() < end:
                    await asyncio.sleep(0.01)
                if idle():
                    return
            except SnugvlError:  # what was told comes late, or it dies only now
                await asyncio.sleep(0.01)
        found.wrong.append(
            f"{self._fault}: {self._service.health.detail}; something is left or it doesn't serve"
        )


async def break_it(faults: int, seed: int, folder: Path, found: Found) -> None:
    """So many faults, one after the other."""
    random = Random(seed)
    service = SupervisedEngine(EngineChoice(device="cpu"), WATCHED, COMMAND)
    await service.start()
    try:
        for number in range(faults):
            while not service.health.ready:
                assert service.health.state != "failed", service.health.detail
                await asyncio.sleep(0.01)
            fault = fault_of(random)
            await Round(service, fault, random, folder).run(found)
            if sys.stderr.isatty() or number % 20 == 19:
                sys.stderr.write(f"{number + 1} of {faults}, {len(found.wrong)} wrong\n")
    finally:
        await service.close()


def held() -> dict[str, int]:
    """What this process has: threads, descriptors, shared memory that is mapped."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "arenas": maps.count("memfd:snugvl"),
    }


def children() -> set[int]:
    """Processes that came of this one and live, zombies of it included."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def descendants(marker: str, known: set[int]) -> list[str]:
    """Processes that came of this one and live, but for those `known`, which others have started."""
    lines = []
    for pid in children() - known:
        with suppress(psutil.Error):
            each = psutil.Process(pid)
            lines.append(" ".join(each.cmdline()) or each.name())
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if marker in each.environ().get("PYTHONPATH", "") and each.pid != os.getpid():
                lines.append(" ".join(each.cmdline()))
    return lines


def run(faults: int, seed: int) -> Found:
    """All of it; what was found, with what is left in `wrong`."""
    found, known = Found(), children()
    with place() as folder:
        asyncio.run(break_it(0, seed, folder, found))  # what is imported and started once is there
        before = held()
        asyncio.run(break_it(faults, seed, folder, found))
        end = time.monotonic() + LEAVE_S
        while (left := descendants(folder.name, known)) and time.monotonic() < end:
            time.sleep(0.05)
        after = held()
        found.wrong += [f"a process is left: {each}" for each in left]
        found.wrong += [
            f"{after[name] - before[name]} {name} are left" for name in before if after[name] > before[name]
        ]
        found.wrong += [f"a file is left: {each}" for each in (folder / "tmp").iterdir()]
    return found


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    found = run(arguments.faults, arguments.seed)
    found.wrong += [f"{name}: {s:.1f} s to end" for name, s in found.slowest_s.items() if s > LIMIT_S]
    sys.stdout.write(found.table() + "\n")
    if arguments.out is not None:
        rows = {
            name: {
                "times": count,
                "came": found.raised[name],
                "deaths": found.restarts[name],
                "slowest_end_s": round(found.slowest_s[name], 3),
                "ready_after_s": round(found.ready_s[name], 3),
            }
            for name, count in sorted(found.faults.items())
        }
        report = {"seed": arguments.seed, "requests": found.ends, "wrong": found.wrong, "faults": rows}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
