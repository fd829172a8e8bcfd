"""Rotary position embeddings. Which model wants which: `models/rope.py`; the tower's: `models/patches.py`.

A rotation is `(cos, sin)`, each `[tokens, dims]`, where the second half repeats the first. `dims` may be
fewer than a head has values: the first ones are rotated, the rest stay.

Sources: RoFormer (https://arxiv.org/abs/2104.09864); M-RoPE as in Hugging Face transformers,
`models/qwen3_vl/modeling_qwen3_vl.py` (interleaved) and `models/qwen2_5_vl/modeling_qwen2_5_vl.py`.
"""

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """`[dim / 2]` float32 angular steps per position."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def mrope_axes(section: tuple[int, int, int], device: torch.device, *, interleaved: bool) -> torch.Tensor:
    """Which of time (0), height (1) and width (2) each frequency follows, `[dims / 2]` int64.

    Interleaved: 0 1 2 0 1 2 … while height and width still have frequencies left, then time alone;
    else 0 … 0 1 … 1 2 … 2.
    """
    if not interleaved:
        return torch.cat([torch.full((count,), axis, device=device) for axis, count in enumerate(section)])
    axes = torch.zeros(sum(section), dtype=torch.int64, device=device)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def cos_sin(angles: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> CosSin:
    """The rotation by `angles` `[tokens, dims / 2]` float32, stretched by `magnitude`."""
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)


def rotate(x: torch.Tensor, rotation: CosSin) -> torch.Tensor:
    """Rotate the first values of `x` `[tokens, heads, head_dim]`, in the precision of both combined."""
    cos, sin = (part[:, None] for part in rotation)
    dims = cos.shape[-1]
    turned = x[..., :dims]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if dims == x.shape[-1] else torch.cat((turned, x[..., dims:]), dim=-1)
