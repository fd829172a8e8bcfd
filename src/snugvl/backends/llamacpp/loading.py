"""llama.cpp for commands and `snugvl.load`: a plan, a server of this process' own, ended with the model."""

from dataclasses import replace

from snugvl.backends.child.alone import ChildBackend
from snugvl.backends.llamacpp import command
from snugvl.backends.llamacpp.planned import llamacpp_choice
from snugvl.backends.llamacpp.service import LlamacppEngine
from snugvl.backends.native.allocation import choose
from snugvl.backends.place import device_of, place_on
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.options import LoadOptions, Progress
from snugvl.hardware.probe import probe
from snugvl.planner.plan import Choice
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import wishes_of


def load_planned(options: LoadOptions, *, progress: Progress | None = None) -> ChildBackend:
    """Plan for what is free now, then start the server and wait for it.

    Raises:
        EngineError: llama.cpp isn't installed, or doesn't start.
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the file.
        DoesNotFit: with the plan's numbers.
        RequestError: an option that no plan can meet.
    """
    command.find(None)  # before anything is planned
    locate(options.model)
    facts = replace(facts_of(options.model, offline=True), name=options.model)
    choice = _elsewhere(facts, options) or choose(
        facts, options, place_on(device_of(options.device), options.memory_bytes, kernels=False), "llamacpp"
    )
    return ChildBackend(lambda: LlamacppEngine(llamacpp_choice(choice, options)), progress)


def _elsewhere(facts: ModelFacts, options: LoadOptions) -> Choice | None:
    """The plan for a GPU that torch doesn't know; None where there is none, or another device is meant."""
    if options.device != "auto" or device_of("auto").type != "cpu":
        return None
    machine = probe()
    if not machine.others:
        return None
    wishes = wishes_of(options, sees=facts.vision is not None, backend="llamacpp")
    return require(solve([Candidate(facts)], machine, wishes))
