"""A measurement from its start to its end: start or find the server, run every level, keep what was seen."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import httpx

from snugvl.bench.child import ServerProcess
from snugvl.bench.load import Level
from snugvl.bench.memory import GpuWatch, LedgerWatch, MemoryPeak
from snugvl.bench.record import read
from snugvl.bench.result import BenchmarkResult, Run, ServerFacts, StartTimes, describe_machine
from snugvl.bench.target import Target, connect
from snugvl.bench.workload import Workload, bodies
from snugvl.client.connection import address_of
from snugvl.version import __version__

CONNECT_TIMEOUT_S: Final = 5.0
KEEP_ALIVE_S: Final = 60.0
START_PATIENCE_S: Final = 900.0
PROGRESS_S: Final = 15.0  # between two lines about a level that runs

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchmarkSettings:
    """What to measure.

    Attributes:
        server: URL of one that runs; None starts one for `model` with `serve_options`.
        levels: (clients, requests) of each.
        repeat: how often each level runs.
        warmup: requests of each client before each level that are not counted.
        timeout_s: without a byte from the server, after which a request has failed.
    """

    server: str | None
    api_key: str | None
    model: str | None
    serve_options: tuple[str, ...]
    levels: tuple[tuple[int, int], ...]
    workload: Workload
    repeat: int
    warmup: int
    timeout_s: float


class BenchmarkRun:
    """One measurement; `result` is whole after `run`, and holds what there is after an interrupt of it."""

    def __init__(self, settings: BenchmarkSettings, tell: Tell) -> None:
        self._settings, self._tell = settings, tell
        self._runs: list[Run] = []
        self._next_seed = settings.workload.seed + 1  # the first one was for finding out
        self._facts: BenchmarkResult | None = None

    @property
    def result(self) -> BenchmarkResult | None:
        """What was measured so far; None before the server was found."""
        return replace(self._facts, runs=tuple(self._runs)) if self._facts else None

    def run(self) -> None:
        """Everything.

        Raises:
            SnugvlError: the server can't be started or found, or refuses what would be asked.
            KeyboardInterrupt: Ctrl+C; what was measured is in `result`.
        """
        settings = self._settings
        # The GPUs of this machine may not be those of the server.
        here = settings.server is None or address_of(settings.server).local
        with ExitStack() as open_things:
            watch = open_things.enter_context(GpuWatch()) if here else None
            child, ready_s = None, None
            if settings.server is None:
                child = open_things.enter_context(ServerProcess(settings.model, settings.serve_options))
                ready_s = child.wait(self._tell, START_PATIENCE_S)
            target = self._connect(child)
            start = _start(child, ready_s, target)
            self._facts = _facts(settings, target, child, start)
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, self._interruptible():
                runner.run(self._levels(target, watch))

    def _connect(self, child: ServerProcess | None) -> Target:
        settings = self._settings
        if child is None:
            assert settings.server is not None
            where = (settings.server, settings.api_key, settings.model)
        else:
            where = (child.url, None, None)
        return connect(*where, settings.workload, timeout_s=settings.timeout_s)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            assert self._facts is not None
            self._facts = replace(self._facts, interrupted=True)
            raise

    async def _levels(self, target: Target, watch: GpuWatch | None) -> None:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S
        )
        async with httpx.AsyncClient(
            headers=target.headers,
            timeout=httpx.Timeout(self._settings.timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=limits,
            trust_env=not target.address.local,
        ) as http:
            ledger = LedgerWatch(http, target.address.url("/memory")) if target.has_ledger else None
            for repeat in range(self._settings.repeat):
                for clients, requests in self._settings.levels:
                    await self._level(http, target, (clients, requests, repeat), ledger, watch)
                    if all(record.error is not None for record in self._runs[-1].records):
                        return  # nothing is learned from more of these

    async def _level(
        self,
        http: httpx.AsyncClient,
        target: Target,
        level: tuple[int, int, int],
        ledger: LedgerWatch | None,
        gpus: GpuWatch | None,
    ) -> None:
        clients, requests, repeat = level
        url = target.address.url("/v1/chat/completions")
        again = f", repeat {repeat + 1} of {self._settings.repeat}" if self._settings.repeat > 1 else ""
        self._tell(f"{_count(clients, 'client')}, {_count(requests, 'request')}{again}")
        warm = await self._bodies(target, clients * self._settings.warmup)
        measured = await self._bodies(target, requests)
        await Level(http, url).run(warm, clients)
        running = Level(http, url)
        beside = [asyncio.ensure_future(self._progress(running, requests))]
        if ledger:
            beside.append(asyncio.ensure_future(ledger.watch()))
        _forget(ledger, gpus)
        try:
            await running.run(measured, clients)
            if ledger:
                await ledger.look()
        finally:
            for task in beside:
                task.cancel()
            memory = MemoryPeak(ledger.take() if ledger else None, gpus.take() if gpus else ())
            records = tuple(read(exchange) for exchange in running.done)
            if records:
                self._runs.append(Run(clients, repeat, requests, records, running.generator, memory))

    async def _progress(self, running: Level, requests: int) -> None:
        """Says now and then how far a level is; a slow one would be silent for minutes."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._tell(f"{len(running.done):,} of {requests:,} answered")

    async def _bodies(self, target: Target, count: int) -> Sequence[bytes]:
        first, self._next_seed = self._next_seed, self._next_seed + count
        return await asyncio.to_thread(bodies, self._settings.workload, target.manner, first, count)


def _forget(ledger: LedgerWatch | None, gpus: GpuWatch | None) -> None:
    """Peaks of before don't belong to a level."""
    if ledger:
        ledger.take()
    if gpus:
        gpus.take()


def _facts(
    settings: BenchmarkSettings, target: Target, child: ServerProcess | None, start: StartTimes | None
) -> BenchmarkResult:
    return BenchmarkResult(
        taken_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        snugvl=__version__,
        machine=describe_machine(),
        server=ServerFacts(
            target.address.root, target.manner, target.software, child.command if child else None
        ),
        workload=settings.workload,
        start=start,
        runs=(),
        notes=target.notes,
    )


def _start(child: ServerProcess | None, ready_s: float | None, target: Target) -> StartTimes | None:
    if child is None or ready_s is None:
        return None
    first = target.first_token_at
    return StartTimes(ready_s, first - child.began if first is not None else None)


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' if number != 1 else ''}"
