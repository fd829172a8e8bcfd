"""From a configuration's rotary settings to the rotation of a batch."""

import torch

from snugvl.checkpoint.architecture import Rope
from snugvl.layers.rotary import CosSin, cos_sin, inverse_frequencies, mrope_axes


def rotation_of(positions: torch.Tensor, rope: Rope, dtype: torch.dtype) -> CosSin:
    """Cosine and sine `[tokens, rope.dims]` for tokens at `positions` `[3, tokens]`: time, height, width.

    Without sections the three are the same, and time counts.
    """
    steps = inverse_frequencies(rope.dims, rope.theta, positions.device)
    wide = positions.float()
    if rope.sections is None:
        return cos_sin(wide[0, :, None] * steps, dtype)
    axes = mrope_axes(rope.sections, positions.device, interleaved=rope.interleaved)
    return cos_sin(wide[axes].T * steps, dtype)
