"""What `snugvl serve` is going to load: model, engine, plan. Nothing is downloaded, no torch imported."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from snugvl.cli.serve_options import ChildOptions
from snugvl.errors import CheckpointError, EngineError, RequestError, UnsupportedModel
from snugvl.planner.engines import rules_of
from snugvl.planner.settings import ENGINES

LLAMACPP = "pip install 'snugvl[llamacpp]', or name a llama-server with --llamacpp-command"

if TYPE_CHECKING:
    from concurrent.futures import Future

    from snugvl.backends.process.wire import HostedEngine
    from snugvl.core.options import LoadOptions
    from snugvl.hardware.machine import Machine
    from snugvl.planner.plan import Choice, Plan
    from snugvl.planner.report.document import SavedPlan
    from snugvl.planner.settings import Engine
    from snugvl.planner.solve import Candidate
    from snugvl.planner.wishes import Wishes


@dataclass(frozen=True, slots=True)
class Planned:
    """A model that fits. `asked`: the wishes; `reason`: why this model, where nobody named one."""

    name: str
    choice: Choice
    plan: Plan
    machine: Machine
    candidates: tuple[Candidate, ...]
    asked: Wishes
    reason: str | None = None

    @property
    def engine(self) -> Engine:
        """The engine that runs it."""
        return self.choice.option.engine

    @property
    def why(self) -> str:
        """The engine with the reason for it."""
        from snugvl.planner.shortfall import why_engine

        return why_engine(self.plan)


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A model whose memory nobody can tell beforehand. `why`: the engine with the reason."""

    name: str
    engine: HostedEngine
    why: str
    reason: str | None = None


def look() -> Future[Machine]:
    """This machine, looked at in a thread: a GPU's free memory is watched for a quarter of a second."""
    from concurrent.futures import ThreadPoolExecutor

    from snugvl.cli.machine_options import MachineChoice, machine_from

    thread = ThreadPoolExecutor(1, "snugvl-look")
    seen = thread.submit(machine_from, MachineChoice())
    thread.shutdown(wait=False)
    return seen


def plan_for(
    load: LoadOptions,
    child: ChildOptions,
    seen: Future[Machine] | None = None,
    kept: SavedPlan | None = None,
) -> Planned | Unplanned:
    """The plan of the model that was named, or of the best one that is on this machine already.

    `seen`: of `look`, where it was begun before; `kept`: a saved plan, whose settings run, and whose
    options `load` has.

    Raises:
        CheckpointNotFound: it is not on this machine; says how to get it.
        UnsupportedModel: of a kind that can't be planned, and transformers wasn't asked for.
        DoesNotFit: it needs more memory than there is, with the numbers.
        RequestError: a wish that no plan can meet; a device that is not there.
    """
    from snugvl.planner.commands import plain_command
    from snugvl.planner.recommend import with_instead
    from snugvl.planner.solve import held_to, require, solve
    from snugvl.planner.wishes import wishes_of

    machine = on_device(load.device, (seen or look()).result())
    named = load.model or None
    try:
        candidates = _downloaded() if named is None else [_named(named)]
    except UnsupportedModel as error:
        return _unplanned(load, error)
    wishes = wishes_of(load, sees=any(candidate.facts.vision for candidate in candidates))
    missing = _missing(load, child)
    ours = machine.gpus and all(each.facts.gguf and each.facts.native for each in candidates)
    if load.backend == "auto" and ours and not _finds_llamacpp(child):
        missing["llamacpp"] = f"it is not installed: {LLAMACPP}"
    plan = solve(candidates, machine, wishes, missing)
    if kept is not None:
        plan = held_to(plan, candidates[0], machine, kept.settings)
    require(plan)
    plan = with_instead(plan, machine)
    choice = require(plan)
    if choice.option.engine == "llamacpp" and load.backend == "auto" and not _finds_llamacpp(child):
        raise UnsupportedModel(
            f"llama.cpp runs this GGUF, and it is not installed: {LLAMACPP}. This machine's plan for it: "
            f"{plain_command(choice)}"
        )
    if not rules_of(choice.option.engine).starts:
        raise RequestError(
            f"{rules_of(choice.option.engine).title} is planned for, and not started by snugvl. This "
            f"machine's plan for it: {plain_command(choice) or 'snugvl plan'}",
            field="backend",
        )
    name = choice.option.model.name
    reason = _reason(name) if named is None else None
    return Planned(name, choice, plan, machine, tuple(candidates), wishes, reason)


def _vllm_is_had() -> str:
    """How vLLM is to be had, as a clause."""
    return f"{rules_of('vllm').installed_by}, or name it with --vllm-command"


def _missing(load: LoadOptions, child: ChildOptions) -> dict[str, str]:
    """What isn't installed and nobody asked for by name. (Who asked for it is told by the engine itself.)"""
    missing: dict[str, str] = {}
    if not find_spec("bitsandbytes"):
        missing["bitsandbytes"] = "it is not installed: pip install bitsandbytes"
    if load.backend != "auto":
        return missing
    missing |= {each: "snugvl doesn't start it" for each in ENGINES if not rules_of(each).starts}
    if not (child.vllm_line or _finds_vllm()):
        missing["vllm"] = f"it is not installed: {_vllm_is_had()}"
    if _lacking():
        missing["transformers"] = f"it is not installed: {rules_of('transformers').installed_by}"
    return missing


def _lacking() -> list[str]:
    """Packages of the transformers backend that are not installed."""
    return [name for name in ("transformers", "accelerate") if not find_spec(name)]


def _finds_vllm() -> bool:
    return find_spec("vllm") is not None or shutil.which("vllm") is not None


def _finds_llamacpp(child: ChildOptions) -> bool:
    """Whether there is a llama.cpp to start; `llamacpp.command` finds it then."""
    words = child.llamacpp_command
    there = find_spec("xllamacpp") is not None or shutil.which("llama-server") is not None
    return shutil.which(words[0]) is not None if words else there


def check_installed(load: LoadOptions, child: ChildOptions) -> None:
    """Refuse an engine that was asked for by name and is not installed, before anything is printed.

    Raises:
        EngineError: says how to install it.
    """
    if load.backend == "transformers" and (lacking := _lacking()):
        raise EngineError(
            f"--backend transformers needs {' and '.join(lacking)}, and it is not installed: "
            "pip install 'snugvl[transformers]'"
        )
    if load.backend == "llamacpp" and child.attach is None:
        if child.llamacpp_command and not _finds_llamacpp(child):
            program = child.llamacpp_command[0]
            raise EngineError(f"--llamacpp-command: there is no program {program!r}; check its path")
        if not _finds_llamacpp(child):
            raise EngineError(f"--backend llamacpp needs llama.cpp, and it is not installed: {LLAMACPP}")
    if load.backend != "vllm" or child.attach is not None:
        return
    if child.vllm_command and shutil.which(child.vllm_command[0]) is None:
        raise EngineError(f"--vllm-command: there is no program {child.vllm_command[0]!r}; check its path")
    if not (child.vllm_command or _finds_vllm()):
        raise EngineError(f"--backend vllm needs vLLM, and it is not installed: {_vllm_is_had()}")


def _unplanned(load: LoadOptions, error: UnsupportedModel) -> Unplanned:
    if load.backend == "transformers":
        return Unplanned(load.model, "transformers", f"transformers, without a plan: {error}")
    if load.backend == "auto":
        raise UnsupportedModel(f"{error}; --backend transformers may run it, without a plan") from None
    raise error


def _named(model: str) -> Candidate:
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.planner.solve import Candidate

    locate(model)  # says how to get what is not here
    return Candidate(facts_of(model, offline=True))


def best_downloaded(load: LoadOptions) -> str:
    """The best model of the catalogue that is on this machine and that runs in this process as asked.

    Raises:
        DoesNotFit: not even pocket does, as asked.
    """
    from snugvl.checkpoint.locate import POCKET
    from snugvl.planner.solve import require, solve
    from snugvl.planner.wishes import wishes_of

    candidates = _downloaded()
    if len(candidates) == 1:  # nothing but pocket
        return POCKET
    missing = _missing(load, ChildOptions()) | {"vllm": "it runs behind snugvl serve alone"}
    machine = on_device(load.device, look().result())
    return require(solve(candidates, machine, wishes_of(load, sees=True), missing)).option.model.name


def _downloaded() -> list[Candidate]:
    """Every form of the catalogue's ranked models that is complete on this machine; pocket always is. What
    can't be read is left out: nobody named it."""
    from snugvl.checkpoint.catalogue import entries
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.planner.solve import Candidate

    found = []
    for entry in entries():
        for form in entry.forms if entry.quality_rank is not None and entry.sees else ():
            try:
                locate(form.repo)
                facts = facts_of(form.repo, offline=True)
            except CheckpointError:
                continue
            found.append(Candidate(facts, -(entry.quality_rank or 0)))
    return found


def _reason(name: str) -> str:
    from snugvl.checkpoint.locate import POCKET

    if name == POCKET:
        return (
            "no model was named and no better one that fits is downloaded: this is pocket, the tiny one that "
            "is built in. snugvl plan names the best one for this machine, snugvl pull fetches it"
        )
    return f"no model was named: {name} is the best that is downloaded and fits"


def on_device(device: str, machine: Machine) -> Machine:
    """`machine` as an engine on `device` sees it.

    Raises:
        RequestError: the device is not there.
    """
    if device == "cpu":
        return replace(machine, gpus=(), others=())
    if device == "auto":
        return machine
    index = device.partition(":")[2]
    gpus = tuple(gpu for gpu in machine.gpus if gpu.index == int(index or 0))
    if not gpus:
        raise RequestError(
            f"device {device!r} is not there: this machine has {len(machine.gpus)} GPUs", field="device"
        )
    return replace(machine, gpus=gpus)
