"""Where patches stand in an image: order, positions, rotation, windows, and chunks to compute them in."""

from dataclasses import dataclass

import torch

from snugvl.layers.replaced import by_kernels
from snugvl.models.batch import GridTHW
from snugvl.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """Whole frames that attend, each within itself, in one go: patches `start … end - 1`."""

    start: int
    end: int
    frames: int


def groups(grid: GridTHW, rows: int) -> list[FrameGroup]:
    """The frames of `grid` in groups: as many whole frames as `rows` patches hold, and at least one."""
    t, h, w = grid
    size = h * w
    most = max(1, rows // size)
    return [FrameGroup(i * size, min(i + most, t) * size, min(most, t - i)) for i in range(0, t, most)]


def chunks(count: int, rows: int, unit: int) -> list[slice]:
    """`count` patches in pieces of about the same size, of `rows` at most and multiples of `unit`."""
    pieces = -(-count // (rows // unit * unit))
    size = -(-count // (pieces * unit)) * unit
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True, slots=True)
class WindowRun:
    """Windows of one size beside each other: `count` of `size` patches, from patch `start` on."""

    start: int
    count: int
    size: int

    @property
    def end(self) -> int:
        """The patch after the last one."""
        return self.start + self.count * self.size


def window_order(
    grid: GridTHW, merge: int, side: int, device: torch.device
) -> tuple[torch.Tensor, list[WindowRun]]:
    """The order in which the tokens of a window stand together, and the windows in that order.

    Windows of `side` × `side` tokens are cut from the upper left corner of each frame. Those at the other
    edges are as much smaller as the frame ends. Windows of one shape stand beside each other:

        0 1 4
        2 3 5      whole ones, right edge, lower edge, corner
        6 7 8

    Returns:
        `[tokens]` int64: which token of the item stands at each place; and the runs that make it up.
    """
    t, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    frame = torch.arange(rows * columns, device=device).view(rows, columns)
    whole_rows, whole_columns = rows - rows % side, columns - columns % side
    order, shapes = [], []
    for band in (frame[:whole_rows], frame[whole_rows:]):
        for part in (band[:, :whole_columns], band[:, whole_columns:]):
            high, wide = (min(side, length) for length in part.shape)
            if high and wide:
                windows = part.reshape(part.shape[0] // high, high, -1, wide).transpose(1, 2)
                order.append(windows.flatten())
                shapes.append((part.numel() // (high * wide), high * wide * merge**2))
    frames = torch.arange(0, t * frame.numel(), frame.numel(), device=device)
    return (torch.cat(order) + frames[:, None]).flatten(), _joined(shapes * t)


def _joined(shapes: list[tuple[int, int]]) -> list[WindowRun]:
    """Runs one after another, neighbours of the same size as one."""
    runs: list[WindowRun] = []
    for count, size in shapes:
        last = (
            runs.pop() if runs and runs[-1].size == size else WindowRun(runs[-1].end if runs else 0, 0, size)
        )
        runs.append(WindowRun(last.start, last.count + count, size))
    return runs


def window_chunks(runs: list[WindowRun], rows: int) -> list[list[WindowRun]]:
    """Windows in pieces of `rows` patches at most, and of at least one window."""
    pieces: list[list[WindowRun]] = [[]]
    room = rows
    for run in runs:
        start, left = run.start, run.count
        while left:
            if room < run.size and pieces[-1]:
                pieces.append([])
                room = rows
            count = min(left, max(1, room // run.size))
            pieces[-1].append(WindowRun(start, count, run.size))
            start, left, room = pieces[-1][-1].end, left - count, room - count * run.size
    return pieces


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
        if by_kernels(x, "rotate_patches"):
            from snugvl.layers.kernels.vision import rotate  # needs triton, which only GPUs bring

            rotate(x, places, self.cos, self.sin)
            return
        cos, sin = self.cos[places].flatten(1)[:, None], self.sin[places].flatten(1)[:, None]
        first, second = x.chunk(2, dim=-1)
        turned = (first * cos).addcmul_(second, sin, value=-1)
        other = (second * cos).addcmul_(first, sin)
        first.copy_(turned)
        second.copy_(other)
