"""The vision tower of Qwen3-VL: patches in, image tokens and deepstack levels out.

    patches ─ linear ─ + positions ─ block 0 … block 5 … block 11 … ─ merger ──────── image token
                                                  └ deepstack merger 0 … ─────────── levels for the
                                                                                      first decoder layers
Attention is full within an image (or one frame of a video) and never crosses images.

Source: Hugging Face transformers, `models/qwen3_vl/modeling_qwen3_vl.py` (Apache-2.0); DeepStack,
https://arxiv.org/abs/2406.04334.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from snugvl.checkpoint.architecture import VisionConfig
from snugvl.layers.rotary import CosSin, axial, rotate
from snugvl.models.batch import GridTHW


class Attention(nn.Module):
    """Full attention among the patches of one frame."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, rotation: CosSin, frames: Sequence[int]) -> torch.Tensor:
        """`x` `[patches, hidden]`; `frames` are the patch counts that attend among themselves."""
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        # Rotated in float32, because `rotation` is.
        q, k = rotate(q, rotation).to(x.dtype), rotate(k, rotation).to(x.dtype)
        output = torch.empty_like(v)
        parts = zip(*(torch.split(t, list(frames)) for t in (q, k, v, output)), strict=True)
        for query, key, value, target in parts:
            heads_first = (t.transpose(0, 1)[None] for t in (query, key, value))
            target.copy_(scaled_dot_product_attention(*heads_first)[0].transpose(0, 1))
        result: torch.Tensor = self.proj(output.flatten(1))
        return result


class MLP(nn.Module):
    """Two linears with a GELU between."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.approximate = "tanh" if config.hidden_act == "gelu_pytorch_tanh" else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear_fc2(gelu(self.linear_fc1(x), approximate=self.approximate))
        return result


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, rotation: CosSin, frames: Sequence[int]) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), rotation, frames)
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Merger(nn.Module):
    """merge² neighbouring patches → one vector of the decoder's width.

    The main merger normalises each patch before joining them, the deepstack mergers after.
    """

    def __init__(self, config: VisionConfig, *, norm_joined: bool) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(self.joined if norm_joined else config.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.joined, self.joined)
        self.linear_fc2 = nn.Linear(self.joined, config.out_hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[patches, hidden]` → `[patches / merge², out_hidden]`."""
        x = self.norm(x.view(-1, self.norm.normalized_shape[0])).view(-1, self.joined)
        result: torch.Tensor = self.linear_fc2(gelu(self.linear_fc1(x)))
        return result


class VisionTower(nn.Module):
    """Patches of any number of images → their tokens, each with its deepstack levels."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        # A convolution whose stride is its kernel is a linear over the flattened patch; as a linear it
        # also avoids torch's slow and hungry bf16 Conv3d.
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.patch_dim, config.hidden_size)})
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = Merger(config, norm_joined=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(config, norm_joined=True) for _ in config.deepstack_layers
        )

    def forward(self, patches: torch.Tensor, grids: Sequence[GridTHW]) -> torch.Tensor:
        """`patches` `[patches, patch_dim]` → `[image tokens, (1 + levels) · out_hidden]`.

        Columns: the merger's output, then each deepstack level in the order of the decoder layers.
        """
        frames = [h * w for t, h, w in grids for _ in range(t)]
        x = self.patch_embed["proj"](patches.to(self.pos_embed.weight.dtype))
        places = torch.cat([patch_places(grid, self.config.spatial_merge_size, x.device) for grid in grids])
        x = x + torch.cat([self.position_embeddings(grid, x.device) for grid in grids]).to(x.dtype)
        head_dim = self.config.hidden_size // self.config.num_heads
        rotation = axial(places, head_dim, self.config.rope_theta)
        levels: list[torch.Tensor] = [x] * len(self.config.deepstack_layers)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, frames)
            if index in self.config.deepstack_layers:
                level = self.config.deepstack_layers.index(index)
                levels[level] = self.deepstack_merger_list[level](x)
        return torch.cat([self.merger(x), *levels], dim=-1)

    def position_embeddings(self, grid: GridTHW, device: torch.device) -> torch.Tensor:
        """The learned square grid, bilinearly resampled to an image's, `[t·h·w, hidden]` float32."""
        t, h, w = grid
        side = self.config.position_grid
        rows, columns = patch_places((1, h, w), self.config.spatial_merge_size, device).T
        total = torch.zeros(h * w, self.config.hidden_size, device=device)
        for row, row_weight in _taps(rows, h, side):
            for column, column_weight in _taps(columns, w, side):
                total += self.pos_embed(row * side + column) * (row_weight * column_weight)[:, None]
        return total.repeat(t, 1)


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


def _taps(index: torch.Tensor, size: int, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two source cells and weights for each target `index`: `side` cells span `size`, corners aligned."""
    source = index.float() * (side - 1) / max(size - 1, 1)
    low = source.floor()
    weight = source - low
    below, above = low.long(), (low.long() + 1).clamp(max=side - 1)
    return [(below, 1 - weight), (above, weight)]
