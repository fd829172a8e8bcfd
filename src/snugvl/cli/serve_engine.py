"""The engine behind `snugvl serve`: a process of ours, a vLLM of ours, or a vLLM that runs already."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from snugvl.errors import DoesNotFit

if TYPE_CHECKING:
    from snugvl.backends.launch import Launched
    from snugvl.backends.service import EngineService
    from snugvl.backends.vllm.settings import Facts, Replan, VllmChoice
    from snugvl.cli.serve_options import BackendChoice, LoadChoice
    from snugvl.cli.serve_plan import Planned, Unplanned
    from snugvl.diagnose.result import Diagnosis
    from snugvl.ledger import LedgerRow
    from snugvl.planner.plan import Choice

MIB = 1 << 20
LEAST_RESERVE_BYTES = 256 * MIB  # what a second attempt does without, at least; else an eighth
# vLLM took more than planned inside what it was given: the same share of the card, for less.
SAME_SHARE = ("context", "vision_profile", "encoder_cache", "utilisation_low", "weights")
# Something was in the way: less of the card.
LESS_SHARE = (
    "utilisation_over_free", "tenants", "profiling_disturbed", "cuda_graphs", "batch", "fragmentation",
    "out_of_memory", "residency", "spill", "image_buffer",
)  # fmt: skip
FEWER_AT_ONCE = ("cuda_graphs", "batch", "out_of_memory")  # no graphs, small chunks, few sequences, too


def launch(backend: BackendChoice, begun: Launched | None = None) -> AbstractContextManager[Launched | None]:
    """Our engine's process, importing torch while the plan is made; ended on exit where nobody took it.

    `begun`: one that the command's first words made likely (`cli/entry.py`).
    """
    if backend.attach is not None or backend.backend == "vllm":
        if begun is not None:
            begun.abandon()
        return nullcontext()
    if begun is not None:
        return begun
    from snugvl.backends.launch import Launched

    try:
        return Launched()
    except OSError:  # it is tried again when it is needed, and told then
        return nullcontext()


def attached(model: str | None, backend: BackendChoice) -> EngineService:
    """A vLLM that runs already."""
    from snugvl.backends.vllm.service import VllmEngine
    from snugvl.backends.vllm.settings import VllmChoice

    return VllmEngine(VllmChoice(model or "", attach=backend.attach, api_key=backend.attach_api_key))


def engine_for(
    planned: Planned | Unplanned,
    load: LoadChoice,
    backend: BackendChoice,
    launched: Launched | None = None,
) -> EngineService:
    """What will run a plan; on our own engine or transformers in the process that was `launched`."""
    from snugvl.backends.supervised import EngineChoice, SupervisedEngine
    from snugvl.cli.serve_plan import Planned
    from snugvl.planner.placement import placement

    if planned.engine == "vllm":
        assert isinstance(planned, Planned), "vLLM is only launched by a plan"
        from snugvl.backends.vllm.service import VllmEngine

        if launched is not None:
            launched.abandon()  # before vLLM wants the memory that it takes
        return VllmEngine(vllm_choice(planned, backend))
    places = placement(planned.choice) if isinstance(planned, Planned) else ()
    choice = EngineChoice(
        planned.name, load.device, load.dtype, load.context, load.max_pixels, load.weights, load.memory_bytes,
        load.max_queue, planned.engine, backend.language_only, backend.trust_remote_code, places,
        backend.prefix_cache, backend.tower, backend.embedding, load.kv_cache,
        backend.step_graphs is not False,
    )  # fmt: skip
    if isinstance(planned, Planned) and load.device == "auto" and planned.choice.gpus:
        choice = replace(choice, device=f"cuda:{planned.choice.gpus[0].index}")
    if isinstance(planned, Planned) and planned.engine == "native" and planned.machine.source == "probed":
        choice = replace(choice, machine=planned.machine)  # looked at a moment ago
    if isinstance(planned, Planned) and planned.engine == "transformers":
        # Its process doesn't plan by itself: it is told what was planned.
        settings = planned.choice.settings
        choice = replace(choice, context=settings.context, max_pixels=settings.max_pixels)
    return SupervisedEngine(choice, launched=launched)


def vllm_choice(planned: Planned, backend: BackendChoice) -> VllmChoice:
    """A plan as vLLM is started with it."""
    from snugvl.backends.vllm.settings import VllmChoice
    from snugvl.planner.commands import visible

    return VllmChoice(
        planned.name,
        arguments_of(planned.choice, backend),
        command=backend.command or None,
        environment=visible(planned.choice),
        facts=_facts(planned),
        planned=planned_rows(planned.choice),
        sleep_after_s=backend.sleep_after_s,
        retry=backend.retry,
        replan=_replanned(planned, backend),
    )


def arguments_of(choice: Choice, backend: BackendChoice) -> tuple[str, ...]:
    """The flags of a plan, and those that were asked for."""
    from snugvl.planner.vllm_flags import vllm_flags

    words = tuple(vllm_flags(choice))
    asked = {
        "--trust-remote-code": backend.trust_remote_code,
        "--no-enable-prefix-caching": not backend.prefix_cache,
    }
    return (*words, *(flag for flag, wanted in asked.items() if wanted))


def planned_rows(choice: Choice) -> tuple[LedgerRow, ...]:
    """The plan as rows of the ledger. What is left over becomes KV cache, so it is planned as such."""
    from snugvl.ledger import LedgerRow

    spare = max(choice.spare_bytes, 0)
    return tuple(
        LedgerRow(part.name, part.nbytes + (spare if part.name == "KV cache" else 0))
        for part in choice.footprint.counted
    )


def _facts(planned: Planned) -> Facts:
    """What the files tell, with what the plan knows of the device."""
    from snugvl.backends.vllm.facts import read_facts
    from snugvl.diagnose.facts import Card

    choice, model = planned.choice, planned.choice.option.model
    return replace(
        read_facts(planned.name),
        device=choice.budget.name
        if choice.settings.gpus == 1
        else f"{choice.settings.gpus} × {choice.budget.name}",
        weights=choice.settings.weights_name,
        parameters=model.parameters,
        gpu_uuids=tuple(gpu.uuid for gpu in choice.gpus if gpu.uuid is not None),
        card=Card(choice.budget.total_bytes, choice.budget.free_bytes),
    )


def _replanned(planned: Planned, backend: BackendChoice) -> Replan:
    """Plans again with less where memory was the cause; other causes get the diagnosis' own changes."""

    def replan(diagnosis: Diagnosis, before: VllmChoice) -> VllmChoice | None:
        from snugvl.backends.vllm import flags

        kinds = [cause.kind for cause in diagnosis.causes]
        kind = next((kind for kind in kinds if kind in SAME_SHARE or kind in LESS_SHARE), None)
        if kind is None:
            changed = flags.apply(before.arguments, diagnosis.changes)
            more = flags.variables(diagnosis.changes)
            return replace(before, arguments=changed, environment=before.environment + more)
        smaller = less(planned, kind)
        if smaller is None:
            return None
        return replace(before, arguments=arguments_of(smaller, backend), planned=planned_rows(smaller))

    return replan


def less(planned: Planned, kind: str) -> Choice | None:
    """The same model in less memory than before, by why it failed; None where that doesn't fit."""
    from snugvl.cli.machine_options import MachineChoice, machine_from
    from snugvl.cli.serve_plan import moderate
    from snugvl.planner.capabilities import VLLM_STEPS
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
    if not machine.gpus or limit <= 0:
        return None
    wishes = replace(planned.asked, backend="vllm", memory_bytes=limit)
    candidates = [each for each in planned.candidates if each.facts.name == planned.name]
    try:
        found = require(moderate(solve(candidates, machine, wishes), candidates, machine))
    except DoesNotFit:
        return None
    settings = found.settings
    if kind in FEWER_AT_ONCE:
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
