"""Rows of an embedding, widened where they are stored in 8 bits."""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others

WIDE = 1024  # values that a program reads


@launched
@triton.jit(do_not_specialize=["ids"])
def embed(
    ids, w, scale, out, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (token, part of its row): `out` `[tokens, COLUMNS]` of `w` `[rows, COLUMNS]`.

    Args:
        ids: `[tokens]` int64.
        scale: `[rows, COLUMNS / GROUP]`, with HAS_SCALE.
    """
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
        embed[(len(ids), triton.cdiv(columns, WIDE))](
            ids,
            weight,
            weight if scale is None else scale,
            out,
            COLUMNS=columns,
            GROUP=group,
            WIDE=WIDE,
            HAS_SCALE=scale is not None,
            num_warps=4,
            **pdl(ids.device),
        )
    return out
