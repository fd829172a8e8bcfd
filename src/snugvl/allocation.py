"""What an engine in this process allocates: the plan's own footprint against the memory that is free now.

`snugvl plan` chooses among models and engines; here model, dtype and device are given, and context, pixels
and the KV pool follow. Asked for nothing, the largest step that fits is taken; asked for something that
doesn't fit, it is refused with the numbers and with what would.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from snugvl.checkpoint.facts import ModelFacts
from snugvl.config import DEFAULT_BLOCK_SIZE, EngineConfig
from snugvl.errors import DoesNotFit, RequestError
from snugvl.planner.footprint.component import Footprint
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings
from snugvl.planner.shortfall import gib

CONTEXTS = (8192, 4096, 2048, 1024)  # tokens, tried in this order
PIXEL_SHARES = (1, 2, 4, 8)  # parts of half a context that one image may fill
POOL_SEQUENCES = 4  # full-length sequences the KV pool holds where memory allows
MARGIN = 0.05  # of the free memory stays free


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model goes. `free_bytes` now; `name` as a user knows it."""

    device: torch.device
    name: str
    free_bytes: int
    compute_capability: tuple[int, int] | None = None

    @property
    def usable_bytes(self) -> int:
        """What the engine may take."""
        return int(self.free_bytes * (1 - MARGIN))


@dataclass(frozen=True, slots=True)
class Allocation:
    """The engine's sizes, and the footprint they come from.

    Attributes:
        footprint: with the KV cache of one conversation of the full context.
        kv_bytes: of the KV pool, which takes what is left, up to `POOL_SEQUENCES` conversations.
    """

    engine: EngineConfig
    max_pixels: int
    footprint: Footprint
    kv_bytes: int


def allocate(
    facts: ModelFacts, dtype: torch.dtype, place: Place, *, context: int | None, max_pixels: int | None
) -> Allocation:
    """The largest allocation that fits, within what was asked for.

    Args:
        context: tokens of one conversation, or None for as many as fit, up to 8,192.
        max_pixels: limit of one image, or None for what half of the context holds.

    Raises:
        DoesNotFit: with every large component, and the largest context and pixels that would fit.
        RequestError: `context` is beyond the model's.
    """
    limit = facts.text.max_position_embeddings
    if context is not None and not 1 <= context <= limit:
        raise RequestError(
            f"context must be 1 to {limit:,} tokens for {facts.name}, not {context:,}", field="context"
        )
    model = inventory(facts)
    wished = list(_steps(facts, context, max_pixels))
    for length, pixels in wished:
        allocation = _try(model, facts, dtype, place, length, pixels)
        if allocation is not None:
            return allocation
    raise DoesNotFit(_refusal(model, facts, dtype, place, wished[-1]))


def _steps(facts: ModelFacts, context: int | None, max_pixels: int | None) -> Iterator[tuple[int, int]]:
    """(context, pixels) to try, best first."""
    limit = facts.text.max_position_embeddings
    for length in [context] if context else sorted({min(c, limit) for c in CONTEXTS}, reverse=True):
        if facts.vision is None:
            yield length, 0
            continue
        rule, token = facts.vision.rule, (facts.vision.patch_size * facts.vision.merge_size) ** 2
        if max_pixels is not None:
            yield length, min(max_pixels, rule.max_pixels)
            continue
        for share in PIXEL_SHARES:
            yield length, min(rule.max_pixels, max(rule.min_pixels, length // 2 * token // share))


def _settings(dtype: torch.dtype, length: int, pixels: int) -> Settings:
    weights = "fp32" if dtype == torch.float32 else "bf16"
    return Settings("native", weights, context=length, max_pixels=pixels or None)  # type: ignore[arg-type]


def _device(place: Place) -> Device:
    """Free memory was read with the CUDA context up, so the context costs nothing more."""
    cpu = place.device.type == "cpu"
    return Device(
        0, compute_capability=place.compute_capability, cpu=cpu, free_bytes=place.free_bytes if cpu else 0
    )


def _try(
    model: Inventory, facts: ModelFacts, dtype: torch.dtype, place: Place, length: int, pixels: int
) -> Allocation | None:
    needed = footprint(model, _settings(dtype, length, pixels), _device(place))
    spare = place.usable_bytes - needed.total_bytes
    if spare < 0:
        return None
    per_sequence = -(-length // DEFAULT_BLOCK_SIZE)
    block_bytes = needed.named("KV cache") // per_sequence
    blocks = min(per_sequence + spare // max(block_bytes, 1), POOL_SEQUENCES * per_sequence)
    return Allocation(
        EngineConfig(num_blocks=blocks, max_model_len=length), pixels, needed, blocks * block_bytes
    )


def _refusal(
    model: Inventory, facts: ModelFacts, dtype: torch.dtype, place: Place, least: tuple[int, int]
) -> str:
    needed = footprint(model, _settings(dtype, *least), _device(place))
    large = sorted(needed.counted, key=lambda part: part.nbytes, reverse=True)[:4]
    parts = ", ".join(f"{part.name} {gib(part.nbytes)}" for part in large)
    for length, pixels in _steps(facts, None, None):
        if _try(model, facts, dtype, place, length, pixels) is not None:
            way_out = f"a context of {length:,} tokens with max_pixels={pixels} fits"
            break
    else:
        way_out = "free some memory, or ask snugvl plan for a model that fits"
    return (
        f"{facts.name} in {str(dtype).removeprefix('torch.')} with a context of {least[0]:,} tokens "
        f"and images of {least[1]:,} pixels needs {gib(needed.total_bytes)} ({parts}), but {place.name} has "
        f"{gib(place.free_bytes)} free, of which {gib(place.usable_bytes)} may be used; {way_out}"
    )
