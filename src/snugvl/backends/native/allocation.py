"""From a plan to the allocation of the engine in this process: the plan's own settings, to the byte.

    solve ─► Choice ─► Allocation ─(as it is, to the process that loads)─► checked against what is free now
                                                                           ├ fits ─► EngineConfig
                                                                           └ doesn't ─► solved once more

Nothing is chosen here. Where there is no plan yet, and where less is free than a plan counted on, the
same solver plans with the same wishes, and what changed is said with the numbers.
"""

from dataclasses import fields, replace

from snugvl.backends.place import TargetDevice
from snugvl.checkpoint.facts import ModelFacts
from snugvl.core.config import EngineConfig
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import format_size
from snugvl.errors import RequestError
from snugvl.planner.engines.native.footprint import LATE_BYTES
from snugvl.planner.engines.native.step_graphs import DRAFT_TOKENS, POOL
from snugvl.planner.plan import Allocation, Choice, allocation_of
from snugvl.planner.settings import Engine, Settings
from snugvl.planner.shortfall import refusal_line
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import wishes_of

# Options that exclude models or engines.
DECIDING = (
    "speculation", "context", "weights", "kv_cache", "tower", "embedding", "experts", "images", "purpose",
)  # fmt: skip


def allocate(
    facts: ModelFacts, options: LoadOptions, place: TargetDevice, planned: Allocation | None = None
) -> Allocation:
    """`planned`, if it still fits, or the plan for what is free at `place` now.

    Raises:
        DoesNotFit: with every large component, and what would fit.
        RequestError: a wish that no plan can meet.
    """
    if (
        planned is not None
        and planned.footprint.total_bytes + _more_driver(place, planned) <= place.usable_bytes
    ):
        return planned
    found = allocation_of(choose(facts, options, place, "native"))
    if planned is None:
        return found
    return replace(found, changed=_difference(planned, found))


def _more_driver(place: TargetDevice, planned: Allocation) -> int:
    """Bytes that the driver takes here beyond those planned for it.

    An excess within the plan's reserve for late kernels counts as 0.
    """
    more = place.context_bytes - planned.device.context_bytes
    return more if more > LATE_BYTES // 4 else 0


def as_planned(place: TargetDevice, allocation: Allocation) -> TargetDevice:
    """`place` with the driver's memory that the plan which runs has for it; a context that is there stays."""
    return replace(place, context_bytes=allocation.device.context_bytes) if place.context_bytes else place


def choose(facts: ModelFacts, options: LoadOptions, place: TargetDevice, backend: Engine) -> Choice:
    """The plan for an engine in this process; raises like `allocate`."""
    wishes = wishes_of(options, sees=facts.vision is not None, backend=backend)
    plan = solve([Candidate(facts)], place.machine, wishes, found=[place.budget])
    if plan.choice is None and plan.closest is None:  # nothing was even tried: it is not a matter of memory
        said = options.said()
        raise RequestError(
            refusal_line(plan), field=next((name for name in DECIDING if name in said), "model")
        )
    return require(plan)


def _difference(before: Allocation, now: Allocation) -> str:
    """The sentence on what changed between two plans, with the numbers."""
    changed = [
        f"{name} {was} → {new}"
        for name, was, new in zip(Settings._fields, before.settings, now.settings, strict=True)
        if was != new
    ]
    again = f"planned again: {', '.join(changed) or 'the same settings'}"
    was_free, is_free = format_size(before.usable_bytes), format_size(now.usable_bytes)
    if now.usable_bytes < before.usable_bytes:
        return f"planned for {was_free}, of which {is_free} are left to use now; {again}"
    was, is_now = (format_size(each.device.context_bytes) for each in (before, now))
    driver = f"the CUDA driver and its libraries take {is_now} on this GPU"
    return f"{driver}, where {was} were planned for them; {again}"


def engine_config(allocation: Allocation, options: LoadOptions) -> EngineConfig:
    """The engine's configuration from an allocation, with the options that it has under the same name."""
    settings = allocation.settings
    values = ((each.name, getattr(options, each.name, None)) for each in fields(EngineConfig))
    said = {name: value for name, value in values if value is not None}
    return EngineConfig(
        **said
        | {
            "num_blocks": settings.kv_blocks,
            "max_model_len": settings.context,
            "max_num_seqs": settings.sequences,
            "max_batched_tokens": settings.chunk,
            "kv_cache": settings.kv,
            "state_snapshots": settings.state_snapshots,
            "encoder_cache_bytes": settings.encoder_cache_bytes,
            "step_graph_bytes": allocation.footprint.named(POOL),
            "step_graph_tokens": DRAFT_TOKENS if settings.draft_graphs else 0,
        }
    )
