"""Rotary position embeddings: M-RoPE positions of a prompt, and the rotation at a batch's positions.

Positions are of time, height and width. Text advances all three together; an image's tokens share one time
and count rows and columns from the position where it starts; what follows continues after its longer side.
Videos come in two ways:

    Qwen3-VL      each frame stands between its own vision_start and vision_end, after its time as text, like
                  an image
    Qwen2.5-VL    all frames are one run of placeholders, `time_step` positions of time apart, rounded down;
                  height and width begin again. What follows continues after the longer side, whatever time
                  it has become

A rotation is `(cos, sin)`, each `[tokens, dims]`, where the second half repeats the first. `dims` may be
fewer than a head has values: the first ones are rotated, the rest stay. The tower's: `models/patches.py`.

Sources: RoFormer (https://arxiv.org/abs/2104.09864); M-RoPE as in Hugging Face transformers (Apache-2.0),
`get_rope_index` of `Qwen3VLModel` (interleaved) and of `Qwen2_5_VLModel`; scalings as in its
`modeling_rope_utils.py`.
"""

import math
from collections.abc import Sequence

import torch

from snugvl.checkpoint.architecture import LinearScaling, Llama3Scaling, LongRope, Rope, YarnScaling
from snugvl.layers.device import shared
from snugvl.layers.replaced import by_kernels
from snugvl.models.batch import GridTHW

CosSin = tuple[torch.Tensor, torch.Tensor]


def mrope_positions(
    token_ids: Sequence[int],
    grids: Sequence[GridTHW],
    *,
    placeholders: Sequence[int],
    merge_size: int,
    time_steps: Sequence[float | None] | None = None,
) -> tuple[torch.Tensor, int]:
    """Positions of a prompt and the offset that continues them.

    Args:
        token_ids: the prompt with its placeholders expanded (one per image token).
        grids: grid of each image or video in order of appearance, in patches.
        placeholders: token ids of image and video placeholders.
        merge_size: patches per side that one token covers.
        time_steps: of each item, positions of time between frames that share a run of placeholders; None for
            an image, or where each frame has a run of its own.

    Returns:
        `[3, tokens]` int64, and `delta`: generated token number `i` of the sequence (counted from its
        start) has position `i + delta` in all three rows.

    Raises:
        ValueError: placeholders and grids don't match.
    """
    steps = time_steps or [None] * len(grids)
    runs = iter(
        [run for grid, step in zip(grids, steps, strict=True) for run in _runs(grid, step, merge_size)]
    )
    pads = set(placeholders)
    parts: list[torch.Tensor] = []
    position, index, total = 0, 0, len(token_ids)
    while index < total:
        end = index
        if token_ids[index] not in pads:
            while end < total and token_ids[end] not in pads:
                end += 1
            parts.append(torch.arange(position, position + end - index).expand(3, -1))
            position += end - index
        else:
            times, rows, columns = next(runs, _NO_RUN)
            end = index + len(times) * rows * columns
            if end == index or end > total or any(token not in pads for token in token_ids[index:end]):
                raise ValueError(
                    f"placeholders at token {index} don't match an image of {rows}×{columns} tokens"
                    + (f" in {len(times)} frames" if len(times) > 1 else "")
                )
            axes = (times, torch.arange(rows), torch.arange(columns))
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + position)
            position += max(rows, columns)
        index = end
    if next(runs, None) is not None:
        raise ValueError("more images than placeholders in the prompt")
    if not parts:
        return torch.empty(3, 0, dtype=torch.int64), 0
    positions = torch.cat(parts, dim=1)
    return positions, int(positions.max()) + 1 - total


_Run = tuple[torch.Tensor, int, int]
"""Of an unbroken run of placeholders: times of its frames, from 0; rows and columns of each."""

_NO_RUN: _Run = (torch.arange(0), 0, 0)


def _runs(grid: GridTHW, step: float | None, merge_size: int) -> list[_Run]:
    t, h, w = grid
    size = h // merge_size, w // merge_size
    if step is None:
        return [(torch.arange(1), *size)] * t
    return [((torch.arange(t) * step).long(), *size)]


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """`[dim / 2]` float32 angular steps per position."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def mrope_axes(section: tuple[int, int, int], device: torch.device, *, interleaved: bool) -> torch.Tensor:
    """Which of time (0), height (1) and width (2) each frequency follows, `[dims / 2]` int64.

    Interleaved: 0 1 2 0 1 2 … while height and width still have frequencies left, then time alone;
    else 0 … 0 1 … 1 2 … 2.
    """
    if not interleaved:
        return torch.cat([torch.full((count,), axis, device=device) for axis, count in enumerate(section)])
    axes = torch.zeros(sum(section), dtype=torch.int64, device=device)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def cos_sin(angles: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> CosSin:
    """The rotation by `angles` `[tokens, dims / 2]` float32, stretched by `magnitude`."""
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)


def rotate(x: torch.Tensor, rotation: CosSin) -> torch.Tensor:
    """Rotate the first values of `x` `[tokens, heads, head_dim]`, in the precision of both combined."""
    cos, sin = (part[:, None] for part in rotation)
    dims = cos.shape[-1]
    turned = x[..., :dims]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if dims == x.shape[-1] else torch.cat((turned, x[..., dims:]), dim=-1)


def rotation_of(positions: torch.Tensor, rope: Rope, dtype: torch.dtype) -> CosSin:
    """Cosine and sine `[tokens, rope.dims]` for tokens at `positions` `[3, tokens]`: time, height, width.

    Without sections the three are the same, and time counts.
    """
    steps = _frequencies(rope, positions.device)
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling | LongRope) else 1.0
    axes = None if rope.sections is None else _axes(rope.sections, positions.device, rope.interleaved)
    if by_kernels(positions, "turn_by"):
        from snugvl.layers.kernels.rows import rotation  # needs triton, which only GPUs bring

        return rotation(positions, steps, axes, magnitude, dtype)
    wide = positions.float()
    angles = wide[0, :, None] if axes is None else wide[axes].T
    return cos_sin(angles * steps, dtype, magnitude)


# Kept per device: the capture of a CUDA graph can't copy from the host. It follows a run without one.
@shared
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
            return llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)


@shared
def _axes(sections: tuple[int, int, int], device: torch.device, interleaved: bool) -> torch.Tensor:
    return mrope_axes(sections, device, interleaved=interleaved)


def llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Frequencies `[n]` as Llama 3.1 scales plain ones."""
    turns = scaling.original * plain / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    def index(turns: float) -> float:
        """Index of the frequency, a real number, that turns so often in the original context."""
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
