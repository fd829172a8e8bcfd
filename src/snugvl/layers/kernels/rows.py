"""Kernels of which a program takes a row: of an embedding, of RMSNorm, of the rotation at a step's positions.

Each computes in one pass what `layers/linear.py` and `models/rope.py` say in plain torch.
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others
from snugvl.layers.linear import plain_norm
from snugvl.layers.replaced import usable

LOOKUP_WIDE = 1024  # values of an embedding that a program reads


@launched
@triton.jit(do_not_specialize=["ids"])
def embed(
    ids, w, scale, out, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (token, part of its row): `out` `[tokens, COLUMNS]` of `w` `[rows, COLUMNS]`. `ids`: `[tokens]`
    int64; `scale`: `[rows, COLUMNS / GROUP]`, with HAS_SCALE."""
    wait_for_others(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < COLUMNS
    value = tl.load(w + row * COLUMNS + column, mask=inside, other=0)
    if HAS_SCALE:
        factor = tl.load(scale + row * (COLUMNS // GROUP) + column // GROUP, mask=inside, other=0)
        value = value.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + token * COLUMNS + column, value.to(out.dtype.element_ty), mask=inside)


def lookup(
    ids: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows `ids` `[n]` int64 of `weight` `[rows, columns]`, times their groups' scales if it has some."""
    columns = weight.shape[1]
    out = torch.empty(len(ids), columns, dtype=dtype, device=ids.device)
    if len(ids):
        embed[(len(ids), triton.cdiv(columns, LOOKUP_WIDE))](
            ids,
            weight,
            weight if scale is None else scale,
            out,
            COLUMNS=columns,
            GROUP=group,
            WIDE=LOOKUP_WIDE,
            HAS_SCALE=scale is not None,
            num_warps=4,
            **pdl(ids.device),
        )
    return out


@launched
@triton.jit
def rms_norm(
    x, weight, out, eps, offset, SIZE: tl.constexpr, WIDE: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row of `x` `[rows, SIZE]`; rounded before the weight, or with an offset after it.

    Both as transformers does.
    """
    wait_for_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    mask = column < SIZE
    v = tl.load(x + row * SIZE + column, mask=mask, other=0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, 0) / SIZE + eps)
    w = tl.load(weight + column, mask=mask, other=0)
    if HAS_OFFSET:
        y = (v * rstd * (offset + w.to(tl.float32))).to(out.dtype.element_ty)
    else:
        y = (v * rstd).to(out.dtype.element_ty) * w
    tl.store(out + row * SIZE + column, y, mask=mask)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """`x` `[…, size]`, normalised, times `offset + weight`."""
    if not usable("rms_norm"):
        return plain_norm(x, weight, eps, offset)
    size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    wide = triton.next_power_of_2(size)
    rms_norm[(x.numel() // size,)](
        x,
        weight,
        out,
        eps,
        offset,
        SIZE=size,
        WIDE=wide,
        HAS_OFFSET=offset != 0,
        num_warps=max(1, min(8, wide // 512)),
        **pdl(x.device),
    )
    return out


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
