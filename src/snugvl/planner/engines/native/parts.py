"""Embedding, head and vision tower of our engine on a GPU: in which formats, and where, best first.

    all in bf16 on the GPU > embedding in main memory > both heads in int8 > tower in int8 > tower streamed

An embedding in main memory costs neither quality nor time worth naming: the GPU reads a row of it for each
token, some kilobytes. So it comes before any coarser format. But that memory has to be page-locked, of which
WSL2 gives little and at times nothing: there it comes for who asks. An embedding that is the head as well is
read whole for every token, and stays on the GPU.
"""

from dataclasses import replace
from typing import Final

from snugvl.core.options import EmbeddingName, TowerName
from snugvl.core.sizes import format_size
from snugvl.planner.capabilities import WHOLE, Parts
from snugvl.planner.footprint.total import Device
from snugvl.planner.footprint.weights import embedding_bytes, tower_bytes
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Placement, Settings

RESIDENT: Final = (WHOLE, Parts("int8"), Parts("int8", "int8"))
# Of the formats of a streamed tower the leaner crosses sooner. Without a wish the head gives way first.
STREAMED: Final = tuple(replace(each, vision="streamed") for each in RESIDENT)


def parts_of(
    model: Inventory, device: Device, tower: TowerName = "auto", embedding: EmbeddingName = "auto"
) -> tuple[Parts, ...] | str:
    """What may be tried on a device, best first, or why what is wished can't be."""
    if why := _impossible(model, device, tower, embedding):
        return why
    found = [
        parts for formats in _towers(model, tower) for parts in _embeddings(formats, model, device, embedding)
    ]
    return tuple(found) or _too_much(model, device, tower, embedding)


def _impossible(model: Inventory, device: Device, tower: TowerName, embedding: EmbeddingName) -> str | None:
    if tower == "streamed" and (device.cpu or model.facts.vision is None):
        why = "there is no GPU to stream it to" if device.cpu else "the model has none"
        return f"the vision tower can't be streamed: {why}"
    if embedding == "cpu" and (device.cpu or model.facts.tied):
        why = (
            "there is no GPU to read it"
            if device.cpu
            else "it is lm_head as well, read whole for every token"
        )
        return f"the embedding can't be apart in main memory: {why}"
    return None


def _towers(model: Inventory, wish: TowerName) -> list[tuple[Parts, ...]]:
    """Formats by where the tower is, best first."""
    if model.facts.vision is None:
        return [RESIDENT[:2]]
    if wish == "streamed":
        return [STREAMED]
    return [RESIDENT] if wish == "resident" else [RESIDENT, STREAMED[1:]]


def _embeddings(
    formats: tuple[Parts, ...], model: Inventory, device: Device, wish: EmbeddingName
) -> list[Parts]:
    """The same with the embedding where it may be; what main memory has no room for is left out."""
    on_gpu = [parts for parts in formats if _has_room(parts, model, device)]
    beside = [replace(parts, embedding="cpu") for parts in formats]
    beside = [parts for parts in beside if _has_room(parts, model, device)]
    if wish == "cpu":
        return beside
    scarce = device.cpu or device.pinned_bytes is not None
    if wish == "gpu" or scarce or model.facts.tied or not beside:
        return on_gpu
    return [*(parts for parts in on_gpu if parts.head == "bf16"), *beside]


def main_memory_bytes(parts: Parts, model: Inventory) -> int:
    """What stays in main memory, at most."""
    settings = Settings("native", head=parts.head, vision_weights=parts.vision_weights)
    tower = tower_bytes(model, settings) if parts.vision == "streamed" else 0
    return tower + (embedding_bytes(model, settings) if parts.embedding == "cpu" else 0)


def _has_room(parts: Parts, model: Inventory, device: Device) -> bool:
    room = _room(device)
    return room is None or main_memory_bytes(parts, model) <= room


def _room(device: Device) -> int | None:
    known = [room for room in (device.host_bytes, device.pinned_bytes) if room is not None]
    return min(known, default=None)


def _too_much(model: Inventory, device: Device, tower: TowerName, embedding: EmbeddingName) -> str:
    """Why what is wished can't be in main memory."""
    place: Placement = "streamed" if tower == "streamed" else "gpu"
    other: Placement = "cpu" if embedding == "cpu" else "gpu"
    least = main_memory_bytes(Parts("int8", "int8", place, other), model)
    wished = [
        *(["the vision tower can't be streamed"] if place == "streamed" else []),
        *(["the embedding can't be in main memory"] if other == "cpu" else []),
    ]
    room = format_size(_room(device) or 0)
    return (
        f"{', and '.join(wished)}: it takes {format_size(least)} of main memory, of which {room} may be used"
    )
