"""The process that runs the engine: `python -m` this module, with file descriptors, started by the server.

`backends/process/supervised.py` is the other end of the socket; what to load comes over it. Until then torch
is imported; then the GPU is looked at, its CUDA context made and Triton read, which need no lock of Python's,
while that goes on.
"""

import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from snugvl.backends.native.kernel_processes import VARIABLE, KernelProcesses, ahead_of, nothing_compiled
from snugvl.backends.process.child import HostedModel, Loader, attach, run
from snugvl.backends.process.wire import EngineChoice, HostedEngine
from snugvl.core.messages import Capabilities
from snugvl.core.options import Progress
from snugvl.core.service import mark
from snugvl.hardware.machine import Machine
from snugvl.layers.kernels.compiler.first_launch import read_kernels, read_triton


def prepare() -> None:
    """Import what every engine needs. An error is raised again where the module is imported to be used."""
    gc.disable()  # what imports make stays; to look through it again and again takes an eighth of the time
    with suppress(Exception):
        import torch  # noqa: F401

        mark("torch is imported")


def load(choice: EngineChoice, report: Progress) -> HostedModel:
    """The chosen model with a meter. It imports torch: call it once the server has said what to load."""
    report("starting torch", 0.0)
    return LOADERS[choice.engine](choice, report)


def native(choice: EngineChoice, report: Progress) -> HostedModel:
    """Load the model on our own engine."""
    machine = _look(choice.device, choice.machine)
    ahead, processes = ahead_of(os.environ.get(VARIABLE)), KernelProcesses()
    if ahead != "none" and machine is not None and nothing_compiled():
        processes.start()
    from snugvl.backends.measure import Meter
    from snugvl.backends.native.ahead import KernelsAhead
    from snugvl.backends.native.loading import load_engine
    from snugvl.backends.native.remember import keeper
    from snugvl.planner.engines.native.step_graphs import DRIVER, recordings

    _collect_garbage()
    mark("the engine is imported")
    if machine is not None:
        _beside("kernels are read", read_kernels)
    kernels = None if ahead == "none" else KernelsAhead(processes)
    loaded = load_engine(choice, planned=choice.planned, machine=machine, progress=report, kernels=kernels)
    if kernels is not None:
        kernels.wait_for_first(report)
        mark("what a first question needs is compiled")
    memory, plan = loaded.backend.memory(), loaded.allocation
    graphs = plan.footprint.named(DRIVER), recordings(plan.settings)
    meter = Meter(
        loaded.place.device,
        loaded.planned,
        loaded.weights,
        memory["kv_cache"] + memory["recurrent_state"],
        cap_bytes=loaded.cap_bytes,
        beside=loaded.beside,
        keep=keeper(loaded.place, plan.subject, *graphs, _about(loaded.capabilities)),
    )
    return HostedModel(loaded.backend, meter, partial(loaded.backend.settle, ahead))


def _about(found: Capabilities) -> dict[str, object]:
    """Facts of the engine that has started, for a report: without the model's name."""
    return {
        "network": found.architecture,
        "parameters": found.parameters,
        "weights": found.weights,
        "kv_cache": found.kv_cache,
        "context": found.context_tokens,
    }


def transformers(choice: EngineChoice, report: Progress) -> HostedModel:
    """Load the model on Hugging Face transformers."""
    from snugvl.backends.transformers.loading import load_hosted

    _collect_garbage()
    return load_hosted(choice, report)


LOADERS: dict[HostedEngine, Loader] = {"native": native, "transformers": transformers}


def _look(device: str, seen: Machine | None = None) -> Machine | None:
    """The machine before this process holds anything of its GPU; then, in threads, the GPU's context and
    what Triton needs for it.

    `seen`: where the server has looked already. None for a device that is not a GPU of this machine: it is
    looked at, or refused, later.
    """
    from snugvl.hardware.probe import probe
    from snugvl.hardware.software import open_context

    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdecimal():
        return None
    machine = seen or probe()
    gpu = next((gpu for gpu in machine.gpus if gpu.index == int(index or 0)), None)
    if gpu is None:
        return None
    mark("the GPU is looked at")
    _beside("the CUDA context is made", partial(open_context, gpu.index))
    _beside("Triton is read", partial(read_triton, gpu.compute_capability))
    return machine


def _beside(step: str, job: Callable[[], bool]) -> None:
    """Do something in a thread, and mark the step that it is where it worked."""

    def run() -> None:
        with suppress(Exception):  # it comes up again where that is needed
            if job():
                mark(step)

    threading.Thread(target=run, name="snugvl-beside", daemon=True).start()


def _collect_garbage() -> None:
    """Collect garbage from now on, without the imported objects, which stay."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    run(attach(*sys.argv[1:]), load, prepare)
