"""Common parts of a tower's blocks, whatever their norms and MLPs: a residual stream in chunks of rows.

    x      [ ▒▒▒▒ │      │      ]   rows of a chunk: norm, query, attention to what they see,
    k, v   [ ████████████████████ ]                  projection, MLP, added to x in place

Keys and values are kept of all that a chunk's rows see, and written before the first chunk reads them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.layers.linear import Linear
from snugvl.layers.replaced import by_kernels
from snugvl.models.patches import FrameGroup, Rotation


class Seen(NamedTuple):
    """Keys and values that rows attend to: `kept` `[groups, patches, 2, heads, head_dim]`, keys and values.

    The rows belong to the groups in order, as many to each: `rows / groups`.
    """

    rows: int
    kept: torch.Tensor


class VisionAttention(nn.Module):
    """Attention among the patches of a group: a frame, or a window of it."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def remember(self, x: torch.Tensor, rotation: Rotation, places: torch.Tensor, kept: torch.Tensor) -> None:
        """Write keys and values of `x` `[rows, hidden]` to `kept` `[rows, 2, heads, head_dim]`."""
        rows, hidden = x.shape
        self.qkv.wide_product(x, hidden, out=kept.view(rows, 2 * hidden))
        rotation.rotate(kept[:, 0], places)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, places: torch.Tensor, seen: Sequence[Seen]
    ) -> torch.Tensor:
        """Attention of patches, projected: `[rows, hidden]`.

        Args:
            x: `[rows, hidden]`, normalised.
            places: indices of the rows' patches, by which queries are rotated.
            seen: what the rows attend to: consecutive pieces of them, each with its keys and values.
        """
        rows, hidden = x.shape
        query = self.qkv.wide_product(x, 0, hidden).view(rows, self.num_heads, -1)
        rotation.rotate(query, places)
        pieces, start = [], 0
        for piece in seen:
            pieces.append(_attend(query[start : start + piece.rows], piece.kept))
            start += piece.rows
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self.proj.wide_product(output)


def _attend(query: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`query` `[rows, heads, head_dim]` to the groups in `kept`; `[rows, hidden]`."""
    rows = len(query)
    query = query.view(len(kept), -1, *query.shape[1:])
    query, key, value = (t.transpose(1, 2) for t in (query, kept[:, :, 0], kept[:, :, 1]))
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, -1)


def _added(x: torch.Tensor, delta: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """`x += delta` `[rows, hidden]`, and the `norm` of the sum."""
    if by_kernels(x, "add_layer_norm") and isinstance(norm, nn.LayerNorm):
        from snugvl.layers.kernels.vision import add_normed  # needs triton, which only GPUs bring

        return add_normed(x, delta, norm.weight, norm.bias, norm.eps)
    x += delta
    result: torch.Tensor = norm(x)
    return result


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig, norm1: nn.Module, norm2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm1, norm2
        self.attn = VisionAttention(config)
        self.mlp = mlp
        self._weights = sum(part.numel() for part in self.parameters() if part.dim() == 2)
        self._hidden = config.hidden_size

    def work(self, rows: int, keys: int) -> int:
        """Floating point operations of `rows` that see `keys` patches each."""
        return 2 * rows * (self._weights + 2 * keys * self._hidden)

    def remember(self, x: torch.Tensor, rotation: Rotation, places: torch.Tensor, kept: torch.Tensor) -> None:
        """Write the keys and values of rows of the residual stream to `kept`."""
        self.attn.remember(self.norm1(x), rotation, places, kept)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, places: torch.Tensor, seen: Sequence[Seen]
    ) -> None:
        """Advance rows of the residual stream in place, once all keys and values are kept."""
        # Unnamed, so that what attention gave is gone when the MLP takes its workspace.
        x += self.mlp(_added(x, self.attn(self.norm1(x), rotation, places, seen), self.norm2))

    def advance(self, x: torch.Tensor, rotation: Rotation, places: torch.Tensor, seen: Seen) -> None:
        """`remember` and `forward` of rows that are all that they see: normed once for both."""
        x += self.mlp(_added(x, self._attended(self.norm1(x), rotation, places, seen), self.norm2))

    def _attended(
        self, x: torch.Tensor, rotation: Rotation, places: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        self.attn.remember(x, rotation, places, seen.kept.flatten(0, 1))
        result: torch.Tensor = self.attn(x, rotation, places, (seen,))
        return result


def advance_frames(
    block: Block,
    x: torch.Tensor,
    kept: torch.Tensor,
    places: torch.Tensor,
    rotation: Rotation,
    part: FrameGroup,
    pieces: Sequence[slice],
) -> Iterator[int]:
    """Advance a group of whole frames by a block whose patches see all of their frame, in place.

    Args:
        x: the residual stream `[patches, hidden]` of the item; `places` `[patches, 2]` likewise.
        kept: room for keys and values, `[at least the group's patches, 2, heads, head_dim]`.
        pieces: the group's rows in chunks.

    Yields:
        The floating point operations of each chunk, done.
    """
    size = part.end - part.start
    x, places, kept = x[part.start : part.end], places[part.start : part.end], kept[:size]
    frames = kept.view(part.frames, -1, *kept.shape[1:])
    if len(pieces) == 1:
        block.advance(x, rotation, places, Seen(size, frames))
        yield block.work(size, size // part.frames)
        return
    for rows in pieces:
        block.remember(x[rows], rotation, places[rows], kept[rows])
    for rows in pieces:
        count = rows.stop - rows.start
        block(x[rows], rotation, places[rows], (Seen(count, frames),))
        yield block.work(count, size // part.frames)
