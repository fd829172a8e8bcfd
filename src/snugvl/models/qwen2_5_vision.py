"""The vision tower of Qwen2.5-VL: patches in, image tokens out.

    patches ─ linear ─ into windows ─ block 0 … block 31 ─ merger ─ back into rows ─ image tokens

Most blocks attend within windows, a few (`full_blocks`) within whole frames. Patches stand window by window
from the first block to the last (`window_order`), so that both read neighbouring rows: a chunk holds whole
windows there and any rows here (`models/vision_blocks.py`). Windows at an image's edges are smaller, not
padded: each run of equal ones is one batch of attention.

Bytes at most, beside weights and output, for an image of P patches (h hidden, i intermediate, s bytes a
value, d = h / heads):

    P · (h·s + 18)     x, places, and the order of the windows
    K · 2·h·s          k and v of K patches: an image's, or a video's frame or those that fit into ROWS
    R · ((h + 2·i)·s + 4·d)  a chunk of R ≤ ROWS patches: normed, two intermediates, rotation
    2·d · max(rows, columns)  cosines and sines

and the output, P · out · s / merge². Of the 3B in bf16: 8.7 kB a patch, and 33 MB
(`tests/planner/test_qwen2_5_vl.py` traces it).

Source: Hugging Face transformers, `models/qwen2_5_vl/modeling_qwen2_5_vl.py` (Apache-2.0); Qwen2.5-VL
Technical Report, https://arxiv.org/abs/2502.13923.
"""

from collections.abc import Generator
from typing import Final

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.layers.linear import Linear, RMSNorm
from snugvl.models.batch import GridTHW, PatchReader
from snugvl.models.host_memory import Resident, WeightStream
from snugvl.models.patches import (
    Rotation,
    WindowRun,
    chunks,
    groups,
    patch_places,
    window_chunks,
    window_order,
)
from snugvl.models.vision_blocks import Block, Seen, advance_frames

EPS = 1e-6  # of the norms; no configuration says it
ROWS: Final = 2048  # patches of a chunk: enough to keep a GPU busy


class GatedMLP(nn.Module):
    """SwiGLU with biases."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=True)
        self.up_proj = Linear(hidden, inner, bias=True)
        self.down_proj = Linear(inner, hidden, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = silu(self.gate_proj.wide_product(x), inplace=True)
        gate *= self.up_proj.wide_product(x)
        return self.down_proj.wide_product(gate)


class Qwen25Merger(nn.Module):
    """merge² neighbouring patches → one vector of the decoder's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, EPS)
        first = Linear(self.joined, self.joined, bias=True)
        self.mlp = nn.ModuleDict({"0": first, "2": Linear(self.joined, config.out_hidden_size, bias=True)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[patches, hidden]` → `[patches / merge², out_hidden]`."""
        first, second = self.mlp["0"], self.mlp["2"]
        assert isinstance(first, Linear)
        assert isinstance(second, Linear)
        return second.wide_product(gelu(first.wide_product(self.ln_q(x).view(-1, self.joined))))


class Qwen25Tower(nn.Module):
    """Patches of an image or video → its tokens."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        # As a linear, like Qwen3-VL's; without a bias.
        embed = nn.Linear(config.patch_dim, config.hidden_size, bias=False)
        self.patch_embed = nn.ModuleDict({"proj": embed})
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.merger = Qwen25Merger(config)
        self.weights: Resident | WeightStream = Resident()

    @property
    def units(self) -> list[nn.Module]:
        """The blocks whose weights can be streamed, in the order of use."""
        return [*self.blocks, self.merger]

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """Encode one image or video, stopping after every chunk. `read`: patches `start … end - 1`,
        `[end - start, patch_dim]`, on this device and of this dtype.

        Yields:
            The floating point operations since the last stop.

        Returns:
            `[image tokens, out_hidden]`.
        """
        config, device = self.config, self._linear.weight.device
        assert config.window is not None
        merge, head_dim = config.spatial_merge_size, config.hidden_size // config.num_heads
        order, runs = window_order(grid, merge, config.window // merge, device)
        places = patch_places(grid, merge, device).view(len(order), -1)[order].view(-1, 2)
        rotation = Rotation(max(grid[1:]), head_dim, config.rope_theta, device)
        weights = self.weights.begin()
        x = self._embed(read, order)
        tokens = x.new_empty(len(order), config.out_hidden_size)
        frames, windows = groups(grid, ROWS), window_chunks(runs, ROWS)
        most = max(part.end - part.start for part in frames)
        most = max(most, *(piece[-1].end - piece[0].start for piece in windows))
        kept = x.new_empty(most, 2, config.num_heads, head_dim)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            weights.reach(block)
            if index not in config.full_blocks:
                for piece in windows:
                    yield _advance_windows(block, x, kept, places, rotation, piece)
                continue
            for part in frames:
                pieces = self._chunks(part.end - part.start)
                yield from advance_frames(block, x, kept, places, rotation, part, pieces)
        del kept
        weights.reach(self.merger)
        for rows in self._chunks(len(x)):
            where = order[rows.start // merge**2 : rows.stop // merge**2]
            tokens.index_copy_(0, where, self.merger(x[rows]))
        return tokens

    def _embed(self, read: PatchReader, order: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first block, window by window, `[patches, hidden]`."""
        unit, proj = self.config.spatial_merge_size**2, self._linear
        x = proj.weight.new_empty(len(order), unit * self.config.hidden_size)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        for rows in self._chunks(len(order) * unit):
            made = proj(read(rows.start, rows.stop)).view(-1, x.shape[1])
            x.index_copy_(0, place[rows.start // unit : rows.stop // unit], made)
        return x.view(len(order) * unit, -1)

    @property
    def _linear(self) -> nn.Linear:
        part = self.patch_embed["proj"]
        assert isinstance(part, nn.Linear)
        return part

    def _chunks(self, count: int) -> list[slice]:
        return chunks(count, ROWS, self.config.spatial_merge_size**2)


def _block(config: VisionConfig) -> Block:
    norm1, norm2 = (RMSNorm(config.hidden_size, EPS) for _ in range(2))
    return Block(config, norm1, norm2, GatedMLP(config))


def _advance_windows(
    block: Block,
    x: torch.Tensor,
    kept: torch.Tensor,
    places: torch.Tensor,
    rotation: Rotation,
    piece: list[WindowRun],
) -> int:
    """Advance neighbouring windows by a block, each attending within itself; the operations it took."""
    start, end = piece[0].start, piece[-1].end
    x, places, kept = x[start:end], places[start:end], kept[: end - start]
    block.remember(x, rotation, places, kept)
    seen = [
        Seen(
            run.count * run.size,
            kept[run.start - start : run.end - start].view(run.count, run.size, *kept.shape[1:]),
        )
        for run in piece
    ]
    block(x, rotation, places, seen)
    return sum(block.work(run.count * run.size, run.size) for run in piece)
