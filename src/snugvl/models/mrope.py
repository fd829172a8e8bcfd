"""M-RoPE positions: time, height and width of every prompt token.

Text advances all three together; an image's tokens share one time and count rows and columns from the
position where it starts; what follows continues after its longer side. Videos come in two ways:

    Qwen3-VL      each frame stands between its own vision_start and vision_end, after its time as text, like
                  an image
    Qwen2.5-VL    all frames are one run of placeholders, `time_step` positions of time apart, rounded down;
                  height and width begin again. What follows continues after the longer side, whatever time
                  it has become

Sources: `get_rope_index` of `Qwen3VLModel` and of `Qwen2_5_VLModel` in Hugging Face transformers.
"""

from collections.abc import Sequence

import torch

from snugvl.models.batch import GridTHW


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
