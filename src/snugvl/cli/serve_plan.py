"""What `snugvl serve` is going to load: the model, and its plan. Nothing is downloaded, no torch imported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugvl.errors import CheckpointNotFound, RequestError

if TYPE_CHECKING:
    from snugvl.cli.options import WeightsName
    from snugvl.hardware.machine import Machine
    from snugvl.planner.plan import Choice, Plan
    from snugvl.planner.solve import Candidate


@dataclass(frozen=True, slots=True)
class Planned:
    """A model that fits. `reason`: why this one, where nobody named one."""

    name: str
    choice: Choice
    plan: Plan
    machine: Machine
    reason: str | None


def plan_for(
    model: str | None,
    *,
    device: str,
    context: int | None,
    max_pixels: int | None,
    weights: WeightsName = "auto",
    memory_bytes: int | None = None,
) -> Planned:
    """The plan of `model`, or of the best one that is on this machine already.

    Raises:
        CheckpointNotFound: it is not on this machine; says how to get it.
        DoesNotFit: it needs more memory than there is, with the numbers.
        RequestError: a wish that no plan can meet; a device that is not there.
    """
    from snugvl.cli.machine_options import MachineChoice, machine_from
    from snugvl.planner.solve import require, solve
    from snugvl.planner.wishes import Wishes

    machine = _on(device, machine_from(MachineChoice()))
    candidates = _downloaded() if model is None else [_named(model)]
    sees = any(candidate.facts.vision for candidate in candidates)
    wished = None if weights == "auto" else weights
    wishes = Wishes(
        context,
        1 if sees else 0,
        max_pixels=max_pixels,
        backend="native",
        weights=wished,
        memory_bytes=memory_bytes,
    )
    plan = solve(candidates, machine, wishes)
    choice = require(plan)
    name = choice.option.model.name
    return Planned(name, choice, plan, machine, _reason(name) if model is None else None)


def _named(model: str) -> Candidate:
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.planner.solve import Candidate

    locate(model)  # says how to get what is not here
    return Candidate(facts_of(model, offline=True))


def _downloaded() -> list[Candidate]:
    """Every form of the catalogue's ranked models that is complete on this machine; pocket always is."""
    from snugvl.checkpoint.catalogue import entries
    from snugvl.checkpoint.locate import locate
    from snugvl.checkpoint.read import facts_of
    from snugvl.planner.solve import Candidate

    found = []
    for entry in entries():
        for form in entry.forms if entry.quality_rank is not None and entry.sees else ():
            try:
                locate(form.repo)
            except CheckpointNotFound:
                continue
            found.append(Candidate(facts_of(form.repo, offline=True), -(entry.quality_rank or 0)))
    return found


def _reason(name: str) -> str:
    from snugvl.checkpoint.locate import POCKET

    if name == POCKET:
        return (
            "no model was named and no better one that fits is downloaded: this is pocket, the tiny one that "
            "is built in. snugvl plan names the best one for this machine, snugvl pull fetches it"
        )
    return f"no model was named: {name} is the best that is downloaded and fits"


def _on(device: str, machine: Machine) -> Machine:
    """`machine` as an engine on `device` sees it."""
    if device == "cpu":
        return replace(machine, gpus=())
    kind, _, index = device.partition(":")
    if kind == "auto" or not machine.gpus:
        return machine
    if kind != "cuda" or (index and not index.isdecimal()):
        raise RequestError(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:N", field="device")
    gpus = tuple(gpu for gpu in machine.gpus if gpu.index == int(index or 0))
    if not gpus:
        raise RequestError(
            f"device {device!r} is not there: this machine has {len(machine.gpus)} GPUs", field="device"
        )
    return replace(machine, gpus=gpus)
