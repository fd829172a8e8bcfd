"""Decode attention in one kernel: the last program of a sequence's KV head merges what the others left.

    split 0 ─┐ partial output,
    split 1 ─┤ log of the sum   ─► counter + 1 ─► whoever finds all the others counted: merge, counter = 0
    split 2 ─┘

A second kernel for the merge costs a launch, and waits for the slowest sequence. Here a sequence's splits
meet at a counter in memory. The order of the merge is that of the splits, whoever comes last, so results are
the same every time. A context of one split is written at once.

What makes it right on a GPU: all threads of a program have stored before its one atomic addition, which
releases that and acquires what the earlier ones released; the merge reads past the multiprocessor's own
cache, which may hold an older layer's partial outputs.

Sources: the memory consistency model of PTX ISA; "threadFenceReduction" of NVIDIA's CUDA samples.
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.decode_attention import attend_range
from snugvl.layers.kernels.early import take_turn
from snugvl.layers.kernels.launch import launched

LINE = tl.constexpr(128)  # bytes that a prefetch brings


@triton.jit
def _fetch(cache, slot, kv_head, live, KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Bring one KV head of the slots `[n]` where `live` into the L2 cache."""
    size: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
    row: tl.constexpr = DIM * size
    lines: tl.constexpr = triton.next_power_of_2((row + LINE - 1) // LINE)
    within = tl.minimum(tl.arange(0, lines) * LINE, row - 1)
    place = (slot * KV_HEADS + kv_head) * row
    address = cache.to(tl.int64, bitcast=True) + place[:, None] + within[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, live.to(tl.int32)[:, None]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _look_ahead(
    keys,
    values,
    table,
    length,
    least,
    kv_head,
    slots,
    table_width,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Bring the first `AHEAD` tokens of a split into the L2 cache, before the kernel's turn.

    Lengths and tables are older than the kernel before. Should they not be, only the speed suffers: whatever
    they say, no address lies outside of the cache.
    """
    start, end, _ = _bounds(length, least, STEP, WINDOW)
    token = start + tl.arange(0, AHEAD)
    live = (token >= 0) & (token < end) & (token < table_width * BLOCK)
    block = tl.load(table + token // BLOCK, mask=live, other=0, cache_modifier=".cg")
    slot = block.to(tl.int64) * BLOCK + token % BLOCK
    live = live & (slot >= 0) & (slot < slots)
    _fetch(keys, slot, kv_head, live, KV_HEADS, DIM)
    _fetch(values, slot, kv_head, live, KV_HEADS, DIM)


@triton.jit
def _bounds(length, least, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """A split's first token, the one after its last (none if no more); how many splits have tokens."""
    seen = length
    if WINDOW > 0:
        seen = tl.minimum(length, WINDOW)
    each = tl.maximum(tl.cdiv(tl.cdiv(seen, tl.num_programs(2)), STEP) * STEP, least)
    start = length - seen + tl.program_id(2) * each
    return start, tl.minimum(start + each, length), tl.cdiv(seen, each)


@triton.jit
def _merge(
    partial,
    logsums,
    out,
    first,
    used,
    SHARED: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Write heads `first … first + SHARED` of `out` from `used` splits, `TOGETHER` heads at a time."""
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, WIDE)
    for skipped in tl.static_range(0, SHARED, TOGETHER):
        head = skipped + tl.arange(0, TOGETHER)
        row = first + head
        at = row[:, None] * tl.num_programs(2) + split[None, :]
        there = (head < SHARED)[:, None] & (split < used)[None, :]
        logsum = tl.load(logsums + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        inside = there[:, :, None] & (dim < DIM)[None, None, :]
        where = at[:, :, None] * DIM + dim[None, None, :]
        part = tl.load(partial + where, mask=inside, other=0, cache_modifier=".cg")
        best = tl.max(logsum, 1)
        best = tl.where(head < SHARED, best, 0.0)  # heads that only fill up: no infinity less infinity
        weight = tl.exp2(logsum - best[:, None])
        total = tl.where(head < SHARED, tl.sum(weight, 1), 1.0)
        merged = tl.sum(part * weight[:, :, None], 1) / total[:, None]
        mask = (head < SHARED)[:, None] & (dim < DIM)[None, :]
        tl.store(out + row[:, None] * DIM + dim[None, :], merged.to(out.dtype.element_ty), mask=mask)


@launched
@triton.jit(do_not_specialize=["tables", "lengths", "arrived", "table_width", "slots", "least"])
def attend_merged(
    query,
    keys,
    values,
    tables,
    lengths,
    partial,
    logsums,
    arrived,
    out,
    scale,
    table_width,
    slots,
    least,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    PAD: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One (sequence, KV head, split): what `attend_splits` and `merge_splits` compute together.

    Args:
        partial: `[sequences, heads, splits, DIM]` float32; logsums: `[sequences, heads, splits]` float32.
        arrived: `[sequences · KV_HEADS]` int32, 0 before and after.
        out: `[sequences, heads, DIM]`; 0 for a row that only pads the batch.
        slots: of the cache.
        least: tokens of a split, unless the context ends; 1 or more.
        SPLITS: a power of two, and no fewer than the grid has: one kernel for every number of splits.
        TOGETHER: heads merged at a time, a power of two.
        AHEAD: tokens to prefetch, a power of two; 0 for none.

    The others are those of `attend_splits`.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    table = tables + sequence.to(tl.int64) * table_width
    if EARLY and AHEAD > 0:
        early_length = tl.load(lengths + sequence, cache_modifier=".cg")
        _look_ahead(
            keys, values, table, early_length, least, kv_head, slots, table_width,
            KV_HEADS, DIM, BLOCK, STEP, WINDOW, AHEAD,
        )  # fmt: skip
    take_turn(EARLY)
    length = tl.load(lengths + sequence, cache_modifier=".cg")
    start, end, used = _bounds(length, least, STEP, WINDOW)
    head = tl.arange(0, PAD)
    dim = tl.arange(0, WIDE)
    first = sequence.to(tl.int64) * (KV_HEADS * SHARED) + kv_head * SHARED
    row = first + head
    inside = (head < SHARED)[:, None] & (dim < DIM)[None, :]
    target = out + row[:, None] * DIM + dim[None, :]
    if start >= end:
        if length + split == 0:  # of a row without any token, one program
            tl.store(target, tl.zeros([PAD, WIDE], out.dtype.element_ty), mask=inside)
        return
    q = tl.load(query + row[:, None] * DIM + dim[None, :], mask=inside, other=0)
    part, logsum = attend_range(
        q, keys, values, table, kv_head, start, end, scale, KV_HEADS, PAD, DIM, WIDE, BLOCK, STEP, NATIVE
    )
    if used == 1:
        tl.store(target, part.to(out.dtype.element_ty), mask=inside)
        return
    at = row * tl.num_programs(2) + split
    tl.store(logsums + at, logsum, mask=head < SHARED)
    tl.store(partial + at[:, None] * DIM + dim[None, :], part, mask=inside)
    tl.debug_barrier()
    counter = arrived + sequence * KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
        _merge(partial, logsums, out, first, used, SHARED, SPLITS, DIM, WIDE, TOGETHER)
        tl.store(counter, 0)
