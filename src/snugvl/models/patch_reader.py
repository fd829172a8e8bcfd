"""Patches on their way to the vision tower, a chunk at a time: as bytes until they are on its device."""

import torch

from snugvl.layers.upload import sent
from snugvl.models.batch import PatchReader


def reader(
    patches: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    levels: torch.Tensor | None = None,
    slots: int = 1,
) -> PatchReader:
    """How a network on `device` reads an item's patches.

    Args:
        patches: `[patches, values]`; floating point, or bytes.
        levels: what the bytes mean: `[channels, 256]` floating point. A patch is one channel after another.
        slots: how often the values of a channel are repeated (one frame that fills a temporal patch).
    """
    if levels is None:
        return lambda start, end: sent(patches[start:end], device).to(dtype)
    channels = len(levels)
    meanings = sent(levels.flatten().to(dtype), device)  # rounded here as each value would be
    first = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=device)[:, None]

    def read(start: int, end: int) -> torch.Tensor:
        codes = sent(patches[start:end], device).view(end - start, channels, -1)
        places = codes + first  # int32
        values = meanings.index_select(0, places.flatten()).view(end - start, channels, 1, -1)
        return values.expand(-1, -1, slots, -1).reshape(end - start, -1)

    return read
