"""From an `EngineChoice` to a model on transformers. "auto" is resolved here, once."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from snugvl.allocation import choose
from snugvl.backends.child import Report
from snugvl.backends.hosted import HostedModel
from snugvl.backends.measure import CONTEXT, Meter
from snugvl.backends.transformers.requirements import check_installed, check_weights
from snugvl.backends.wire import EngineChoice
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.options import DtypeName, LoadOptions, WeightsName
from snugvl.errors import DoesNotFit, RequestError, UnsupportedModel
from snugvl.hardware.sizes import format_size, parse_size
from snugvl.place import Place, cap, device_of, place_on
from snugvl.planner.placement import placement

Progress = Callable[[str, float], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS_FROM, WEIGHTS_TO = 0.05, 0.9  # of all progress: nearly all the time goes into reading weights


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A running model with what its memory was planned to be.

    Attributes:
        planned: bytes of each row of the ledger, by name.
        weights: bytes of the weights in place, by row of the ledger.
        cap_bytes: what this process never takes more of, or None on a CPU.
    """

    backend: Any
    place: Place
    planned: Mapping[str, int]
    weights: Mapping[str, int]
    cap_bytes: int | None


def load_hosted(choice: EngineChoice, report: Report) -> HostedModel:
    """The chosen model on transformers, with a meter."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # this process asks no network, whatever a library thinks
    loaded = load_engine(
        choice.model,
        device=choice.device,
        dtype=choice.dtype,
        weights=choice.weights,
        context=choice.context,
        max_pixels=choice.max_pixels,
        memory=choice.memory_bytes,
        max_waiting=choice.max_waiting,
        trust_remote_code=choice.trust_remote_code,
        placement=choice.placement,
        language_only=choice.language_only,
        progress=report,
    )
    from snugvl.backends.transformers.backend import TransformersMeter
    from snugvl.backends.transformers.network import HOST_WEIGHTS

    there = {name: nbytes for name, nbytes in loaded.weights.items() if name != HOST_WEIGHTS}
    planned = {name: nbytes for name, nbytes in loaded.planned.items() if name != HOST_WEIGHTS}
    meter = Meter(loaded.place.device, planned, there, 0, cap_bytes=loaded.cap_bytes)
    host = loaded.weights.get(HOST_WEIGHTS, 0)
    return HostedModel(loaded.backend, TransformersMeter(meter, host, loaded.planned))


def load_planned(options: LoadOptions, *, progress: Progress | None = None) -> Loaded:
    """Plan for what is free now, then load; a model that no plan knows is loaded as `sizes.py` finds room.

    Raises:
        as `load_engine`, and DoesNotFit with the plan's numbers.
    """
    placed: tuple[tuple[str, str], ...] = ()
    try:
        facts = replace(facts_of(str(locate(options.model)), offline=True), name=options.model)
    except UnsupportedModel:
        pass
    else:
        place = place_on(device_of(options.device), options.memory_bytes)
        choice = choose(facts, options, place, "transformers")
        settings, placed = choice.settings, placement(choice)
        made = settings.weights if choice.option.made else "auto"
        options = replace(
            options,
            context=settings.context,
            max_pixels=settings.max_pixels,
            weights=made,  # type: ignore[arg-type]
        )
    return load_engine(
        options.model,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        context=options.context,
        max_pixels=options.max_pixels,
        memory=options.memory_bytes,
        max_waiting=options.max_waiting,
        trust_remote_code=options.trust_remote_code,
        placement=placed,
        language_only=options.language_only,
        progress=progress,
    )


def load_engine(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: DtypeName = "auto",
    weights: WeightsName = "auto",
    context: int | None = None,
    max_pixels: int | None = None,
    memory: int | str | None = None,
    max_waiting: int | None = None,
    trust_remote_code: bool = False,
    placement: tuple[tuple[str, str], ...] = (),
    language_only: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """Load a checkpoint with transformers, in this process. Nothing is downloaded.

    Args:
        model: `pocket`, a checkpoint folder, or a Hub id that is in the local cache.
        dtype: auto takes bfloat16 (float16 before Ampere) on a GPU, and on a CPU float32 where it leaves half
            of the free memory.
        weights: "int8" and "int4" are made by bitsandbytes; else as the checkpoint has them.
        context: tokens of one conversation; by default as many as fit, up to 8,192.
        placement: module to device ("cuda:0", "cpu", "disk"), by the plan; empty: everything on `device`.
        language_only: refuse pictures, and keep the vision tower off the GPU.
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
    from snugvl.backends.transformers.backend import Parts, assemble
    from snugvl.backends.transformers.network import open_model, told
    from snugvl.backends.transformers.opening import open_checkpoint, open_inputs

    report("reading headers", 0.03)
    checkpoint = open_checkpoint(str(model), locate(str(model)), trusted=trust_remote_code)
    check_weights(weights, checkpoint.quantization)
    target = device_of(device)
    place = place_on(target, parse_size(memory, "memory") if isinstance(memory, str) else memory)
    parameters, estimate, kind = _estimate(checkpoint, dtype, weights, place)
    placed = _device_map(checkpoint, placement, target, kind, language_only=language_only)
    if not placement and estimate > place.usable_bytes - place.context_bytes:
        raise DoesNotFit(_too_large(str(model), estimate, place))
    cap_bytes = cap(place)
    inputs = open_inputs(checkpoint)
    text = f"loading weights ({format_size(estimate)})"
    report(text, WEIGHTS_FROM)
    if placed is not None:  # where the first module is elsewhere, older versions warn of every prompt
        warnings.filterwarnings("ignore", "You are calling .generate", UserWarning)
    with told(lambda done: report(text, WEIGHTS_FROM + (WEIGHTS_TO - WEIGHTS_FROM) * done)):
        network = open_model(checkpoint, dtype=kind, device_map=placed, weights=weights)
    report("making room for the KV cache", WEIGHTS_TO)
    parts = Parts(checkpoint, inputs, network, place, kind, placed, language_only, parameters)
    made = assemble(parts, context=context, max_pixels=max_pixels, max_waiting=max_waiting, weights=weights)
    planned = made.planned if placement else {"weights": estimate, **made.planned}
    if target.type == "cuda":
        planned[CONTEXT] = place.context_bytes
    return Loaded(made.backend, place, planned, made.weights, cap_bytes)


def _estimate(checkpoint: Any, dtype: str, weights: str, place: Place) -> tuple[int, int, torch.dtype]:
    """Parameters, bytes of the weights once loaded, and the type of what isn't quantised."""
    from snugvl.backends.transformers.sizes import parameters_in, stored_bytes

    parameters = parameters_in(checkpoint.folder, checkpoint.config)
    stored = stored_bytes(checkpoint.folder)
    kind = _dtype(dtype, parameters or stored // 2, place)
    if checkpoint.widened:
        return parameters, parameters * kind.itemsize, kind
    if checkpoint.quantization is not None or not parameters:
        return parameters, stored, kind
    factor = {"int8": 1.1, "int4": 0.7}.get(weights, kind.itemsize)  # with what bitsandbytes leaves as it is
    return parameters, int(parameters * factor), kind


def _device_map(
    checkpoint: Any,
    placement: tuple[tuple[str, str], ...],
    device: torch.device,
    kind: torch.dtype,
    *,
    language_only: bool,
) -> dict[str, str] | None:
    """Module to device; None: plain main memory."""
    from snugvl.backends.transformers.network import checked, skeleton_of, without_tower

    if placement:
        return checked(placement, skeleton_of(checkpoint, kind), device)
    if device.type == "cpu":
        return None
    if language_only and checkpoint.sees:
        return without_tower(skeleton_of(checkpoint, kind), device)
    return {"": str(device)}


def _dtype(name: str, parameters: int, place: Place) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise RequestError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}", field="dtype")
    if place.compute_capability is not None:
        return torch.bfloat16 if place.compute_capability >= (8, 0) else torch.float16
    return torch.float32 if parameters * 4 <= place.free_bytes // 2 else torch.bfloat16


def _too_large(model: str, estimate: int, place: Place) -> str:
    return (
        f"the weights of {model} need {format_size(estimate)}, but {place.name} has "
        f"{format_size(place.free_bytes)} free, of which {format_size(place.usable_bytes)} may be used; "
        "keep layers in main memory (snugvl plan says how many and what that costs), take int8 or int4 "
        "weights, or a smaller model"
    )
