"""The process that runs the engine: `python -m snugvl.engine_process FD`, started by the server.

`backends/supervised.py` is the other end of the socket; what to load comes over it. Until then torch is
imported; then the GPU is looked at and its CUDA context made, which needs no lock of Python's, while that
goes on.
"""

import gc
import sys
import threading
from contextlib import suppress

from snugvl.backends.child import Loader, Report, attach, run
from snugvl.backends.hosted import HostedModel
from snugvl.backends.wire import EngineChoice, HostedEngine
from snugvl.hardware.machine import Machine
from snugvl.timeline import mark


def prepare() -> None:
    """Import what every engine needs. What goes wrong is told by whoever imports it again to use it."""
    gc.disable()  # what imports make stays; to look through it again and again takes an eighth of the time
    with suppress(Exception):
        import torch  # noqa: F401

        mark("torch is imported")


def load(choice: EngineChoice, report: Report) -> HostedModel:
    """The chosen model with a meter. Imports torch, so it is called when the server is told so."""
    report("starting torch", 0.0)
    return LOADERS[choice.engine](choice, report)


def native(choice: EngineChoice, report: Report) -> HostedModel:
    """On our own engine."""
    machine = _look(choice.device)
    from snugvl.backends.measure import Meter
    from snugvl.loading import load_engine
    from snugvl.remember import keeper

    _collect_garbage()
    mark("the engine is imported")
    loaded = load_engine(
        choice.model,
        device=choice.device,
        dtype=choice.dtype,
        context=choice.context,
        weights=choice.weights,
        kv_cache=choice.kv_cache,
        max_pixels=choice.max_pixels,
        memory=choice.memory_bytes,
        max_waiting=choice.max_waiting,
        language_only=choice.language_only,
        prefix_cache=choice.prefix_cache,
        tower=choice.tower,
        progress=report,
        machine=machine,
    )
    memory = loaded.backend.memory()
    meter = Meter(
        loaded.place.device,
        loaded.planned,
        loaded.weights,
        memory["kv_cache"] + memory["recurrent_state"],
        cap_bytes=loaded.cap_bytes,
        keep=keeper(loaded.place, loaded.subject),
    )
    return HostedModel(loaded.backend, meter)


def transformers(choice: EngineChoice, report: Report) -> HostedModel:
    """On Hugging Face transformers."""
    from snugvl.backends.transformers.loading import load_hosted

    _collect_garbage()
    return load_hosted(choice, report)


LOADERS: dict[HostedEngine, Loader] = {"native": native, "transformers": transformers}


def _look(device: str) -> Machine | None:
    """The machine before this process holds anything of its GPU; then the GPU's context, in a thread.

    None for a device that is no GPU of this machine: it is looked at, or refused, later.
    """
    from snugvl.hardware.cuda_driver import open_context
    from snugvl.hardware.probe import probe

    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdecimal():
        return None
    machine = probe()
    if not any(gpu.index == int(index or 0) for gpu in machine.gpus):
        return None
    mark("the GPU is looked at")

    def open_it() -> None:
        if open_context(int(index or 0)):
            mark("the CUDA context is made")

    threading.Thread(target=open_it, name="snugvl-context", daemon=True).start()
    return machine


def _collect_garbage() -> None:
    """From now on, but for what was imported: that stays."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    run(attach(int(sys.argv[1])), load, prepare)
