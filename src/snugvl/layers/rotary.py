"""Rotary position embeddings: interleaved M-RoPE (the vision tower's two axes: `models/patches.py`).

It hands over `(cos, sin)`, each `[tokens, head_dim]`, where the second half repeats the first.

Sources: RoFormer (https://arxiv.org/abs/2104.09864); Qwen3-VL's interleaved M-RoPE as in Hugging Face
transformers, `models/qwen3_vl/modeling_qwen3_vl.py`.
"""

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """`[dim / 2]` float32 angular steps per position."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def mrope_axes(section: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Which of time (0), height (1) and width (2) each frequency follows, `[head_dim / 2]` int64.

    Interleaved: 0 1 2 0 1 2 … while height and width still have frequencies left, then time alone.
    """
    axes = torch.zeros(sum(section), dtype=torch.int64, device=device)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def mrope(
    positions: torch.Tensor, head_dim: int, theta: float, section: tuple[int, int, int], dtype: torch.dtype
) -> CosSin:
    """Cosine and sine for text and image tokens at `positions` `[3, tokens]`."""
    steps = inverse_frequencies(head_dim, theta, positions.device)
    axes = mrope_axes(section, positions.device)
    angles = positions.float()[axes].T * steps  # [tokens, head_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)


def rotate(x: torch.Tensor, rotation: CosSin) -> torch.Tensor:
    """Rotate `x` `[tokens, heads, head_dim]`, in the precision of `rotation` and `x` combined."""
    cos, sin = (part[:, None] for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
