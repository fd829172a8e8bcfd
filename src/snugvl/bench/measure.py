"""A measurement from its start to its end.

`snugvl serve` is started as a child, or a server found; every level runs, with peaks of memory while requests
do: a snugvl server's ledger, and the driver's count of the GPUs here. What was seen is kept.
"""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import IO, Any, Final, Self

import httpx

from snugvl.bench.load import Level, read
from snugvl.bench.result import (
    BenchmarkResult,
    GpuPeak,
    MemoryPeak,
    Run,
    ServerFacts,
    StartTimes,
    describe_machine,
    higher,
)
from snugvl.bench.workload import Target, Workload, bodies, connect
from snugvl.client.answers import memory as read_memory
from snugvl.client.answers import understood
from snugvl.client.connection import address_of, reads_environment
from snugvl.core.ledger import Ledger
from snugvl.errors import CheckpointError, DoesNotFit, EngineError, EngineUnavailable, InputError, SnugvlError
from snugvl.hardware.nvml import started
from snugvl.version import __version__

POLL_S = 0.02
DRAIN_S = 2
PATIENCE_S = 20.0
BY_EXIT_CODE: dict[int, type[SnugvlError]] = {2: InputError, 3: InputError, 4: CheckpointError, 5: DoesNotFit}

Tell = Callable[[str], None]


def free_port() -> int:
    """A free port of this machine.

    It is below those that systems give to programs that ask for any: none gets it before it is used.
    """
    for port in random.sample(range(20_000, 32_768), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise EngineError("none of 100 ports between 20,000 and 32,767 is free")


class ServerProcess:
    """A snugvl server: `with ServerProcess("pocket", ["--device", "cpu"]) as server: server.wait(print, 60)`.

    `quiet`: without a line in `said` for every request.

    Attributes:
        url: its address.
        command: the command that started it.
        began: `time.perf_counter()` of the start.
    """

    def __init__(self, model: str | None, options: Sequence[str], *, quiet: bool = True) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        named = [model] if model is not None else []
        words = [*named, *options, "--port", str(port), "--drain", str(DRAIN_S)]
        words += ["--quiet"] if quiet else []
        self.command = (sys.executable, "-m", "snugvl", "serve", *words)
        self.began = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        environment = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
        self.began = time.perf_counter()
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl+C is ours; we stop it
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._log is not None
        try:
            self._process.terminate()
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            self._log.close()

    def wait(self, tell: Tell, patience_s: float) -> float:
        """Wait until it takes requests; returns the seconds from its start. `tell` is called for each stage.

        Raises:
            SnugvlError: it ended before (its own words, the exception of its exit code), or took longer.
        """
        assert self._process is not None
        said = ""
        with httpx.Client(trust_env=False, timeout=5) as http:
            while self._process.poll() is None:
                ready, detail = _health(http, self.url)
                seconds = time.perf_counter() - self.began
                if ready:
                    return seconds
                stage = detail.partition(" (")[0]
                if stage and stage != said:
                    tell(stage)
                    said = stage
                if seconds > patience_s:
                    raise EngineUnavailable(f"snugvl serve was not ready after {patience_s:g} s: {detail}")
                time.sleep(POLL_S)
        raise self._failure()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    def said(self) -> list[str]:
        """The lines that it printed on stderr so far."""
        assert self._log is not None
        number = self._log.fileno()  # the server writes where this file's position is: it is left alone
        text = os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def _failure(self) -> SnugvlError:
        assert self._process is not None
        lines = self.said()
        code = self._process.returncode
        message = lines[-1].removeprefix("snugvl: ") if lines else f"it said nothing (exit code {code})"
        kind = BY_EXIT_CODE.get(code, EngineUnavailable)
        return kind(f"snugvl serve did not start: {message}")


# Keys and servers of this shell are for servers elsewhere; a key would lock us out of our own.
OUR_VARIABLES = ("SNUGVL_API_KEY", "SNUGVL_SERVER")


def _health(http: httpx.Client, url: str) -> tuple[bool, str]:
    """(whether the server is ready, what it is doing)."""
    try:
        answer = http.get(f"{url}/health")
        return answer.status_code == 200, str(answer.json().get("detail") or "")
    except (httpx.HTTPError, ValueError):
        return False, ""


LEDGER_EVERY_S = 0.25
GPU_EVERY_S = 0.01


class LedgerWatch:
    """Reads the memory ledger of a server at `/memory`, and keeps its largest readings."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http, self._url = http, url
        self._peak: Ledger | None = None

    async def watch(self) -> None:
        """Read the ledger every `LEDGER_EVERY_S` seconds, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LEDGER_EVERY_S)

    async def look(self) -> None:
        """Take one reading, if the server has one."""
        with suppress(httpx.HTTPError, SnugvlError, ValueError):
            answer = await self._http.get(self._url)
            found = understood(read_memory, answer.json()).ledger
            if found is not None:
                self._peak = higher(self._peak, found)

    def take(self) -> Ledger | None:
        """The largest readings since the last call; None without any."""
        peak, self._peak = self._peak, None
        return peak


class GpuWatch:
    """Samples the memory of every GPU of this machine in a thread of its own."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml or started()
        self._handles = _handles(self._nvml)
        self._before = [self._used(handle) for handle in self._handles]
        self._peaks = list(self._before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-memory", daemon=True)

    def __enter__(self) -> Self:
        if self._handles:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._handles:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def take(self) -> tuple[GpuPeak, ...]:
        """The peaks since the last call."""
        found = []
        for index, handle in enumerate(self._handles):
            peak = max(self._peaks[index], self._used(handle))
            self._peaks[index] = 0
            name, total = self._nvml.nvmlDeviceGetName(handle), self._info(handle).total
            found.append(GpuPeak(str(name), int(total), self._before[index], peak))
        return tuple(found)

    def _watch(self) -> None:
        while not self._over.wait(GPU_EVERY_S):
            for index, handle in enumerate(self._handles):
                self._peaks[index] = max(self._peaks[index], self._used(handle))

    def _used(self, handle: Any) -> int:
        return int(self._info(handle).used)

    def _info(self, handle: Any) -> Any:
        return self._nvml.nvmlDeviceGetMemoryInfo(handle)


def _handles(nvml: Any) -> list[Any]:
    """Handles of the GPUs that report their memory."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount() if nvml is not None else 0):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        with suppress(nvml.NVMLError):
            nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(handle)
    return found


CONNECT_TIMEOUT_S: Final = 5.0
KEEP_ALIVE_S: Final = 60.0
START_PATIENCE_S: Final = 900.0
PROGRESS_S: Final = 15.0  # between two lines about a level that runs


@dataclass(frozen=True, slots=True)
class BenchmarkSettings:
    """Settings of a measurement.

    Attributes:
        server: URL of a running server; None starts one for `model` with `serve_options`.
        levels: (clients, requests) of each level.
        repeat: number of runs of each level.
        warmup: requests of each client before each level that are not counted.
        timeout_s: seconds without a byte from the server, after which a request has failed.
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
    """One measurement. `result` is whole after `run`; after an interrupt it has the levels so far."""

    def __init__(self, settings: BenchmarkSettings, tell: Tell) -> None:
        self._settings, self._tell = settings, tell
        self._runs: list[Run] = []
        self._next_seed = settings.workload.seed + 1  # the first one was for finding out
        self._facts: BenchmarkResult | None = None

    @property
    def result(self) -> BenchmarkResult | None:
        """The result so far; None before the server was found."""
        return replace(self._facts, runs=tuple(self._runs)) if self._facts else None

    def run(self) -> None:
        """Start or find the server, and run all levels.

        Raises:
            SnugvlError: the server can't be started or found, or refuses such requests.
            KeyboardInterrupt: Ctrl+C; `result` has the levels so far.
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
            trust_env=reads_environment(target.address),
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
        """Print now and then how far a level is; a slow one would be silent for minutes."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._tell(f"{len(running.done):,} of {requests:,} answered")

    async def _bodies(self, target: Target, count: int) -> Sequence[bytes]:
        first, self._next_seed = self._next_seed, self._next_seed + count
        return await asyncio.to_thread(bodies, self._settings.workload, target.manner, first, count)


def _forget(ledger: LedgerWatch | None, gpus: GpuWatch | None) -> None:
    """Drop earlier peaks, which don't belong to a level."""
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
