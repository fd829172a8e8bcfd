"""The process that runs the engine: `python -m snugvl.engine_process FD`, started by the server.

`backends/supervised.py` is the other end of the socket; what to load comes over it.
"""

import sys

from snugvl.backends.child import Loader, Report, attach, run
from snugvl.backends.hosted import HostedModel
from snugvl.backends.wire import EngineChoice, HostedEngine


def load(choice: EngineChoice, report: Report) -> HostedModel:
    """The chosen model with a meter. Imports torch, so it is called when the server is told so."""
    report("starting torch", 0.0)
    return LOADERS[choice.engine](choice, report)


def native(choice: EngineChoice, report: Report) -> HostedModel:
    """On our own engine."""
    from snugvl.backends.measure import Meter
    from snugvl.loading import load_engine
    from snugvl.remember import keeper

    loaded = load_engine(
        choice.model,
        device=choice.device,
        dtype=choice.dtype,
        context=choice.context,
        weights=choice.weights,
        max_pixels=choice.max_pixels,
        memory=choice.memory_bytes,
        max_waiting=choice.max_waiting,
        language_only=choice.language_only,
        progress=report,
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

    return load_hosted(choice, report)


LOADERS: dict[HostedEngine, Loader] = {"native": native, "transformers": transformers}


if __name__ == "__main__":
    run(attach(int(sys.argv[1])), load)
