"""M-RoPE positions: time, height and width of every prompt token.

Text advances all three together; an image's tokens share one time and count rows and columns from the
position where it starts; what follows continues after its longer side. Video frames stand between their
own vision_start and vision_end with a timestamp as text before them, so each frame is like an image.

Source: `Qwen3VLModel.get_rope_index` in Hugging Face transformers.
"""

from collections.abc import Sequence

import torch

from snugvl.models.batch import GridTHW


def mrope_positions(
    token_ids: Sequence[int], grids: Sequence[GridTHW], *, placeholders: Sequence[int], merge_size: int
) -> tuple[torch.Tensor, int]:
    """Positions of a prompt and the offset that continues them.

    Args:
        token_ids: the prompt with its placeholders expanded (one per image token).
        grids: grid of each image or video in order of appearance, in patches.
        placeholders: token ids of image and video placeholders.
        merge_size: patches per side that one token covers.

    Returns:
        `[3, tokens]` int64, and `delta`: generated token number `i` of the sequence (counted from its
        start) has position `i + delta` in all three rows.

    Raises:
        ValueError: placeholders and grids don't match.
    """
    frames = iter([(h // merge_size, w // merge_size) for t, h, w in grids for _ in range(t)])
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
            rows, columns = next(frames, (0, 0))
            end = index + rows * columns
            if end == index or end > total or any(token not in pads for token in token_ids[index:end]):
                raise ValueError(
                    f"placeholders at token {index} don't match an image of {rows}×{columns} tokens"
                )
            axes = (torch.arange(1), torch.arange(rows), torch.arange(columns))
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + position)
            position += max(rows, columns)
        index = end
    if next(frames, None) is not None:
        raise ValueError("more images than placeholders in the prompt")
    if not parts:
        return torch.empty(3, 0, dtype=torch.int64), 0
    positions = torch.cat(parts, dim=1)
    return positions, int(positions.max()) + 1 - total
