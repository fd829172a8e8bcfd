"""From an `EngineChoice` to a model on transformers. "auto" is resolved here, once."""

import gc
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from snugvl.backends.measure import CONTEXT, Meter
from snugvl.backends.native.allocation import choose
from snugvl.backends.place import TargetDevice, cap, device_of, dtype_of, place_on, with_driver
from snugvl.backends.process.child import HostedModel
from snugvl.backends.process.wire import EngineChoice
from snugvl.backends.transformers.requirements import check_installed, check_weights
from snugvl.checkpoint.catalogue import thinks_about_pictures
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.formats import BITSANDBYTES
from snugvl.core.memory_kinds import Kind
from snugvl.core.options import LoadOptions, Progress
from snugvl.core.sizes import format_size
from snugvl.engine.claims import DeviceClaim, loading_onto
from snugvl.errors import DoesNotFit, UnsupportedModel
from snugvl.hardware.machine import Machine
from snugvl.inputs.reasoning import ThinkingDefault
from snugvl.planner.engines.transformers.rules import placement, said_of

WEIGHTS_FROM, WEIGHTS_TO = 0.05, 0.9  # of all progress: nearly all the time goes into reading weights


@dataclass(frozen=True, slots=True, eq=False)
class LoadedTransformers:
    """A running model with the plan of its memory.

    Attributes:
        planned: bytes of each row of the ledger, by name.
        weights: bytes of the weights in place, by row of the ledger.
        cap_bytes: most bytes that this process ever takes, or None on a CPU.
    """

    backend: Any
    place: TargetDevice
    planned: Mapping[str, int]
    weights: Mapping[str, int]
    cap_bytes: int | None


def load_hosted(choice: EngineChoice, report: Progress) -> HostedModel:
    """The chosen model on transformers, with a meter."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # this process asks no network, whatever a library thinks
    loaded = load_engine(choice, placement=choice.placement, progress=report)
    from snugvl.backends.transformers.backend import TransformersMeter
    from snugvl.backends.transformers.network import HOST_WEIGHTS

    there = {name: nbytes for name, nbytes in loaded.weights.items() if name != HOST_WEIGHTS}
    planned = {name: nbytes for name, nbytes in loaded.planned.items() if name != HOST_WEIGHTS}
    meter = Meter(loaded.place.device, planned, there, 0, cap_bytes=loaded.cap_bytes)
    host = loaded.weights.get(HOST_WEIGHTS, 0)
    return HostedModel(loaded.backend, TransformersMeter(meter, host, loaded.planned))


def load_planned(options: LoadOptions, *, progress: Progress | None = None) -> LoadedTransformers:
    """Plan for what is free now, then load; a model that no plan knows is loaded as `Costs` find room.

    Raises:
        as `load_engine`, and DoesNotFit with the plan's numbers.
    """
    try:
        facts = replace(facts_of(str(locate(options.model)), offline=True), name=options.model)
    except UnsupportedModel:
        return load_engine(options, progress=progress)
    place = place_on(device_of(options.device), options.memory_bytes, kernels=False)
    choice = choose(facts, options, place, "transformers")
    planned = said_of(choice, options)
    return load_engine(planned, placement=placement(choice), machine=place.seen, progress=progress)


def load_engine(
    options: LoadOptions,
    *,
    placement: tuple[tuple[str, str], ...] = (),
    machine: Machine | None = None,
    progress: Progress | None = None,
) -> LoadedTransformers:
    """Load a checkpoint with transformers, in this process. Nothing is downloaded.

    Of `options`: dtype auto takes bfloat16 (float16 before Ampere) on a GPU, and on a CPU float32 where it
    leaves half of the free memory; weights of `BITSANDBYTES` are made by it, else they are as the
    checkpoint has them; by default the context is as long as fits, up to 8,192 tokens.

    Args:
        placement: module to device ("cuda:0", "cpu", "disk"), by the plan; empty: everything on one device.
        machine: as it was before this process took anything of it, where it was probed then.
        progress: called with what is being done and how much is done, from 0 to 1.

    Raises:
        EngineError: transformers isn't installed.
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint, or what it needs.
        DoesNotFit: not enough memory, with the numbers.
        RequestError: an argument is wrong.
    """
    check_installed()
    report = progress or (lambda _detail, _done: None)
    report("starting transformers", 0.01)
    with loading_onto(device_of(options.device)) as claim:
        # Modules of transformers and hooks of accelerate refer to each other.
        claim.use(lambda: None, gc.collect)
        return _loaded(options, placement, machine, report, claim)


def _loaded(
    options: LoadOptions,
    placement: tuple[tuple[str, str], ...],
    machine: Machine | None,
    report: Progress,
    claim: DeviceClaim,
) -> LoadedTransformers:
    """See `load_engine`. Where it raises, its variables are cleared, and those of whatever it has called."""
    from snugvl.backends.transformers.backend import LoadedParts, assemble
    from snugvl.backends.transformers.network import open_model, told
    from snugvl.backends.transformers.opening import open_checkpoint, open_inputs

    report("reading headers", 0.03)
    model, blind = options.model, options.language_only
    checkpoint = open_checkpoint(model, locate(model), trusted=options.trust_remote_code)
    check_weights(options.weights, checkpoint.quantization)
    target = claim.device
    place = with_driver(place_on(target, options.memory_bytes, machine, kernels=False))
    parameters, estimate, kind = _estimate(checkpoint, options, place)
    placed = _device_map(checkpoint, placement, target, kind, language_only=blind)
    if not placement and estimate > place.usable_bytes - place.context_bytes:
        raise DoesNotFit(_too_large(model, estimate, place))
    cap_bytes = cap(place)
    inputs = open_inputs(checkpoint)
    text = f"loading weights ({format_size(estimate)})"
    report(text, WEIGHTS_FROM)
    if placed is not None:  # where the first module is elsewhere, older versions warn of every prompt
        warnings.filterwarnings("ignore", "You are calling .generate", UserWarning)
    with told(lambda done: report(text, WEIGHTS_FROM + (WEIGHTS_TO - WEIGHTS_FROM) * done)):
        network = open_model(checkpoint, dtype=kind, device_map=placed, weights=options.weights)
    report("making room for the KV cache", WEIGHTS_TO)
    thinking = ThinkingDefault(options.thinking, thinks_about_pictures(checkpoint.config.model_type))
    made = assemble(
        LoadedParts(checkpoint, inputs, network, place, kind, placed, options, parameters, thinking, claim)
    )
    planned = made.planned if placement else {Kind.WEIGHTS: estimate, **made.planned}
    if target.type == "cuda":
        planned[CONTEXT] = place.context_bytes
    return LoadedTransformers(made.backend, place, planned, made.weights, cap_bytes)


def _estimate(checkpoint: Any, options: LoadOptions, place: TargetDevice) -> tuple[int, int, torch.dtype]:
    """Parameters, bytes of the weights once loaded, and the type of what isn't quantised."""
    from snugvl.backends.transformers.backend import parameters_in, stored_bytes

    parameters = parameters_in(checkpoint.folder, checkpoint.config)
    stored = stored_bytes(checkpoint.folder)
    wide = (parameters or stored // 2) * 4 <= place.free_bytes // 2
    kind = dtype_of(options.dtype, place, wide=wide)
    if checkpoint.widened:
        return parameters, parameters * kind.itemsize, kind
    if checkpoint.quantization is not None or not parameters:
        return parameters, stored, kind
    if options.weights in BITSANDBYTES:
        from snugvl.backends.transformers.network import by_bits_bytes, skeleton_of

        return parameters, by_bits_bytes(skeleton_of(checkpoint, kind), options.weights), kind
    return parameters, parameters * kind.itemsize, kind


def _device_map(
    checkpoint: Any,
    placement: tuple[tuple[str, str], ...],
    device: torch.device,
    kind: torch.dtype,
    *,
    language_only: bool,
) -> dict[str, str] | None:
    """Module to device; None: plain host memory."""
    from snugvl.backends.transformers.network import checked, skeleton_of, without_tower

    if placement:
        return checked(placement, skeleton_of(checkpoint, kind), device)
    if device.type == "cpu":
        return None
    if language_only and checkpoint.sees:
        return without_tower(skeleton_of(checkpoint, kind), device)
    return {"": str(device)}


def _too_large(model: str, estimate: int, place: TargetDevice) -> str:
    return (
        f"the weights of {model} need {format_size(estimate)}, but {place.name} has "
        f"{format_size(place.free_bytes)} free, of which {format_size(place.usable_bytes)} may be used; "
        "keep layers in host memory (snugvl plan says how many and what that costs), take "
        f"{' or '.join(BITSANDBYTES)} weights, or a smaller model"
    )
