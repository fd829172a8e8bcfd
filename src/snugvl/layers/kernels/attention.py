"""Attention over the paged cache on a GPU: what `layers.attention.paged_attention` computes.

Keys and values have the queries' type, or are bytes of e4m3: kernels tell by the tensor's type.
"""

import torch
import triton

from snugvl.layers.kernels.decode_attention import attend_splits, merge_splits
from snugvl.layers.kernels.device import capability, native_fp8
from snugvl.layers.kernels.early import early
from snugvl.layers.kernels.prefill_attention import attend_chunk
from snugvl.layers.kernels.rope_cache import rope_and_cache

SPLITS = 16  # of a context in decode; a power of two


def _narrow(query: torch.Tensor) -> bool:
    """Whether tiles are half as large: without tensor cores of that type, products are loops over registers.

    So it is in float32, which is never rounded to tf32, and before Ampere, which has less shared memory too.
    """
    return query.is_cuda and (query.dtype == torch.float32 or capability(query.device) < (8, 0))


def _step(query: torch.Tensor) -> int:
    """Tokens of the cache read at a time: two steps of keys and values take 64 KiB of shared memory."""
    step = 64 if query.shape[-1] <= 128 else 32
    return step // 2 if _narrow(query) else step


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """One query per sequence, `[sequences, heads, dim]`. `lengths` `[sequences]` int32, on the GPU.

    `window`: tokens that each query sees, itself included; None for all.
    """
    sequences, heads, dim = query.shape
    kv_heads = keys.shape[1]
    partial = torch.empty(sequences, heads, SPLITS, dim, dtype=torch.float32, device=query.device)
    logsums = torch.empty(sequences, heads, SPLITS, dtype=torch.float32, device=query.device)
    attend_splits[(sequences, kv_heads, SPLITS)](
        query,
        keys,
        values,
        tables,
        lengths,
        partial,
        logsums,
        scale,
        tables.shape[1],
        KV_HEADS=kv_heads,
        SHARED=heads // kv_heads,
        PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        BLOCK=block_size,
        STEP=_step(query),
        SPLITS=SPLITS,
        WINDOW=window or 0,
        NATIVE=native_fp8(query.device),
        num_warps=4,
        num_stages=2,
        **early(query.device),
    )
    out = torch.empty_like(query)
    merge_splits[(sequences * heads,)](
        partial,
        logsums,
        out,
        SPLITS=SPLITS,
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        num_warps=4,
        **early(query.device),
    )
    return out


def chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    block_size: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Chunks of any lengths, `[tokens, heads, dim]`; `longest` is that of the longest chunk."""
    _, heads, dim = query.shape
    rows = 64 if longest <= 64 or dim > 128 or _narrow(query) else 128
    if dim > 128 and _narrow(query):
        rows = 32
    out = torch.empty_like(query)
    attend_chunk[(triton.cdiv(longest, rows), heads, lengths.shape[0])](
        query,
        keys,
        values,
        tables,
        starts,
        lengths,
        out,
        scale,
        tables.shape[1],
        HEADS=heads,
        SHARED=heads // keys.shape[1],
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        BLOCK=block_size,
        ROWS=rows,
        STEP=_step(query),
        WINDOW=window or 0,
        NATIVE=native_fp8(query.device),
        num_warps=8 if rows == 128 else 4,
        num_stages=2,
    )
    return out


def write(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    *,
    offset: float = 0.0,
    gated: bool = False,
) -> torch.Tensor:
    """Norm and rotate the heads of `qkv` `[tokens, heads + 2 · kv heads, dim]`, store keys and values.

    `rotation`: cosine and sine, each `[tokens, rotated]`, the second half repeating the first; values of a
    head beyond `rotated` stay. `offset`: added to the norms' weights. `gated`: each query head in `qkv` is
    followed by its gate, which is left alone. Returns the queries `[tokens, heads, dim]`.
    """
    tokens, _, dim = qkv.shape
    kv_heads = keys.shape[1]
    query = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms or (qkv, qkv)
    rotated = rotation[0].shape[1]
    rope_and_cache[(tokens, heads + 2 * kv_heads)](
        qkv,
        q_norm,
        k_norm,
        *rotation,
        slots,
        query,
        keys,
        values,
        eps,
        offset,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROTATED=rotated,
        HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(max(dim - rotated, 1)),
        HAS_NORM=norms is not None,
        HAS_OFFSET=offset != 0,
        GATED=gated,
        num_warps=1,
        **early(qkv.device),
    )
    return query
