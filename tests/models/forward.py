"""Run our network on whole prompts, without an engine: for comparison with the oracle."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from snugvl.core.config import EngineConfig
from snugvl.engine.memory import allocate
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import ForwardBatch, GridTHW, encoded, patch_reader
from snugvl.models.networks import LoadableNetwork
from snugvl.models.rope import mrope_positions
from tests.checkpoints import IMAGE, VIDEO


@dataclass
class Prompt:
    """Token ids with their placeholders, and the images behind them."""

    ids: list[int]
    grids: list[GridTHW] = field(default_factory=list)
    patches: torch.Tensor = field(default_factory=lambda: torch.empty(0, 1536))

    @property
    def vision_rows(self) -> torch.Tensor:
        return torch.tensor([row for row, token in enumerate(self.ids) if token in (IMAGE, VIDEO)])


def encode_vision(model: LoadableNetwork, patches: torch.Tensor, grids: Sequence[GridTHW]) -> torch.Tensor:
    """`patches` `[patches, patch_dim]` of several images → `[image tokens, (1 + levels) · hidden]`."""
    images = patches.split([math.prod(grid) for grid in grids])
    readers = (patch_reader(image, model.device, model.dtype) for image in images)
    return torch.cat(
        [encoded(model.encode_in_steps(read, g)) for read, g in zip(readers, grids, strict=True)]
    )


def new_cache(model: LoadableNetwork, blocks: int, block_size: int = 4) -> KVCache:
    sizes = EngineConfig(num_blocks=blocks, block_size=block_size, max_num_seqs=1)
    return allocate(model, sizes)


def logits(model: LoadableNetwork, prompt: Prompt, chunks: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of every position, `[tokens, vocab]`, prefilled in `chunks` (default: in one)."""
    total = len(prompt.ids)
    vision = model.config.vision
    positions, _ = mrope_positions(
        prompt.ids,
        prompt.grids,
        placeholders=model.config.placeholders,
        merge_size=1 if vision is None else vision.spatial_merge_size,
    )
    embeds = encode_vision(model, prompt.patches, prompt.grids) if prompt.grids else None
    rows = prompt.vision_rows
    cache = new_cache(model, blocks=total)
    # Blocks in reverse order: a table that is not simply 0, 1, 2 … must be followed.
    table = torch.arange(-(-total // 4)).flip(0)[None]
    state_slots = torch.zeros(1, dtype=torch.int64)
    parts, start = [], 0
    with torch.inference_mode():
        for size in chunks or [total]:
            end = start + size
            slots = (table[0][torch.arange(start, end) // 4]) * 4 + torch.arange(start, end) % 4
            inside = (rows >= start) & (rows < end)
            batch = ForwardBatch(
                input_ids=torch.tensor(prompt.ids[start:end]),
                positions=positions[:, start:end],
                attention=AttentionMetadata((size,), (end,), slots, table, 4, state_slots=state_slots),
                logit_rows=torch.arange(size),
                vision_rows=rows[inside] - start if embeds is not None and inside.any() else None,
                vision_embeds=embeds[inside] if embeds is not None and inside.any() else None,
            )
            parts.append(model(batch, cache))
            start = end
    assert start == total
    return torch.cat(parts)
