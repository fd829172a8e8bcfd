"""The engine behind `snugvl serve`: a process of ours, a vLLM or llama.cpp, launched or found running."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from snugvl.core.sizes import MIB
from snugvl.errors import DoesNotFit

if TYPE_CHECKING:
    from snugvl.backends.child.settings import Facts, Replan
    from snugvl.backends.llamacpp.settings import LlamacppChoice
    from snugvl.backends.process.launch import Launched
    from snugvl.backends.vllm.settings import VllmChoice
    from snugvl.cli.serve_options import ChildOptions
    from snugvl.cli.serve_plan import Planned, Unplanned
    from snugvl.core.ledger import LedgerRow
    from snugvl.core.options import LoadOptions
    from snugvl.core.service import EngineService
    from snugvl.diagnose.result import Diagnosis
    from snugvl.planner.plan import Choice

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
FEWER_AT_ONCE = ("cuda_graphs", "batch", "out_of_memory")  # no graphs, small chunks, few sequences, too


def launch(
    load: LoadOptions, child: ChildOptions, begun: Launched | None = None
) -> AbstractContextManager[Launched | None]:
    """Our engine's process, importing torch while the plan is made; ended on exit where nobody took it.

    `begun`: one that the command's first words made likely (`cli/entry.py`).
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


def attached(load: LoadOptions, child: ChildOptions) -> EngineService:
    """A vLLM that runs already, or a llama-server."""
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
    """What will run a plan; on our own engine or transformers in the process that was `launched`."""
    from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine
    from snugvl.cli.serve_plan import Planned
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
        from snugvl.backends.llamacpp.planned import llamacpp_choice
        from snugvl.backends.llamacpp.service import LlamacppEngine

        if launched is not None:
            launched.abandon()
        words, again = child.llamacpp_command, _replanned_llamacpp(planned)
        return LlamacppEngine(
            llamacpp_choice(planned.choice, load, command=words, retry=child.retry, replan=again)
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
    # Its process doesn't plan by itself: it is told what was planned.
    told = {**said_of(choice, load).said(), "model": planned.name, "device": said.get("device", "auto")}
    made = EngineChoice(**told, engine="transformers", placement=placement(choice))
    return SupervisedEngine(made, launched=launched)


def vllm_choice(planned: Planned, load: LoadOptions, child: ChildOptions) -> VllmChoice:
    """A plan as vLLM is started with it."""
    from snugvl.backends.vllm.settings import VllmChoice
    from snugvl.planner.commands import visible

    return VllmChoice(
        planned.name,
        arguments_of(planned.choice, load),
        command=child.vllm_command or None,
        environment=visible(planned.choice),
        facts=_facts(planned, load),
        planned=planned_rows(planned.choice),
        sleep_after_s=child.sleep_after_s,
        retry=child.retry,
        replan=_replanned(planned, load),
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
    """The plan as rows of the ledger. What is left over becomes KV cache, so it is planned as such."""
    from snugvl.core.ledger import LedgerRow
    from snugvl.core.memory_kinds import Kind

    spare = max(choice.spare_bytes, 0)
    return tuple(
        LedgerRow(part.name, part.nbytes + (spare if part.kind is Kind.CACHE else 0), kind=part.kind)
        for part in choice.footprint.counted
    )


def _facts(planned: Planned, load: LoadOptions) -> Facts:
    """What the files tell, with what the plan knows of the device, and how it was asked to think."""
    from snugvl.backends.vllm.facts import read_facts
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


def _replanned(planned: Planned, load: LoadOptions) -> Replan:
    """Plans again with less where memory was the cause; other causes get the diagnosis' own changes."""

    def replan(diagnosis: Diagnosis, before: VllmChoice) -> VllmChoice | None:
        from snugvl.backends.child import flags
        from snugvl.planner.plan import allocation_of

        kinds = [cause.kind for cause in diagnosis.causes]
        kind = next((kind for kind in kinds if kind in SAME_SHARE or kind in LESS_SHARE), None)
        if kind is None:
            changed = flags.apply(before.arguments, diagnosis.changes)
            more = flags.variables(diagnosis.changes)
            return replace(before, arguments=changed, environment=before.environment + more)
        smaller = less(planned, kind)
        if smaller is None:
            return None
        facts = None if before.facts is None else replace(before.facts, plan=allocation_of(smaller).running)
        arguments = arguments_of(smaller, load)
        return replace(before, arguments=arguments, planned=planned_rows(smaller), facts=facts)

    return replan


def _replanned_llamacpp(planned: Planned) -> Replan:
    """Plans again with less where memory was the cause."""

    def replan(diagnosis: Diagnosis, before: LlamacppChoice) -> LlamacppChoice | None:
        from snugvl.backends.child import flags
        from snugvl.backends.llamacpp.planned import arguments_of, planned_rows

        kind = next((cause.kind for cause in diagnosis.causes if cause.kind in LLAMACPP_MEMORY), None)
        if kind is None:
            return replace(before, arguments=flags.apply(before.arguments, diagnosis.changes))
        smaller = less(planned, kind)
        if smaller is None:
            return None
        return replace(before, arguments=arguments_of(smaller), planned=planned_rows(smaller))

    return replan


def less(planned: Planned, kind: str) -> Choice | None:
    """A choice of the model in less memory than before, by why it failed; None where that doesn't fit."""
    from snugvl.cli.machine_options import MachineChoice, machine_from
    from snugvl.planner.engines.vllm.rules import VLLM_STEPS
    from snugvl.planner.footprint.total import footprint
    from snugvl.planner.solve import require, solve

    before = planned.choice
    # In the same share it has to need less than it was planned to; else it is given less.
    given = before.footprint.total_bytes if kind in SAME_SHARE else before.budget.usable_bytes
    machine = planned.machine
    if kind in LESS_SHARE and machine.source == "probed":  # somebody may hold more than a moment ago
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
        settings = replace(
            settings,
            eager=True,
            chunk=min(settings.chunk, chunk),
            sequences=min(settings.sequences, sequences),
        )
    budget = before.budget if kind in SAME_SHARE else found.budget
    needed = footprint(found.option.model, settings, budget.device)
    return replace(found, settings=settings, footprint=needed, budget=budget)
