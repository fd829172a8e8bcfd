"""Qwen3-VL's architecture at pocket's size, for training: fixed shapes, several exchanges a picture.

Names of parameters are those of the published checkpoints (less the prefix "model."), so export is a rename.
Two things differ and are folded away on export: the patch embedding takes one frame of 768 values, and the
position table is interpolated for a whole batch at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from training.pocket import packing, render


@dataclass(frozen=True)
class Size:
    """Dimensions; the defaults are pocket's."""

    vocabulary: int
    vision_hidden: int = 192
    vision_layers: int = 6
    vision_heads: int = 3
    vision_inner: int = 768
    deepstack: tuple[int, ...] = (1, 3)
    grid: int = 16  # the learned position table is grid x grid
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 768
    theta: float = 10_000.0
    sections: tuple[int, int, int] = (12, 10, 10)
    eps: float = 1e-6


Mask = BlockMask | torch.Tensor
Angles = tuple[torch.Tensor, torch.Tensor]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Attention over [batch, heads, tokens, dim] with a flex mask (GPU) or a boolean mask (anywhere)."""
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        assert isinstance(out, torch.Tensor)
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotary embedding of [batch, heads, tokens, dim] by (cos, sin) [batch, 1, tokens, dim / 2]."""
    cos, sin = angles
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class VisionAttention(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.heads = s.vision_heads
        self.qkv, self.proj = (
            nn.Linear(s.vision_hidden, 3 * s.vision_hidden),
            nn.Linear(s.vision_hidden, s.vision_hidden),
        )

    def forward(self, x: torch.Tensor, angles: Angles, mask: Mask) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out = attend(rotate(q, angles), rotate(k, angles), v, mask)
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


class VisionMLP(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = (
            nn.Linear(s.vision_hidden, s.vision_inner), nn.Linear(s.vision_inner, s.vision_hidden),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(s.vision_hidden, eps=1e-6),
            nn.LayerNorm(s.vision_hidden, eps=1e-6),
        )
        self.attn, self.mlp = VisionAttention(s), VisionMLP(s)

    def forward(self, x: torch.Tensor, angles: Angles, mask: Mask) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), angles, mask)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four patches to one image token: [batch, 4 n, vision] → [batch, n, hidden]."""

    def __init__(self, s: Size, after: bool) -> None:
        super().__init__()
        wide = 4 * s.vision_hidden
        self.after = after
        self.norm = nn.LayerNorm(wide if after else s.vision_hidden, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(wide, wide), nn.Linear(wide, s.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        x = self.norm(x.view(b, n // 4, 4 * d)) if self.after else self.norm(x).view(b, n // 4, 4 * d)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class Vision(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.size = s
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(3 * render.PIXELS, s.vision_hidden)})
        self.pos_embed = nn.Embedding(s.grid**2, s.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(s) for _ in range(s.vision_layers))
        self.merger = Merger(s, after=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(s, after=True) for _ in s.deepstack)

    def places(self, grids: torch.Tensor) -> tuple[torch.Tensor, Angles]:
        """Position embeddings [batch, 320, vision] and rotary (cos, sin) [batch, 1, 320, dim / 2]."""
        row, column, _ = render.patch_places(grids)
        side, grids = self.size.grid, grids.long() * 2
        y = row / (grids[:, :1] - 1).clamp_min(1) * (side - 1)
        x = column / (grids[:, 1:] - 1).clamp_min(1) * (side - 1)
        # Hat functions times the table: bilinear, and its gradient is a product instead of a scatter.
        knots = torch.arange(side, device=row.device)
        near_y = (1 - (y[..., None] - knots).abs()).clamp_min(0)  # [batch, 320, side]
        near_x = (1 - (x[..., None] - knots).abs()).clamp_min(0)
        weights = (near_y[..., :, None] * near_x[..., None, :]).flatten(2)  # [batch, 320, side * side]
        with torch.autocast(row.device.type, enabled=False):
            table = weights @ self.pos_embed.weight.float()
        half = self.size.vision_hidden // self.size.vision_heads // 2
        rates = 10_000.0 ** (-torch.arange(0, half, 2, device=row.device) / half)
        turns = torch.cat((row[..., None] * rates, column[..., None] * rates), dim=-1)[:, None]
        return table, (turns.cos(), turns.sin())

    def forward(self, patches: torch.Tensor, grids: torch.Tensor, mask: Mask) -> list[torch.Tensor]:
        """Image tokens, then one tensor of them a deepstack level: each [batch, 80, hidden]."""
        places, angles = self.places(grids)
        x = self.patch_embed["proj"](patches) + places
        levels = []
        for i, block in enumerate(self.blocks):
            x = block(x, angles, mask)
            if i in self.size.deepstack:
                levels.append(self.deepstack_merger_list[len(levels)](x))
        return [self.merger(x), *levels]


class TextAttention(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.dim = s.head_dim
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(s.head_dim, s.eps), RMSNorm(s.head_dim, s.eps)

    def forward(self, x: torch.Tensor, angles: Angles, mask: Mask) -> torch.Tensor:
        b, n, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, n, -1, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, n, -1, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, n, -1, self.dim).transpose(1, 2)
        out = attend(rotate(q, angles), rotate(k, angles), v, mask)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))


class TextMLP(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(s.hidden, s.inner, bias=False),
            nn.Linear(s.hidden, s.inner, bias=False),
        )
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextBlock(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(s.hidden, s.eps),
            RMSNorm(s.hidden, s.eps),
        )
        self.self_attn, self.mlp = TextAttention(s), TextMLP(s)

    def forward(self, x: torch.Tensor, angles: Angles, mask: Mask) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Text(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.size = s
        self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(TextBlock(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)

    def angles(self, positions: torch.Tensor) -> Angles:
        """Interleaved M-RoPE (cos, sin) [batch, 1, tokens, dim / 2] of positions [3, batch, tokens]."""
        half = self.size.head_dim // 2
        index = torch.arange(half, device=positions.device)
        rates = self.size.theta ** (-index / half)
        axis = torch.zeros_like(index)
        for a in (1, 2):
            axis = torch.where((index % 3 == a) & (index < 3 * self.size.sections[a]), a, axis)
        turns = (positions.float()[axis].permute(1, 2, 0) * rates)[:, None]
        return turns.cos(), turns.sin()


class Pocket(nn.Module):
    """The whole network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.visual, self.language_model = Vision(size), Text(size)
        self.apply(self._start)
        for name, p in self.named_parameters():
            if name.endswith(
                ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "blocks.mlp.linear_fc2.weight")
            ):
                nn.init.normal_(p, std=0.02 / (2 * size.layers) ** 0.5)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.03)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def masks(self, batch: packing.Batch, flex: bool) -> tuple[Mask, Mask]:
        """(vision mask, text mask): see packing for who sees whom."""
        counts = batch.grids[:, 0].long() * batch.grids[:, 1].long() * 4
        parts = batch.parts
        n, b = packing.IMAGE * 4, parts.shape[0]
        if flex:
            return self._flex(counts, parts)
        patches = (torch.arange(n, device=parts.device) < counts[:, None])[:, None, None].expand(b, 1, n, n)
        same = (parts[:, None, :] == 0) | (parts[:, None, :] == parts[:, :, None])
        order = torch.ones(packing.ROW, packing.ROW, dtype=torch.bool, device=parts.device).tril()
        itself = torch.eye(packing.ROW, dtype=torch.bool, device=parts.device)
        return patches, ((same & order) | itself)[:, None]

    def _flex(self, counts: torch.Tensor, parts: torch.Tensor) -> tuple[Mask, Mask]:
        """The same two masks for flex attention, made once over buffers that each batch is copied into.

        New mask functions would mean a new compilation a batch. Blocks are only skipped above the diagonal.
        """
        if not hasattr(self, "_buffers_of_masks"):
            seen, part = counts.clone(), parts.to(torch.int32)

            def sees_patch(
                i: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
            ) -> torch.Tensor:
                return k < seen[i]

            def sees_token(
                i: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
            ) -> torch.Tensor:
                other = part[i, k]
                return ((k <= q) & ((other == 0) | (other == part[i, q]))) | (k == q)

            image = _blocks(packing.IMAGE * 4, False, sees_patch, counts.device)
            self._buffers_of_masks = (
                seen,
                part,
                image,
                _blocks(packing.ROW, True, sees_token, counts.device),
            )
        seen, part, image, text = self._buffers_of_masks
        seen.copy_(counts)
        part.copy_(parts)
        return image, text

    def forward(self, patches: torch.Tensor, batch: packing.Batch, masks: tuple[Mask, Mask]) -> torch.Tensor:
        """Hidden states after the last norm: [batch, ROW, hidden]."""
        image, *levels = self.visual(patches, batch.grids, masks[0])
        text = self.language_model
        x = text.embed_tokens(batch.ids.long())
        at = slice(packing.HEAD, packing.HEAD + packing.IMAGE)
        x = torch.cat((x[:, : packing.HEAD], image.to(x.dtype), x[:, at.stop :]), dim=1)
        angles = text.angles(batch.positions)
        for i, layer in enumerate(text.layers):
            x = layer(x, angles, masks[1])
            if i < len(levels):
                x = x + F.pad(levels[i], (0, 0, packing.HEAD, packing.ROW - at.stop))
        return text.norm(x)

    def logits(self, hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Logits [answers, vocabulary] at flat indices into [batch * ROW]."""
        chosen = hidden.reshape(-1, self.size.hidden).index_select(0, where.long())
        return F.linear(chosen, self.language_model.embed_tokens.weight)


def _blocks(
    tokens: int, causal: bool, mask_mod: Callable[..., torch.Tensor], device: torch.device
) -> BlockMask:
    """A block mask that visits all blocks, or those up to the diagonal, and asks `mask_mod` inside each."""
    count = -(-tokens // 128)
    index = torch.arange(count, device=device, dtype=torch.int32)
    visits = index + 1 if causal else torch.full_like(index, count)
    return BlockMask.from_kv_blocks(
        visits[None, None],
        index.expand(1, 1, count, count).contiguous(),
        mask_mod=mask_mod,
        seq_lengths=(tokens, tokens),
    )
