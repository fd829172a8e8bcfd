"""Has kernels compiled before requests need them, beside the engine that loads, and then serves.

A kernel that was never compiled on this machine takes a second or more, and everybody waits for it. So while
weights are loaded a process of the lowest priority (`kernel_process.py`) compiles what any step may
need into Triton's folder; from there a kernel is loaded within some milliseconds. A file beside them says
that it is done, for the next start: of this model, in these formats, on such a GPU, by this version.

It makes nothing worse: where it can't run or fails, a kernel is compiled when it is needed, as without it.
"""

import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal, get_args

import torch

import snugvl
from snugvl.core.config import EngineConfig
from snugvl.engine.precompile import CompileJob, compile_job_of
from snugvl.errors import RequestError
from snugvl.hardware import host
from snugvl.models.networks import LoadableNetwork

logger = logging.getLogger(__name__)

Ahead = Literal["none", "kernels", "graphs"]
VARIABLE = "SNUGVL_AHEAD"
THREADS = 8  # that compile, at most; half of the processors, which others have first
LEAST_MEMORY_BYTES = 2 << 30  # of main memory that must be free: the process takes about half a GiB
COMMAND = (sys.executable, "-m", "snugvl.backends.native.kernel_process")
_CANT = "kernels can't be compiled ahead; each is compiled when it is needed"
_SOURCES = ("layers", "models", "engine")  # of what is compiled, and of what decides what


def ahead_of(value: str | None) -> Ahead:
    """What is done before it is needed: `SNUGVL_AHEAD`.

    Raises:
        RequestError: it is unknown.
    """
    for known in get_args(Ahead):
        if value == known:
            return known  # type: ignore[no-any-return]
    if value:
        raise RequestError(
            f"{VARIABLE} {value!r} is unknown; use {', '.join(get_args(Ahead))}", field=VARIABLE
        )
    return "kernels"


class KernelsAhead:
    """One attempt at all kernels of an engine, in a process of its own."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self.finished = threading.Event()  # or given up
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def begin(self, network: LoadableNetwork, config: EngineConfig, device: torch.device) -> None:
        """Start, and return at once. Nothing is done for a device without kernels.

        `network`: in its final formats, with or without memory.
        """
        if device.type != "cuda" or torch.version.hip is not None:
            self.finished.set()
            return
        try:
            wanted = compile_job_of(network, config, device, threads())
        except Exception:
            logger.exception(_CANT)
            self.finished.set()
            return
        threading.Thread(target=self._run, args=(wanted,), name="snugvl-kernels", daemon=True).start()

    def stop(self) -> None:
        """End it. Safe to call twice, and before it has begun."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def _run(self, wanted: CompileJob) -> None:
        try:
            from triton import __version__, knobs  # which only GPUs bring

            self.compile(wanted, Path(knobs.cache.dir), __version__)
        except Exception:
            logger.exception(_CANT)
        finally:
            self.finished.set()

    def compile(self, wanted: CompileJob, folder: Path, version: str) -> None:
        """Compile into Triton's `folder`, unless that was done before by this `version` of it."""
        done = folder / f"snugvl-{_name_of(wanted, version)}.done"
        if done.exists():
            return
        if host.memory().free_bytes < LEAST_MEMORY_BYTES:
            logger.info("too little main memory is free to compile kernels ahead")
            return
        begun = time.monotonic()
        code, lines = self._ask(pickle.dumps(wanted))
        if self._stopped:
            return
        if code != 0 or not lines:
            why = lines[-1] if lines else f"its process ended with {code}"
            logger.info("kernels can't be compiled ahead, each is compiled when it is needed: %s", why)
            return
        report = json.loads(lines[-1])
        for failure in report["failed"]:
            logger.info("a kernel can't be compiled ahead: %s", failure)
        folder.mkdir(parents=True, exist_ok=True)
        done.touch()
        logger.info("%d kernels are compiled, in %.0f s", report["kernels"], time.monotonic() - begun)

    def _ask(self, order: bytes) -> tuple[int, list[str]]:
        """The process' exit code and what it said; without a GPU, and with one thread for torch."""
        with self._lock:
            if self._stopped:
                return 0, []
            self._process = subprocess.Popen(  # noqa: S603 (ourselves)
                [*self._command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        said = self._process.communicate(order)[0].decode("utf-8", "replace")
        return self._process.returncode, said.strip().splitlines()


def threads() -> int:
    """That compile on this machine."""
    return max(1, min(THREADS, (os.cpu_count() or 1) // 2))


def _name_of(wanted: CompileJob, version: str) -> str:
    """What is compiled: the same for the same model, GPU, sources and versions."""
    digest = hashlib.sha256(f"{version} {torch.__version__} {wanted}".encode())
    for room in _SOURCES:
        for path in sorted((Path(snugvl.__file__).parent / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
