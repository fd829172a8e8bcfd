"""From a configuration's rotary settings to the rotation of a batch.

Source of the scalings: Hugging Face transformers, `modeling_rope_utils.py` (Apache-2.0).
"""

import math
from functools import lru_cache

import torch

from snugvl.checkpoint.architecture import (
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Rope,
    YarnScaling,
)
from snugvl.layers.rotary import CosSin, cos_sin, inverse_frequencies, mrope_axes


def rotation_of(positions: torch.Tensor, rope: Rope, dtype: torch.dtype) -> CosSin:
    """Cosine and sine `[tokens, rope.dims]` for tokens at `positions` `[3, tokens]`: time, height, width.

    Without sections the three are the same, and time counts.
    """
    steps = _frequencies(rope, positions.device)
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling | LongRope) else 1.0
    axes = None if rope.sections is None else _axes(rope.sections, positions.device, rope.interleaved)
    if positions.is_cuda:
        from snugvl.layers.kernels.rotation import rotation  # needs triton, which only GPUs bring

        return rotation(positions, steps, axes, magnitude, dtype)
    wide = positions.float()
    angles = wide[0, :, None] if axes is None else wide[axes].T
    return cos_sin(angles * steps, dtype, magnitude)


# Kept per device: a recording of a CUDA graph can't copy from the host. It follows a run without one.
@lru_cache
def _frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    """`[dims / 2]` float32 angular steps per position, scaled."""
    plain = inverse_frequencies(rope.dims, rope.theta, device)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case LongRope(factors):
            powers = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
            return (1.0 / (torch.tensor(factors) * rope.theta**powers)).to(device)
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)


@lru_cache
def _axes(sections: tuple[int, int, int], device: torch.device, interleaved: bool) -> torch.Tensor:
    return mrope_axes(sections, device, interleaved=interleaved)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original * plain / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    def index(turns: float) -> float:
        """Of the frequency, as a real number, that turns so often in the original context."""
        length = scaling.original / (turns * 2 * math.pi)
        return rope.dims * math.log(length) / (2 * math.log(rope.theta))

    low, high = index(scaling.fast), index(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(rope.dims // 2, device=plain.device) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)
