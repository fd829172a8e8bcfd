"""Attention of one new token per sequence over the paged cache, split over the context (flash-decoding).

    context of a sequence   | split 0 | split 1 | … | split S−1 |      each: a partial output and its
                                 └─────────┴───┬─────────┘             log of the sum of exponentials
                                        merged in order

The number of splits is fixed, so that one CUDA graph serves every length; a split without tokens ends
at once. All query heads of a KV head share what is read of it. With a sliding window only the window is
split; what lies before it is not read. Heads are read in a power of two of values, the last ones masked.

Sources: FlashAttention-2 (https://arxiv.org/abs/2307.08691); Flash-Decoding (Dao et al. 2023).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, wait_for_others
from snugvl.layers.kernels.e4m3 import cached, operand
from snugvl.layers.kernels.products.weights import e4m3_factor


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """Splits of a context and how a program goes through its own.

    One kernel that also merges, by a counter at which splits meet, was no faster on an H200, nor were other
    tiles by more than 4 % (measured on an H200).

    Attributes:
        splits: of a context at most, a power of two.
        step: tokens read at a time, a power of two, 16 or more.
        warps: of a program.
        stages: Triton's. A step waits for its block table, then for its keys and values, and Triton gives
            half of the stages to each wait.
    """

    splits: int = 16
    step: int = 64
    warps: int = 4
    stages: int = 2


@triton.jit
def attend_range(
    q, keys, values, table, kv_head, start, end, scale, KV_HEADS: tl.constexpr, PAD: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Attention of `q` `[PAD, WIDE]` to tokens `start … end` of a sequence, one or more; `table`: its blocks.

    Returns outputs `[PAD, WIDE]` and logs of the sums of exponentials `[PAD]`, base 2, both float32.
    """
    dim = tl.arange(0, WIDE)
    fp8: tl.constexpr = keys.dtype.element_ty == tl.uint8
    if fp8:
        q = operand(q)
    # float32 is for comparing with an oracle: tf32, the default, would lose 13 of its 23 bits.
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    best = tl.full([PAD], float("-inf"), tl.float32)
    total = tl.zeros([PAD], tl.float32)
    acc = tl.zeros([PAD, WIDE], tl.float32)
    factor = scale * 1.4426950408889634  # log2(e): exp2 is what the hardware has
    if fp8:
        factor *= e4m3_factor(NATIVE)
    for first in tl.range(start, end, STEP):
        token = first + tl.arange(0, STEP)
        live = token < end
        block = tl.load(table + token // BLOCK, mask=live, other=0).to(tl.int64)
        at = ((block * BLOCK + token % BLOCK) * KV_HEADS + kv_head) * DIM
        # Masked slots read as 0: what a freed block holds may be NaN, and 0 · NaN is NaN.
        there = live[:, None]
        if WIDE != DIM:
            there = there & (dim < DIM)[None, :]
        k = tl.load(keys + at[:, None] + dim[None, :], mask=there, other=0)
        v = tl.load(values + at[:, None] + dim[None, :], mask=there, other=0)
        k, v = cached(k, q.dtype, NATIVE), cached(v, q.dtype, NATIVE)
        score = tl.dot(q, tl.trans(k), input_precision=precision) * factor
        score = tl.where(live[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        decay = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best[:, None])
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q.dtype), v, acc * decay[:, None], input_precision=precision)
        best = new_best
    if fp8:
        acc *= e4m3_factor(NATIVE)
    return acc / total[:, None], best + tl.log2(total)


@launched
@triton.jit(do_not_specialize=["tables", "lengths", "table_width"])
def attend_splits(
    query, keys, values, tables, lengths, partial, logsums, scale, table_width, KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (sequence, KV head, split): partial outputs of its `SHARED` query heads.

    Args:
        query: `[sequences, KV_HEADS · SHARED, DIM]`.
        keys, values: `[slots, KV_HEADS, DIM]` of one layer.
        tables: `[sequences, table_width]` int32 block tables.
        lengths: `[sequences]` int32, tokens in the cache; 0 for a row that only pads the batch.
        partial: `[sequences, heads, SPLITS, DIM]` float32.
        logsums: `[sequences, heads, SPLITS]` float32, base 2; −inf for a split without tokens.
        WIDE: a power of two that holds DIM.
        WINDOW: tokens that a query sees, itself included; 0 for all.
        NATIVE: the hardware converts float8; read only where keys and values are bytes of e4m3.
    """
    wait_for_others(PDL)
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(length - begin, SPLITS), STEP) * STEP
    start = begin + split * each
    end = min(start + each, length)
    head = tl.arange(0, PAD)
    dim = tl.arange(0, WIDE)
    heads: tl.constexpr = KV_HEADS * SHARED
    mine = head < SHARED
    row = sequence.to(tl.int64) * heads + kv_head * SHARED + head
    if start >= end:
        tl.store(logsums + row * SPLITS + split, float("-inf"), mask=mine)
        return
    inside = mine[:, None]
    if WIDE != DIM:
        inside = inside & (dim < DIM)[None, :]
    q = tl.load(query + row[:, None] * DIM + dim[None, :], mask=inside, other=0)
    table = tables + sequence.to(tl.int64) * table_width
    part, logsum = attend_range(
        q, keys, values, table, kv_head, start, end, scale, KV_HEADS, PAD, DIM, WIDE, BLOCK, STEP, NATIVE
    )
    tl.store(logsums + row * SPLITS + split, logsum, mask=mine)
    where = (row[:, None] * SPLITS + split) * DIM + dim[None, :]
    tl.store(partial + where, part, mask=inside)


@launched
@triton.jit(do_not_specialize=["line", "step"])
def merge_splits(
    partial, logsums, gates, out, line, step, HEADS: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (sequence, head): the splits' outputs, weighted, to `out` `[rows, DIM]`; 0 without any token.

    GATED: times the sigmoid of `gates`, `line` from sequence to sequence, `step` from head to head.
    """
    wait_for_others(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, WIDE)
    logsum = tl.load(logsums + row * SPLITS + split)
    best = tl.max(logsum, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp2(logsum - best)
    there = (weight > 0)[:, None]
    if WIDE != DIM:
        there = there & (dim < DIM)[None, :]
    part = tl.load(partial + (row * SPLITS + split[:, None]) * DIM + dim[None, :], mask=there, other=0)
    total = tl.sum(weight, 0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:  # rounded where transformers rounds
        at = gates + row // HEADS * line + row % HEADS * step + dim
        opened = tl.sigmoid(tl.load(at, mask=dim < DIM, other=0).to(tl.float32)).to(kind).to(tl.float32)
        merged = merged.to(kind).to(tl.float32) * opened
    tl.store(out + row * DIM + dim, merged.to(kind), mask=dim < DIM)
