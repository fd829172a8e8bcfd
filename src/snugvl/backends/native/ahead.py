"""Has kernels compiled before requests need them, beside the engine that loads, and then serves.

A kernel that was never compiled on this machine takes a second or more, and all requests wait for it. So
while weights are loaded processes of the lowest priority (`kernel_processes.py`) compile what any step may
need into Triton's folder, each its share; from there a kernel is loaded within some milliseconds. A file
beside them says that it is done, for the next start: of this model, in these formats, on such a GPU, by this
version.

It makes nothing worse: where it can't run or fails, a kernel is compiled when it is needed, as without it.
"""

import hashlib
import json
import logging
import threading
import time
from pathlib import Path

import torch

from snugvl.backends.native.kernel_processes import KernelProcesses
from snugvl.core.config import EngineConfig
from snugvl.core.folders import sources_digest
from snugvl.core.options import Progress
from snugvl.engine.precompile import CompileJob, compile_job_of
from snugvl.layers.compilations import elsewhere
from snugvl.models.networks import LoadableNetwork

logger = logging.getLogger(__name__)

_CANT = "kernels can't be compiled ahead; each is compiled when it is needed"
CHECKED_S = 0.2  # in which it is known whether all was compiled before, as loading takes longer
FIRST_S = 10.0  # that a first start waits for kernels
_SOURCES = ("layers", "models", "engine")  # of what is compiled, and of what decides what


class KernelsAhead:
    """One attempt at all kernels of an engine."""

    def __init__(self, processes: KernelProcesses | None = None) -> None:
        """`processes`: processes that may have been started before it is known what to compile."""
        self.finished = threading.Event()  # or given up
        self.first = threading.Event()  # what a first question needs is compiled, or that is given up
        self._processes = processes or KernelProcesses()

    def begin(self, network: LoadableNetwork, config: EngineConfig, device: torch.device) -> None:
        """Start, and return at once. Nothing is done for a device without kernels.

        `network`: in its final formats, with or without memory.
        """
        try:
            if device.type != "cuda" or torch.version.hip is not None:
                self._end()
                return
            wanted = compile_job_of(network, config, device)
        except Exception:
            logger.exception(_CANT)
            self._end()
            return
        threading.Thread(target=self._run, args=(wanted,), name="snugvl-kernels", daemon=True).start()

    def wait_for_first(self, report: Progress) -> None:
        """Wait for the kernels of a first question, at a first start: they would be compiled twice at once.

        Not for long: a machine of few processors answers sooner by compiling what it needs alone.
        """
        if not self.first.wait(CHECKED_S):
            report("compiling kernels, for the first start of this model on this GPU", 0.95)
            self.first.wait(FIRST_S)

    def stop(self) -> None:
        """End it. Safe to call twice, and before it has begun."""
        self._processes.stop()

    def _run(self, wanted: CompileJob) -> None:
        try:
            from triton import __version__, knobs  # which only GPUs bring

            self.compile(wanted, Path(knobs.cache.dir), __version__)
        except Exception:
            logger.exception(_CANT)
        finally:
            self._end()

    def _end(self) -> None:
        self._processes.stop()
        self.first.set()
        self.finished.set()

    def compile(self, wanted: CompileJob, folder: Path, version: str) -> None:
        """Compile into Triton's `folder`, unless that was done before by this `version` of it."""
        done = folder / f"snugvl-{name_of(wanted, version)}.done"
        if done.exists() or not self._processes.start():
            return
        begun, kernels = time.monotonic(), 0
        for code, lines in self._processes.ask(wanted, self.first.set, _heard):
            if self._processes.stopped:
                return
            if code != 0 or not lines:
                why = lines[-1] if lines else f"its process ended with {code}"
                logger.info("kernels can't be compiled ahead, each is compiled when it is needed: %s", why)
                return
            report = json.loads(lines[-1])
            kernels += report["kernels"]
            for failure in report["failed"]:
                logger.info("a kernel can't be compiled ahead: %s", failure)
        folder.mkdir(parents=True, exist_ok=True)
        done.touch()
        logger.info("%d kernels are compiled, in %.0f s", kernels, time.monotonic() - begun)


def _heard(what: str, digest: str, who: object) -> None:
    """Let launches here wait for a kernel that a process compiles now: it would be compiled twice at once."""
    if what == "begins":
        elsewhere.begins(digest, who)
    else:
        elsewhere.ends(digest or None, who)


def name_of(wanted: CompileJob, version: str) -> str:
    """The name of a set of kernels: the same for the same model, GPU, sources and versions."""
    named = f"{version} {torch.__version__} {wanted} {sources_digest(*_SOURCES)}"
    return hashlib.sha256(named.encode()).hexdigest()[:16]
