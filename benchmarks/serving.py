"""`snugvl serve` started, asked and watched, a request at a time, on `snugvl.bench`; for the scripts here."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from snugvl.bench.child import Child
from snugvl.bench.exchange import read
from snugvl.bench.load import Level
from snugvl.bench.memory import GpuWatch
from snugvl.bench.record import Record
from snugvl.bench.workload import Manner, Workload, body
from snugvl.hardware.probe import probe

NAME = "m"  # of every model served here
MIB = 1 << 20


def question(size: tuple[int, int] | None, max_tokens: int, seed: int = 1) -> bytes:
    """A request for a streamed, greedy answer of `max_tokens` tokens about a picture of `size` pixels."""
    return body(Workload(size, None, max_tokens, False, seed), Manner(NAME), seed)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that takes requests.

    Attributes:
        began: `time.perf_counter()` of the start of its process.
        ready_s: seconds from there.
        stages: what it was doing on the way, each with the seconds when that was first seen.
    """

    url: str
    began: float
    ready_s: float
    stages: tuple[tuple[float, str], ...]

    def ask(self, asked: bytes) -> Record:
        """What came of a request."""
        return asyncio.run(self._once(asked))

    def first_token_s(self, asked: bytes) -> float:
        """Seconds from the start of the process to the first token of an answer that is asked for now."""
        sent = time.perf_counter() - self.began
        record = self.ask(asked)
        assert record.first_token_s is not None, record.message
        return sent + record.sent_s + record.first_token_s

    async def _once(self, asked: bytes) -> Record:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
            level = Level(http, f"{self.url}/v1/chat/completions")
            await level.run([asked], 1)
        return read(level.done[0])

    def steps(self) -> dict[str, float]:
        """What the engine's process reached on its way, each with the seconds since the server's start."""
        began = time.time() - (time.perf_counter() - self.began)
        return {step["step"]: step["at"] - began for step in self.memory()["start"]}

    def memory(self) -> dict[str, Any]:
        """The server's ledger, load and health, as `/memory` tells them."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/memory", trust_env=False).json()
        return answer


@contextmanager
def served(model: str, options: Sequence[str], *, patience_s: float = 120.0) -> Iterator[Served]:
    """A server of ours while the block runs, on our own engine unless `options` name another `--backend`.

    Raises:
        SnugvlError: it did not start, with its own words.
    """
    stages: list[tuple[float, str]] = []
    engine = [] if "--backend" in options else ["--backend", "native"]
    with Child(model, [*options, *engine, "--served-model-name", NAME]) as child:
        told = child.wait(lambda stage: stages.append((_since(child), stage)), patience_s)
        yield Served(child.url, child.began, told, tuple(stages))


def _since(child: Child) -> float:
    return time.perf_counter() - child.began


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
