"""Causal attention of chunks of prompts over the paged cache, their cached prefix included.

    sequence s    cached prefix … | chunk of new tokens         queries are the chunk, keys are both;
                  0 … c − n         c − n … c − 1               nothing of size [n, c] is ever stored

With a sliding window a block of queries begins where its first one sees anything. Heads are read in a power
of two of values, the last ones masked.

Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691), PagedAttention (https://arxiv.org/abs/2309.06180).
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.e4m3 import cached, operand
from snugvl.layers.kernels.launch import launched
from snugvl.layers.kernels.weights import e4m3_factor

LOWEST = tl.constexpr(-1e30)  # below every score


@launched
@triton.jit(do_not_specialize=["tables", "starts", "lengths", "table_width"])
def attend_chunk(
    query,
    keys,
    values,
    tables,
    starts,
    lengths,
    out,
    scale,
    table_width,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One (block of `ROWS` queries, head, sequence).

    Args:
        query, out: `[tokens, HEADS, DIM]`, the chunks one after the other.
        keys, values: `[slots, HEADS / SHARED, DIM]` of one layer.
        starts: `[sequences + 1]` int32, first token of each chunk in the batch.
        lengths: `[sequences]` int32, tokens in the cache, the chunk's own included.
        WIDE: a power of two that holds DIM.
        WINDOW: tokens that a query sees, itself included; 0 for all.
        NATIVE: the hardware converts float8; read only where keys and values are bytes of e4m3.
    """
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begin
    first_row = tl.program_id(0) * ROWS
    if first_row >= new:
        return
    context = tl.load(lengths + sequence)
    row = first_row + tl.arange(0, ROWS)
    position = context - new + row
    dim = tl.arange(0, WIDE)
    kv_heads: tl.constexpr = HEADS // SHARED
    kv_head = head // SHARED
    live_row = row < new
    at_q = ((begin + row).to(tl.int64) * HEADS + head) * DIM
    inside = live_row[:, None]
    if WIDE != DIM:
        inside = inside & (dim < DIM)[None, :]
    q = tl.load(query + at_q[:, None] + dim[None, :], mask=inside, other=0)
    fp8: tl.constexpr = keys.dtype.element_ty == tl.uint8
    if fp8:
        q = operand(q)
    # float32 is for comparing with an oracle: tf32, the default, would lose 13 of its 23 bits.
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    factor = scale * 1.4426950408889634
    if fp8:
        factor *= e4m3_factor(NATIVE)
    end = min(context, context - new + first_row + ROWS)  # nobody here sees beyond
    begin_keys = 0
    if WINDOW > 0:
        begin_keys = tl.maximum(context - new + first_row - WINDOW + 1, 0) // STEP * STEP
    for first in tl.range(begin_keys, end, STEP):
        token = first + tl.arange(0, STEP)
        live = token < end
        block = tl.load(table + token // BLOCK, mask=live, other=0).to(tl.int64)
        at = ((block * BLOCK + token % BLOCK) * kv_heads + kv_head) * DIM
        there = live[:, None]
        if WIDE != DIM:
            there = there & (dim < DIM)[None, :]
        k = tl.load(keys + at[:, None] + dim[None, :], mask=there, other=0)
        v = tl.load(values + at[:, None] + dim[None, :], mask=there, other=0)
        k, v = cached(k, q.dtype, NATIVE), cached(v, q.dtype, NATIVE)
        score = tl.dot(q, tl.trans(k), input_precision=precision) * factor
        score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
        if WINDOW > 0:
            score = tl.where(token[None, :] > position[:, None] - WINDOW, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        if WINDOW > 0:  # a row may see nothing of a step, and inf − inf is NaN
            new_best = tl.maximum(new_best, LOWEST)
        decay = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best[:, None])
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q.dtype), v, acc * decay[:, None], input_precision=precision)
        best = new_best
    if fp8:
        acc *= e4m3_factor(NATIVE)
    if WINDOW > 0:  # rows beyond the chunk may have seen nothing at all
        total = tl.where(live_row, total, 1.0)
    tl.store(
        out + at_q[:, None] + dim[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )
