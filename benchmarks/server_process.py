"""A real `snugvl serve` in processes of its own: started, asked, measured from outside, stopped."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 600.0
STOP_S = 40.0
API = re.compile(r"^API +(http://\S+)/v1 ", re.M)
ENGINE = "snugvl.engine_process"


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds at a moment."""

    rss_bytes: int
    files: int
    threads: int


class Served:
    """A server and its engine. `ready_s`: seconds from the start of the process until requests are taken."""

    def __init__(self, base: str, process: psutil.Process, log: Path, ready_s: float) -> None:
        self.base = base
        self.process = process
        self.log = log
        self.ready_s = ready_s

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

    def get(self, path: str) -> Any:
        """The JSON of a path, whatever its status."""
        return httpx.get(self.base + path, timeout=START_S).json()

    def wait(self, state: str, seconds: float = START_S) -> dict[str, Any]:
        """Wait until /health is in that state, and return it."""
        end = time.monotonic() + seconds
        while (health := self.get("/health"))["state"] != state:
            if time.monotonic() > end:
                raise SystemExit(f"not {state} after {seconds:g} s: {health}\n{self.tail()}")
            time.sleep(0.05)
        found: dict[str, Any] = health
        return found

    def tail(self, lines: int = 30) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text().splitlines()[-lines:])


@contextmanager
def serve(*arguments: str, cpus: Sequence[int] = ()) -> Iterator[Served]:
    """`snugvl serve ARGUMENTS` on a free port, ready, until the block ends; `cpus`: the ones it may use."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = on_cpus([sys.executable, "-m", "snugvl.cli", "serve", *arguments, "--port", "0"], cpus)
        started = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        try:
            served = Served(_base(process, log), psutil.Process(process.pid), log, 0.0)
            served.wait("ready")
            served.ready_s = time.monotonic() - started
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def on_cpus(command: list[str], cpus: Sequence[int]) -> list[str]:
    """The command, so that it and its children only use these CPUs; none: all."""
    return ["taskset", "--cpu-list", ",".join(map(str, cpus)), *command] if cpus else command


def _base(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address that the banner tells."""
    end = time.monotonic() + START_S
    while (found := API.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.01)
    return found[1]


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
