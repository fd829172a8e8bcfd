"""Where patches stand in an image: their order, positions, rotation, and the chunks they are computed in."""

from dataclasses import dataclass

import torch

from snugvl.layers.rotary import inverse_frequencies
from snugvl.models.batch import GridTHW


@dataclass(frozen=True, slots=True)
class Group:
    """Whole frames that attend, each within itself, in one go: patches `start … end - 1`."""

    start: int
    end: int
    frames: int


def groups(grid: GridTHW, rows: int) -> list[Group]:
    """As many whole frames a group as `rows` patches hold, and at least one."""
    t, h, w = grid
    size = h * w
    most = max(1, rows // size)
    return [Group(i * size, min(i + most, t) * size, min(most, t - i)) for i in range(0, t, most)]


def chunks(count: int, rows: int, unit: int) -> list[slice]:
    """`count` patches in pieces of about the same size, of `rows` at most and multiples of `unit`."""
    pieces = -(-count // (rows // unit * unit))
    size = -(-count // (pieces * unit)) * unit
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def patch_places(grid: GridTHW, merge: int, device: torch.device) -> torch.Tensor:
    """Row and column of each patch in the tower's order, `[t·h·w, 2]` int64.

    The merge × merge patches that become one token stand together:

        0 1 │ 4 5
        2 3 │ 6 7
    """
    t, h, w = grid
    places = torch.stack(
        torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij"), dim=-1
    )
    places = places.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
    return places.reshape(-1, 2).repeat(t, 1)


def taps(index: torch.Tensor, size: int, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two source cells and weights for each target `index`: `side` cells span `size`, corners aligned."""
    source = index.float() * (side - 1) / max(size - 1, 1)
    low = source.floor()
    weight = source - low
    below, above = low.long(), (low.long() + 1).clamp(max=side - 1)
    return [(below, 1 - weight), (above, weight)]


class Rotation:
    """Cosines and sines of the rotary embedding over two axes, kept once per row or column number.

    Half of the frequencies follow the row, half the column (Qwen3-VL's axial form, as in Hugging Face
    transformers, `models/qwen3_vl/modeling_qwen3_vl.py`).
    """

    def __init__(self, side: int, head_dim: int, theta: float, device: torch.device) -> None:
        steps = inverse_frequencies(head_dim // 2, theta, device)
        angles = torch.arange(side, dtype=torch.float32, device=device)[:, None] * steps
        self.cos, self.sin = angles.cos(), angles.sin()

    def rotate(self, x: torch.Tensor, places: torch.Tensor) -> None:
        """Rotate patches `x` `[patches, heads, head_dim]` at `places`, in place.

        In float32, and then rounded to the dtype of `x`.
        """
        cos, sin = self.cos[places].flatten(1)[:, None], self.sin[places].flatten(1)[:, None]
        first, second = x.chunk(2, dim=-1)
        turned = first * cos
        turned -= second * sin
        other = second * cos
        other += first * sin
        first.copy_(turned)
        second.copy_(other)
