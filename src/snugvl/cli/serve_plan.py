"""What `snugvl serve` is going to load: model, engine, plan. Nothing is downloaded, no torch imported."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from snugvl.errors import CheckpointNotFound, RequestError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from snugvl.cli.serve_options import BackendChoice, LoadChoice
    from snugvl.hardware.machine import Machine
    from snugvl.planner.plan import Choice, Plan
    from snugvl.planner.settings import Engine
    from snugvl.planner.solve import Candidate
    from snugvl.planner.wishes import Wishes


SERVED_CONTEXT = 8192  # tokens, where nobody says: as our own engine takes them


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
        from snugvl.planner.verdicts import why_engine

        return why_engine(self.plan)


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A model whose memory nobody can tell beforehand. `why`: the engine with the reason."""

    name: str
    engine: Engine
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
    load: LoadChoice, backend: BackendChoice, seen: Future[Machine] | None = None
) -> Planned | Unplanned:
    """The plan of the model that was named, or of the best one that is on this machine already.

    `seen`: of `look`, where it was begun before.

    Raises:
        CheckpointNotFound: it is not on this machine; says how to get it.
        UnsupportedModel: of a kind that can't be planned, and transformers wasn't asked for.
        DoesNotFit: it needs more memory than there is, with the numbers.
        RequestError: a wish that no plan can meet; a device that is not there.
    """
    from snugvl.planner.recommend import with_instead
    from snugvl.planner.solve import require, solve

    machine = on_device(load.device, (seen or look()).result())
    try:
        candidates = _downloaded() if load.model is None else [_named(load.model)]
    except UnsupportedModel as error:
        return _unplanned(load, backend, error)
    sees = any(candidate.facts.vision for candidate in candidates)
    wishes = _wishes(load, backend, sees=sees)
    plan = solve(candidates, machine, wishes, _missing(backend))
    require(plan)
    plan = with_instead(moderate(plan, candidates, machine), machine)
    choice = require(plan)
    name = choice.option.model.name
    reason = _reason(name) if load.model is None else None
    return Planned(name, choice, plan, machine, tuple(candidates), wishes, reason)


def moderate(plan: Plan, candidates: Sequence[Candidate], machine: Machine) -> Plan:
    """The same engine and model with the room a server needs, where nobody asked for more: what is left makes
    it faster, or becomes KV cache.

    Our own engine does that itself when it loads (`allocation.py`); the others take what the plan says.
    """
    from snugvl.planner.footprint.images import pixels_for, scales
    from snugvl.planner.solve import solve

    choice = plan.choice
    if choice is None or plan.wishes.context is not None or choice.settings.context <= SERVED_CONTEXT:
        return plan
    if choice.option.engine == "native":
        return plan
    settings, model = choice.settings, choice.option.model
    pixels = plan.wishes.max_pixels
    if pixels is None and settings.images and settings.max_pixels is not None and scales(model):
        pixels = min(settings.max_pixels, pixels_for(model, SERVED_CONTEXT // 2 // settings.images))
    wishes = replace(plan.wishes, context=SERVED_CONTEXT, max_pixels=pixels, backend=choice.option.engine)
    same = [each for each in candidates if each.facts.name == model.name]
    smaller = solve(same, machine, wishes)
    if smaller.choice is None:
        return plan
    return replace(smaller, wishes=replace(wishes, backend=plan.wishes.backend), verdicts=plan.verdicts)


def _wishes(load: LoadChoice, backend: BackendChoice, *, sees: bool) -> Wishes:
    from snugvl.planner.wishes import Wishes

    images = 0 if backend.language_only or not sees else 1 if backend.images is None else backend.images
    return Wishes(
        load.context,
        images,
        max_pixels=load.max_pixels,
        backend=backend.backend,
        concurrency=backend.concurrency or 1,
        weights=None if load.weights == "auto" else load.weights,
        kv_cache=None if load.kv_cache == "auto" else load.kv_cache,
        memory_bytes=load.memory_bytes,
        language_only=backend.language_only,
        tower=backend.tower,
        embedding=backend.embedding,
    )


def _missing(backend: BackendChoice) -> dict[Engine, str]:
    """What isn't installed and nobody asked for by name. (Who asked for it is told by the engine itself.)"""
    missing: dict[Engine, str] = {}
    if backend.backend != "auto":
        return missing
    if not (backend.vllm_command or find_spec("vllm") or shutil.which("vllm")):
        missing["vllm"] = "it is not installed: pip install 'snugvl[vllm]', or name it with --vllm-command"
    if not (find_spec("transformers") and find_spec("accelerate")):
        missing["transformers"] = "it is not installed: pip install 'snugvl[transformers]'"
    return missing


def _unplanned(load: LoadChoice, backend: BackendChoice, error: UnsupportedModel) -> Unplanned:
    assert load.model is not None, "what is downloaded is of the catalogue"
    if backend.backend == "transformers":
        if load.kv_cache == "fp8":
            raise RequestError("--kv-cache fp8 is not for transformers; leave it out", field="kv_cache")
        return Unplanned(load.model, "transformers", f"transformers, without a plan: {error}")
    if backend.backend == "auto":
        raise UnsupportedModel(f"{error}; --backend transformers may run it, without a plan") from None
    raise error


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


def on_device(device: str, machine: Machine) -> Machine:
    """`machine` as an engine on `device` sees it.

    Raises:
        RequestError: the device is unknown or not there.
    """
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
