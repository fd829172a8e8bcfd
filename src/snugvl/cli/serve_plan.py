"""Plans what `snugvl serve` will load (model and engine), and makes the engine service of that plan.

Nothing is downloaded, no torch imported. The engine is a process of snugvl's, or a vLLM or llama.cpp,
launched or found running.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from snugvl.cli.serve import ChildOptions
from snugvl.core.sizes import MIB
from snugvl.errors import CheckpointError, DoesNotFit, EngineError, RequestError, UnsupportedModel
from snugvl.planner.engines import rules_of
from snugvl.planner.settings import ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from snugvl.backends.child.service import ChildEngine
    from snugvl.backends.child.settings import ChildChoice, Facts, Replan
    from snugvl.backends.process.launch import Launched
    from snugvl.backends.process.wire import HostedEngine
    from snugvl.backends.vllm.settings import VllmChoice
    from snugvl.core.ledger import LedgerRow
    from snugvl.core.options import LoadOptions
    from snugvl.core.service import EngineService
    from snugvl.diagnose.result import Diagnosis
    from snugvl.hardware.machine import Machine
    from snugvl.planner.plan import Choice, Plan
    from snugvl.planner.report.document import SavedPlan
    from snugvl.planner.settings import Engine
    from snugvl.planner.solve import Candidate
    from snugvl.planner.wishes import Wishes


@dataclass(frozen=True, slots=True)
class Planned:
    """A model that fits. `asked`: the wishes; `reason`: why this model, where none was named."""

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
    """A model whose memory can't be planned. `why`: the engine with the reason."""

    name: str
    engine: HostedEngine
    why: str
    reason: str | None = None


def look() -> Future[Machine]:
    """Probe this machine in a thread: a GPU's free memory is watched for a quarter of a second."""
    from concurrent.futures import ThreadPoolExecutor

    from snugvl.cli.options import MachineChoice, machine_from

    thread = ThreadPoolExecutor(1, "snugvl-look")
    seen = thread.submit(machine_from, MachineChoice())
    thread.shutdown(wait=False)
    return seen


def plan_for(
    load: LoadOptions, child: ChildOptions, seen: Future[Machine] | None = None, kept: SavedPlan | None = None
) -> Planned | Unplanned:
    """The plan of the model that was named, or of the best one that is on this machine already.

    `seen`: the result of `look`, where that was begun before; `kept`: a saved plan, whose settings are used,
    and whose options `load` has.

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
        missing["llamacpp"] = f"it is not installed: {_llamacpp_is_had()}"
    plan = solve(candidates, machine, wishes, missing)
    if kept is not None:
        plan = held_to(plan, candidates[0], machine, kept.settings)
    require(plan)
    plan = with_instead(plan, machine)
    choice = require(plan)
    if choice.option.engine == "llamacpp" and load.backend == "auto" and not _finds_llamacpp(child):
        raise UnsupportedModel(
            f"llama.cpp runs this GGUF, and it is not installed: {_llamacpp_is_had()}. This machine's plan "
            f"for it: {plain_command(choice)}"
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
    """The clause on how to install vLLM."""
    return f"{rules_of('vllm').installed_by}, or name it with --vllm-command"


def _llamacpp_is_had() -> str:
    """The clause on how to install llama.cpp."""
    return (
        "for a GPU a llama-server in a build for it, on the PATH or named with --llamacpp-command "
        f"(docs/gguf.md); for a processor, or a Mac, {rules_of('llamacpp').wheel}"
    )


def _missing(load: LoadOptions, child: ChildOptions) -> dict[str, str]:
    """Engines that are neither installed nor named, each with the remedy. A named one refuses by itself."""
    missing: dict[str, str] = {}
    if not find_spec("bitsandbytes"):
        missing["bitsandbytes"] = "it is not installed: pip install bitsandbytes"
    if load.backend != "auto":
        return missing
    missing |= {each: "snugvl doesn't start it" for each in ENGINES if not rules_of(each).starts}
    if not (child.vllm_command or _finds_vllm()):
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
    words = child.llamacpp_words
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
        if child.llamacpp_words and not _finds_llamacpp(child):
            program = child.llamacpp_words[0]
            raise EngineError(f"--llamacpp-command: there is no program {program!r}; check its path")
        if not _finds_llamacpp(child):
            raise EngineError(
                f"--backend llamacpp needs llama.cpp, and it is not installed: {_llamacpp_is_had()}"
            )
    if load.backend != "vllm" or child.attach is not None:
        return
    if child.vllm_words and shutil.which(child.vllm_words[0]) is None:
        raise EngineError(f"--vllm-command: there is no program {child.vllm_words[0]!r}; check its path")
    if not (child.vllm_words or _finds_vllm()):
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
    """Every form of the catalogue's ranked models that is complete on this machine; pocket always is.
    Unreadable ones are left out: they weren't named."""
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


LEAST_RESERVE_BYTES = 256 * MIB  # what a second attempt does without, at least; else an eighth
# vLLM took more than planned inside what it was given: the same share of the card, for less.
SAME_SHARE = ("context", "vision_profile", "encoder_cache", "utilisation_low", "weights")
# Something was in the way: less of the card.
LESS_SHARE = (
    "utilisation_over_free", "tenants", "profiling_disturbed", "cuda_graphs", "batch", "fragmentation",
    "out_of_memory", "residency", "spill", "image_buffer",
)  # fmt: skip
# What llama.cpp ran out of.
LLAMACPP_MEMORY = (
    "context", "weights", "vision_weights", "image_buffer", "compute_buffer", "out_of_memory", "host_memory",
)  # fmt: skip
FEWER_AT_ONCE = ("cuda_graphs", "batch", "out_of_memory")  # also no graphs, small chunks, few sequences


def launch(
    load: LoadOptions, child: ChildOptions, begun: Launched | None = None
) -> AbstractContextManager[Launched | None]:
    """Our engine's process, which imports torch while the plan is made; ended on exit where it wasn't taken.

    `begun`: the process that the command's first words made likely (`cli/entry.py`).
    """
    if child.attach is not None or load.backend in ("vllm", "llamacpp"):
        if begun is not None:
            begun.abandon()
        return nullcontext()
    if begun is not None:
        return begun
    from snugvl.backends.process.launch import Launched

    try:
        return Launched()
    except OSError:  # it is tried again when it is needed, and told then
        return nullcontext()


def attached(load: LoadOptions, child: ChildOptions) -> ChildEngine:
    """The service of a vLLM or a llama-server that runs already."""
    if load.backend == "llamacpp":
        from snugvl.backends.llamacpp.service import LlamacppEngine
        from snugvl.backends.llamacpp.settings import LlamacppChoice

        return LlamacppEngine(LlamacppChoice(load.model, attach=child.attach, api_key=child.attach_api_key))
    from snugvl.backends.vllm.service import VllmEngine
    from snugvl.backends.vllm.settings import VllmChoice

    return VllmEngine(VllmChoice(load.model, attach=child.attach, api_key=child.attach_api_key))


def engine_for(
    planned: Planned | Unplanned, load: LoadOptions, child: ChildOptions, launched: Launched | None = None
) -> EngineService:
    """The engine service that will run a plan, for ours and transformers in the `launched` process."""
    from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine
    from snugvl.planner.engines.transformers.rules import placement, said_of
    from snugvl.planner.plan import allocation_of

    if planned.engine == "vllm":
        assert isinstance(planned, Planned), "vLLM is only launched by a plan"
        from snugvl.backends.vllm.service import VllmEngine

        if launched is not None:
            launched.abandon()  # before vLLM wants the memory that it takes
        return VllmEngine(vllm_choice(planned, load, child))
    if planned.engine == "llamacpp":
        assert isinstance(planned, Planned), "llama.cpp is only launched by a plan"
        from snugvl.backends.llamacpp import settings as llamacpp
        from snugvl.backends.llamacpp.service import LlamacppEngine

        if launched is not None:
            launched.abandon()
        words = child.llamacpp_words
        again = _replanned(planned, LLAMACPP_MEMORY, llamacpp.arguments_of, llamacpp.planned_rows)
        return LlamacppEngine(
            llamacpp.llamacpp_choice(
                planned.choice, load, command=words, retry=not child.no_retry, replan=again
            )
        )
    said = {**load.said(), "model": planned.name}
    if not isinstance(planned, Planned):
        return SupervisedEngine(EngineChoice(**said, engine=planned.engine), launched=launched)
    choice = planned.choice
    if load.device == "auto" and choice.gpus:
        said["device"] = f"cuda:{choice.gpus[0].index}"
    if planned.engine == "native":
        made = EngineChoice(**said, planned=allocation_of(choice))
        if planned.machine.source == "probed":  # looked at a moment ago
            made = replace(made, machine=planned.machine)
        return SupervisedEngine(made, launched=launched)
    # Its process doesn't plan by itself: it gets the plan's values.
    told = {**said_of(choice, load).said(), "model": planned.name, "device": said.get("device", "auto")}
    made = EngineChoice(**told, engine="transformers", placement=placement(choice))
    return SupervisedEngine(made, launched=launched)


def vllm_choice(planned: Planned, load: LoadOptions, child: ChildOptions) -> VllmChoice:
    """The choice of a plan with which vLLM is started."""
    from snugvl.backends.vllm.settings import VllmChoice
    from snugvl.planner.commands import visible

    return VllmChoice(
        planned.name,
        arguments_of(planned.choice, load),
        command=child.vllm_words or None,
        environment=visible(planned.choice),
        facts=_facts(planned, load),
        planned=planned_rows(planned.choice),
        sleep_after_s=child.sleep_after,
        retry=not child.no_retry,
        replan=_replanned(
            planned, (*SAME_SHARE, *LESS_SHARE), lambda choice: arguments_of(choice, load), planned_rows
        ),
    )


def arguments_of(choice: Choice, load: LoadOptions) -> tuple[str, ...]:
    """The flags of a plan, and those that were asked for."""
    from snugvl.planner.engines.vllm.rules import vllm_flags

    words = tuple(vllm_flags(choice))
    asked = {
        "--trust-remote-code": load.trust_remote_code,
        "--no-enable-prefix-caching": not load.prefix_cache,
    }
    return (*words, *(flag for flag, wanted in asked.items() if wanted))


def planned_rows(choice: Choice) -> tuple[LedgerRow, ...]:
    """The plan as rows of the ledger. Spare memory becomes KV cache, so it is planned as such."""
    from snugvl.core.ledger import LedgerRow
    from snugvl.core.memory_kinds import Kind

    spare = max(choice.spare_bytes, 0)
    return tuple(
        LedgerRow(part.name, part.nbytes + (spare if part.kind is Kind.CACHE else 0), kind=part.kind)
        for part in choice.footprint.counted
    )


def _facts(planned: Planned, load: LoadOptions) -> Facts:
    """Facts from the model's files, from the plan (the device) and from the options (thinking)."""
    from snugvl.backends.vllm.settings import read_facts
    from snugvl.diagnose.facts import Card
    from snugvl.planner.plan import allocation_of

    choice, model = planned.choice, planned.choice.option.model
    facts = read_facts(planned.name)
    return replace(
        facts,
        thinking=replace(facts.thinking, said=load.thinking),
        device=choice.budget.name
        if choice.settings.gpus == 1
        else f"{choice.settings.gpus} × {choice.budget.name}",
        weights=choice.settings.weights_name,
        parameters=model.parameters,
        gpu_uuids=tuple(gpu.uuid for gpu in choice.gpus if gpu.uuid is not None),
        card=Card(choice.budget.total_bytes, choice.budget.free_bytes),
        plan=allocation_of(choice).running,
    )


def _replanned(
    planned: Planned,
    memory: Sequence[str],
    arguments_of: Callable[[Choice], tuple[str, ...]],
    rows_of: Callable[[Choice], tuple[LedgerRow, ...]],
) -> Replan:
    """A function that plans again with less where memory was the cause; other causes get the diagnosis'
    changes.

    Args:
        memory: kinds of causes for which less memory helps.
        arguments_of, rows_of: functions from a plan to the engine's arguments, and to rows of the ledger.
    """

    def replan(diagnosis: Diagnosis, before: ChildChoice) -> ChildChoice | None:
        from snugvl.planner.plan import allocation_of

        kind = next((cause.kind for cause in diagnosis.causes if cause.kind in memory), None)
        if kind is None:
            return before.changed(diagnosis.changes)
        smaller = less(planned, kind)
        if smaller is None:
            return None
        facts = None if before.facts is None else replace(before.facts, plan=allocation_of(smaller).running)
        return replace(before, arguments=arguments_of(smaller), planned=rows_of(smaller), facts=facts)

    return replan


def less(planned: Planned, kind: str) -> Choice | None:
    """A choice of the model that takes less memory, by the kind of failure; None where none fits."""
    from snugvl.cli.options import MachineChoice, machine_from
    from snugvl.planner.engines.vllm.rules import VLLM_STEPS
    from snugvl.planner.footprint.total import footprint
    from snugvl.planner.solve import require, solve

    before = planned.choice
    # In the same share it has to need less than it was planned to; else it is given less.
    given = before.footprint.total_bytes if kind in SAME_SHARE else before.budget.usable_bytes
    machine = planned.machine
    if kind in LESS_SHARE and machine.source == "probed":  # other programs may hold more than before
        seen = {gpu.index for gpu in machine.gpus}
        now = machine_from(MachineChoice())
        machine = replace(now, gpus=tuple(gpu for gpu in now.gpus if gpu.index in seen))
    limit = given - max(given // 8, LEAST_RESERVE_BYTES)
    if (planned.engine == "vllm" and not machine.gpus) or limit <= 0:
        return None
    wishes = replace(planned.asked, backend=planned.engine, memory_bytes=limit)
    candidates = [each for each in planned.candidates if each.facts.name == planned.name]
    try:
        found = require(solve(candidates, machine, wishes))
    except DoesNotFit:
        return None
    settings = found.settings
    if kind in FEWER_AT_ONCE and planned.engine == "vllm":
        chunk, sequences = VLLM_STEPS[-2]
        settings = settings._replace(
            eager=True, chunk=min(settings.chunk, chunk), sequences=min(settings.sequences, sequences)
        )
    budget = before.budget if kind in SAME_SHARE else found.budget
    needed = footprint(found.option.model, settings, budget.device)
    return replace(found, settings=settings, footprint=needed, budget=budget)
