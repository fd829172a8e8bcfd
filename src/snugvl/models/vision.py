"""The vision tower of Qwen3-VL: patches in, image tokens and deepstack levels out.

    patches ─ linear ─ + positions ─ block 0 … block 5 … block 11 … ─ merger ──────── image token
                                                  └ deepstack merger 0 … ─────────── levels for the
                                                                                      first decoder layers
Attention is full within an image (or one frame of a video) and never crosses images; all the rest is by
rows. So only the residual stream and one block's keys and values are held for the whole image, and what is
in between for a chunk of rows (`models/vision_blocks.py`).

Bytes at most, beside weights and output, for an image of P patches (h hidden, i intermediate, s bytes a
value, d = h / heads):

    P · (h·s + 16)     x and places
    K · 2·h·s          k and v of K patches: an image's, or a video's frame or those that fit into ROWS
    R · ((h + i)·s + 4·d)  a chunk of R ≤ ROWS patches: normed, an intermediate, rotation
    2·d · max(rows, columns)  cosines and sines

and the output, whose levels fill up on the way: P · (1 + levels) · out · s / merge². Of the 2B in bf16:
10.3 kB a patch, and 42 MB (`tests/models/test_vision.py` traces it).

Weights in int8 are dequantized a slice at a time (`Linear.wide_product`), 16 MiB at most, beside all that.

The work can be cut anywhere between two chunks (`encode_in_steps`). Chunks depend on the grid alone: an
encoding never depends on what ran beside it.

Source: Hugging Face transformers, `models/qwen3_vl/modeling_qwen3_vl.py` (Apache-2.0); DeepStack,
https://arxiv.org/abs/2406.04334.
"""

from collections.abc import Generator
from typing import Final

import torch
from torch import nn
from torch.nn.functional import gelu

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.layers.linear import Linear
from snugvl.models.batch import GridTHW, PatchReader
from snugvl.models.host_memory import Resident, WeightStream
from snugvl.models.patches import Rotation, chunks, groups, patch_places, taps
from snugvl.models.vision_blocks import Block, advance_frames

# Patches of a chunk. A 1024 × 1024 image is one: a large GPU is done with half of one before the host has
# started what comes next.
ROWS: Final = 4096


class VisionMLP(nn.Module):
    """Two linears with a GELU between, in the memory of its input and one intermediate."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)
        self.approximate = "tanh" if config.hidden_act == "gelu_pytorch_tanh" else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's result `[rows, hidden]`, written over `x`."""
        inner = self.linear_fc1.wide_product(x)
        torch.ops.aten.gelu_(inner, approximate=self.approximate)
        return self.linear_fc2.wide_product(inner, out=x)


def _block(config: VisionConfig) -> Block:
    norm1, norm2 = (nn.LayerNorm(config.hidden_size, eps=1e-6) for _ in range(2))
    return Block(config, norm1, norm2, VisionMLP(config))


class PatchMerger(nn.Module):
    """merge² neighbouring patches → one vector of the decoder's width.

    The main merger normalises each patch before joining them, the deepstack mergers after.
    """

    def __init__(self, config: VisionConfig, *, norm_joined: bool) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(self.joined if norm_joined else config.hidden_size, eps=1e-6)
        self.linear_fc1 = Linear(self.joined, self.joined, bias=True)
        self.linear_fc2 = Linear(self.joined, config.out_hidden_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[patches, hidden]` → `[patches / merge², out_hidden]`."""
        x = self.norm(x.view(-1, self.norm.normalized_shape[0])).view(-1, self.joined)
        return self.linear_fc2.wide_product(gelu(self.linear_fc1.wide_product(x)))


class VisionTower(nn.Module):
    """Patches of an image or video → its tokens, each with its deepstack levels."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        # A convolution whose stride is its kernel is a linear over the flattened patch; as a linear it
        # also avoids torch's slow and hungry bf16 Conv3d.
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.patch_dim, config.hidden_size)})
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_joined=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_joined=True) for _ in config.deepstack_layers
        )
        self.weights: Resident | WeightStream = Resident()

    @property
    def units(self) -> list[nn.Module]:
        """The blocks whose weights can be streamed, in the order of use."""
        found: list[nn.Module] = []
        for index, block in enumerate(self.blocks):
            found.append(block)
            if index in self.config.deepstack_layers:
                found.append(self.deepstack_merger_list[self.config.deepstack_layers.index(index)])
        return [*found, self.merger]

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """Encode one image or video, stopping after every chunk. `read`: patches `start … end - 1`,
        `[end - start, patch_dim]`, on this device and of this dtype.

        Yields:
            The floating point operations since the last stop.

        Returns:
            `[image tokens, (1 + levels) · out_hidden]`: the merger's output, then each deepstack level in
            the order of the decoder layers.
        """
        config, device = self.config, self.pos_embed.weight.device
        head_dim = config.hidden_size // config.num_heads
        places = patch_places(grid, config.spatial_merge_size, device)
        rotation = Rotation(max(grid[1:]), head_dim, config.rope_theta, device)
        weights = self.weights.begin()
        x = self._embed(read, places, grid)
        levels = torch.empty(
            len(x) // config.spatial_merge_size**2,
            1 + len(config.deepstack_layers),
            config.out_hidden_size,
            dtype=x.dtype,
            device=device,
        )
        parts = groups(grid, ROWS)
        most = max(part.end - part.start for part in parts)
        kept = x.new_empty(most, 2, config.num_heads, head_dim)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            weights.reach(block)
            for part in parts:
                pieces = self._chunks(part.end - part.start)
                yield from advance_frames(block, x, kept, places, rotation, part, pieces)
            if index in config.deepstack_layers:
                level = config.deepstack_layers.index(index)
                weights.reach(self.deepstack_merger_list[level])
                self._merge(self.deepstack_merger_list[level], x, levels[:, 1 + level])
        del kept
        weights.reach(self.merger)
        self._merge(self.merger, x, levels[:, 0])
        return levels.flatten(1)

    def _embed(self, read: PatchReader, places: torch.Tensor, grid: GridTHW) -> torch.Tensor:
        """The residual stream before the first block, `[patches, hidden]`."""
        weight = self.pos_embed.weight
        x = torch.empty(len(places), self.config.hidden_size, dtype=weight.dtype, device=weight.device)
        for rows in self._chunks(len(x)):
            x[rows] = self.patch_embed["proj"](read(rows.start, rows.stop))
            x[rows] += self._position_embeddings(places[rows], grid).to(x.dtype)
        return x

    def _position_embeddings(self, places: torch.Tensor, grid: GridTHW) -> torch.Tensor:
        """The learned square grid, bilinearly resampled to an image's, `[patches, hidden]` float32."""
        _, h, w = grid
        side = self.config.position_grid
        rows, columns = places.T
        total = torch.zeros(len(places), self.config.hidden_size, device=places.device)
        for row, row_weight in taps(rows, h, side):
            for column, column_weight in taps(columns, w, side):
                total += self.pos_embed(row * side + column) * (row_weight * column_weight)[:, None]
        return total

    def _merge(self, merger: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
        """Write a merger's output to `target` `[tokens, out_hidden]`."""
        unit = self.config.spatial_merge_size**2
        for rows in self._chunks(len(x)):
            target[rows.start // unit : rows.stop // unit] = merger(x[rows])

    def _chunks(self, count: int) -> list[slice]:
        return chunks(count, ROWS, self.config.spatial_merge_size**2)
