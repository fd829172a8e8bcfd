"""Cosines and sines of a step's positions: what `models/rope.py` computes, in one pass."""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others


@launched
@triton.jit(do_not_specialize=["positions", "stride"])
def turn_by(
    positions, steps, axes, cosine, sine, stride, magnitude, HALF: tl.constexpr, WIDE: tl.constexpr,
    HAS_AXES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token.

    Args:
        positions: `[3, tokens]` int64, `stride` from axis to axis.
        steps: `[HALF]` float32, radians per position.
        axes: `[HALF]` int64, which position each follows; read only with HAS_AXES, else all follow the first.
        cosine, sine: `[tokens, 2 · HALF]`, the second half repeating the first.
        WIDE: a power of two that holds HALF.
    """
    wait_for_others(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDE)
    inside = place < HALF
    axis = tl.zeros([WIDE], tl.int64)
    if HAS_AXES:
        axis = tl.load(axes + place, mask=inside, other=0)
    position = tl.load(positions + axis * stride + token, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(steps + place, mask=inside, other=0)
    cos, sin = tl.cos(angle) * magnitude, tl.sin(angle) * magnitude
    at = token * (2 * HALF) + place
    kind: tl.constexpr = cosine.dtype.element_ty
    tl.store(cosine + at, cos.to(kind), mask=inside)
    tl.store(cosine + at + HALF, cos.to(kind), mask=inside)
    tl.store(sine + at, sin.to(kind), mask=inside)
    tl.store(sine + at + HALF, sin.to(kind), mask=inside)


def rotation(
    positions: torch.Tensor,
    steps: torch.Tensor,
    axes: torch.Tensor | None,
    magnitude: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, each `[tokens, 2 · len(steps)]`, of `positions` `[3, tokens]` int64."""
    half, tokens = len(steps), positions.shape[1]
    cosine = torch.empty(tokens, 2 * half, dtype=dtype, device=positions.device)
    sine = torch.empty_like(cosine)
    if tokens:
        turn_by[(tokens,)](
            positions,
            steps,
            steps if axes is None else axes,
            cosine,
            sine,
            positions.stride(0),
            magnitude,
            HALF=half,
            WIDE=triton.next_power_of_2(half),
            HAS_AXES=axes is not None,
            num_warps=1,
            **pdl(positions.device),
        )
    return cosine, sine
