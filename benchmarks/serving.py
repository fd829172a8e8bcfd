"""`snugvl serve` started, asked and watched, on `snugvl.bench`: the one harness of all scripts here."""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from snugvl.bench.load import Level, Record, read
from snugvl.bench.measure import GpuWatch, ServerProcess
from snugvl.bench.workload import Manner, Workload, body
from snugvl.hardware.probe import probe

NAME = "m"  # of every model served here, unless the options name it
MIB = 1 << 20
START_S = 600.0
ENGINE = "snugvl.backends.process.engine_process"


def question(size: tuple[int, int] | None, max_tokens: int, seed: int = 1) -> bytes:
    """A request for a streamed, greedy answer of `max_tokens` tokens about a picture of `size` pixels."""
    return body(Workload(size, None, max_tokens, False, seed), Manner(NAME), seed)


@dataclass(frozen=True, slots=True)
class Held:
    """What processes hold at a moment."""

    rss_bytes: int
    files: int
    threads: int


class Served:
    """A server that takes requests, and its engine.

    Attributes:
        url: where it listens.
        process: of the server.
        began: `time.perf_counter()` of the start of its process.
        ready_s: seconds from there.
        stages: what it was doing on the way, each with the seconds when that was first seen.
    """

    def __init__(self, child: ServerProcess, ready_s: float, stages: Iterable[tuple[float, str]]) -> None:
        self._child = child
        self.url, self.began = child.url, child.began
        self.process = psutil.Process(child.pid)
        self.ready_s, self.stages = ready_s, tuple(stages)

    def ask(self, asked: bytes) -> Record:
        """What came of a request."""
        return self.ask_all([asked])[0]

    def ask_all(self, asked: Sequence[bytes]) -> list[Record]:
        """What came of requests that are sent at once."""
        return asyncio.run(self._sent(asked))

    def first_token_s(self, asked: bytes) -> float:
        """Seconds from the start of the process to the first token of an answer that is asked for now."""
        sent = time.perf_counter() - self.began
        record = self.ask(asked)
        assert record.first_token_s is not None, record.message
        return sent + record.sent_s + record.first_token_s

    async def _sent(self, asked: Sequence[bytes]) -> list[Record]:
        async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
            level = Level(http, f"{self.url}/v1/chat/completions")
            await level.run(asked, len(asked))
        return [read(each) for each in level.done]

    def get(self, path: str) -> Any:
        """The JSON of a path, whatever its status."""
        return httpx.get(self.url + path, timeout=START_S, trust_env=False).json()

    def memory(self) -> dict[str, Any]:
        """The server's ledger, load and health, as `/memory` tells them."""
        answer: dict[str, Any] = self.get("/memory")
        return answer

    def steps(self) -> dict[str, float]:
        """What the engine's process reached on its way, each with the seconds since the server's start."""
        began = time.time() - (time.perf_counter() - self.began)
        return {step["step"]: step["at"] - began for step in self.memory()["start"]}

    def wait(self, state: str, seconds: float = START_S) -> dict[str, Any]:
        """Wait until /health is in that state, and return it."""
        end = time.monotonic() + seconds
        while (health := self.get("/health"))["state"] != state:
            if time.monotonic() > end:
                raise SystemExit(f"not {state} after {seconds:g} s: {health}\n{self.tail()}")
            time.sleep(0.05)
        found: dict[str, Any] = health
        return found

    def log(self) -> list[str]:
        """The lines that it printed so far; those of requests only where it isn't quiet."""
        return self._child.said()

    def tail(self, lines: int = 30) -> str:
        """The end of what it printed."""
        return "\n".join(self.log()[-lines:])

    @property
    def engine(self) -> psutil.Process | None:
        """The engine's process as it is now; None while there is none."""
        return next((child for child in self.process.children() if _runs(child, ENGINE)), None)

    def held(self) -> dict[str, Held]:
        """What server and engine hold now, and all decoders of pictures together."""
        engine = self.engine
        decoders = [child for child in self.process.children(recursive=True) if child != engine]
        found = {"server": _held([self.process]), "decoders": _held(decoders)}
        return found if engine is None else {**found, "engine": _held([engine])}


@contextmanager
def serve(
    model: str,
    options: Sequence[str] = (),
    *,
    patience_s: float = START_S,
    cpus: Sequence[int] = (),
    quiet: bool = True,
) -> Iterator[Served]:
    """A server of ours while the block runs, on our own engine unless `options` name another `--backend`.

    Args:
        cpus: the ones that it and its processes may use; none: all.
        quiet: without a line in its log for every request.

    Raises:
        SnugvlError: it did not start, with its own words.
    """
    stages: list[tuple[float, str]] = []
    engine = [] if "--backend" in options else ["--backend", "native"]
    name = [] if "--served-model-name" in options else ["--served-model-name", NAME]
    with ExitStack() as stack:
        with only_on(cpus):
            child = stack.enter_context(ServerProcess(model, [*options, *engine, *name], quiet=quiet))
        ready_s = child.wait(lambda stage: stages.append((_since(child), stage)), patience_s)
        yield Served(child, ready_s, stages)


@contextmanager
def only_on(cpus: Sequence[int]) -> Iterator[None]:
    """Processes that are started in here only use these CPUs; none: all of ours."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or ours)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def _since(child: ServerProcess) -> float:
    return time.perf_counter() - child.began


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False


def _held(processes: Sequence[psutil.Process]) -> Held:
    rss = files = threads = 0
    for process in processes:
        try:
            rss += process.memory_info().rss
            files += process.num_fds()
            threads += process.num_threads()
        except psutil.Error:  # ended meanwhile
            continue
    return Held(rss, files, threads)


def gpu_peak_bytes(watch: GpuWatch) -> int | None:
    """The most that all processes held since the last look, above what they held at first; None: no GPU.

    Of the GPU that CUDA calls the first, which need not be NVML's.
    """
    peaks = watch.take()
    if not peaks:
        return None
    import pynvml  # type: ignore[import-untyped]

    uuid = probe().gpus[0].uuid
    assert uuid is not None
    index: int = pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    peak = peaks[index]
    return max(peak.peak_bytes - peak.before_bytes, 0)
