"""Attention over the paged cache on a GPU: what `layers.attention.paged_attention` computes; its tiles.

Keys and values have the queries' type, or are bytes of e4m3: kernels tell by the tensor's type.

Registers and shared memory decide, which a multiprocessor has 64 KiB of on Turing, 100 on consumer cards from
Ampere on, 164 on an A100, 228 on an H100. Queries, and the keys and values of `stages` steps (one less before
Hopper), take 2 bytes · dim a token. Two programs at a time hide each other's waits: where they can, each
takes less than half.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from snugvl.layers.kernels.attention.decode import DecodeCut, attend_splits, merge_splits
from snugvl.layers.kernels.attention.prefill import attend_chunk
from snugvl.layers.kernels.attention.rope_cache import rope_and_cache
from snugvl.layers.kernels.compiler.launch import pdl
from snugvl.layers.kernels.device import Hardware, hardware_of, native_fp8, tensor_cores
from snugvl.layers.kernels.places import most_sequences

MANY, MANY_TOKENS = 64, 8  # tokens from which a program writes several, and how many


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tiles of `attend_chunk`, measured on an H200.

    Attributes:
        rows: of a program, each a token and a query head; a power of two.
        step: tokens of the cache read at a time, a power of two, 16 or more.
        warps: of a program.
        stages: Triton's; 2 load a step while another is computed, 3 load two.
        few_step, few_stages: of a sequence with one new token.
    """

    rows: int = 64
    step: int = 64
    warps: int = 4
    stages: int = 3
    few_step: int = 64
    few_stages: int = 3


def prefill_tiles(hardware: Hardware, dim: int, shared: int, exact: bool) -> PrefillTiles:
    """Tiles for heads of `dim` values, of which `shared` read the same keys and values.

    `exact`: queries are float32, and so are products.
    """
    wide = dim > 128
    generation, minor = hardware.capability
    if generation and (exact or generation < 8):  # without tensor cores products are loops over registers
        return PrefillTiles(rows=32 if wide else 64, step=16, warps=8, stages=2, few_step=16, few_stages=2)
    if generation in (8, 12):
        if wide:
            return PrefillTiles(step=16, warps=8, few_step=16)
        stages = 3 if (generation, minor) == (8, 0) else 2  # an A100 has more
        return PrefillTiles(step=32, stages=stages, few_step=32, few_stages=stages)
    if wide:
        return PrefillTiles(step=32, stages=2, few_step=32)
    if shared > 2:  # as many programs as with two heads and half of the rows, and half as much to read
        return PrefillTiles(rows=128, warps=8, few_step=128)
    return PrefillTiles()


def _narrow(query: torch.Tensor) -> bool:
    """Whether tiles are half as large: without tensor cores of that type, products are loops over registers.

    So it is in float32, which is never rounded to tf32, and before Ampere, which has less shared memory too.
    """
    return query.is_cuda and (query.dtype == torch.float32 or not tensor_cores(query.device))


def _step(query: torch.Tensor) -> int:
    """Tokens of the cache read at a time: keys and values of a step take 32 KiB of shared memory."""
    step = 64 if query.shape[-1] <= 128 else 32
    return step // 2 if _narrow(query) else step


def decode_cut(query: torch.Tensor) -> DecodeCut:
    """How contexts are cut for `query` `[sequences, heads, dim]`: the same for a row in any company."""
    return DecodeCut(step=_step(query))


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query per sequence, `[sequences, heads, dim]`. `lengths` `[sequences]` int32, on the GPU.

    `window`: tokens that each query sees, itself included; None for all. `gates`: of the queries' shape; the
    output is multiplied by their sigmoid.
    """
    cut = decode_cut(query)
    sequences, heads, dim = query.shape
    partial, logsums = _partial(query, cut.splits)
    attend_splits[(sequences, keys.shape[1], cut.splits)](
        query, keys, values, tables, lengths, partial, logsums, scale, tables.shape[1],
        **_constants(query, keys, block_size, window, cut),
    )  # fmt: skip
    out = torch.empty_like(query)
    line, step, one = (0, 0, 1) if gates is None else gates.stride()
    assert one == 1, "values of a gate are side by side"
    merge_splits[(sequences * heads,)](
        partial, logsums, out if gates is None else gates, out, line, step, HEADS=heads, SPLITS=cut.splits,
        DIM=dim, WIDE=triton.next_power_of_2(dim), GATED=gates is not None, num_warps=4, **pdl(query.device),
    )  # fmt: skip
    return out


def _constants(
    query: torch.Tensor, keys: torch.Tensor, block_size: int, window: int | None, cut: DecodeCut
) -> dict[str, Any]:
    """The constants that decoding is compiled with."""
    heads, dim, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    return {
        "KV_HEADS": kv_heads,
        "SHARED": heads // kv_heads,
        "PAD": max(16, triton.next_power_of_2(heads // kv_heads)),
        "DIM": dim,
        "WIDE": triton.next_power_of_2(dim),
        "BLOCK": block_size,
        "STEP": cut.step,
        "SPLITS": cut.splits,
        "WINDOW": window or 0,
        "NATIVE": native_fp8(query.device),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        **pdl(query.device),
    }


def _partial(query: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what splits give: outputs `[sequences, heads, splits, dim]`, and logs of sums of weights."""
    sequences, heads, dim = query.shape
    room = torch.empty(sequences, heads, splits, dim, dtype=torch.float32, device=query.device)
    return room, torch.empty(sequences, heads, splits, dtype=torch.float32, device=query.device)


def chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Chunks of any lengths, `[tokens, heads, dim]`; rows of tokens that belong to none hold anything."""
    (tokens, heads, dim), kv_heads, sequences = query.shape, keys.shape[1], lengths.shape[0]
    shared = heads // kv_heads
    tiles = prefill_tiles(hardware_of(query.device), dim, shared, query.dtype == torch.float32)
    few = max(16, triton.next_power_of_2(shared))
    rows = max(tiles.rows, few)
    out = torch.empty_like(query)
    attend_chunk[(kv_heads, tokens // (rows // shared) + sequences)](
        query,
        keys,
        values,
        tables,
        starts,
        lengths,
        out,
        scale,
        tables.shape[1],
        sequences,
        KV_HEADS=kv_heads,
        SHARED=shared,
        DIM=dim,
        WIDE=triton.next_power_of_2(dim),
        BLOCK=block_size,
        MAX_SEQUENCES=most_sequences(sequences),
        ROWS=rows,
        STEP=tiles.step,
        STAGES=tiles.stages,
        FEW=few,
        FEW_STEP=tiles.few_step,
        FEW_STAGES=tiles.few_stages,
        WINDOW=window or 0,
        NATIVE=native_fp8(query.device),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl(query.device),
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
    each, warps = (MANY_TOKENS, 4) if tokens >= MANY else (1, 1)
    rope_and_cache[(triton.cdiv(tokens, each), heads + 2 * kv_heads)](
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
        tokens,
        TOKENS=each,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROTATED=rotated,
        HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(max(dim - rotated, 1)),
        HAS_NORM=norms is not None,
        HAS_OFFSET=offset != 0,
        GATED=gated,
        num_warps=warps,
        **pdl(qkv.device),
    )
    return query
