"""Causal attention of chunks of prompts over the paged cache, their cached prefix included.

    sequence s    cached prefix … | chunk of new tokens         queries are the chunk, keys are both;
                  0 … c − n         c − n … c − 1               nothing of size [n, c] is ever stored

Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691), PagedAttention (https://arxiv.org/abs/2309.06180).
"""

import triton
import triton.language as tl


@triton.jit
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One (block of `ROWS` queries, head, sequence).

    Args:
        query, out: `[tokens, HEADS, DIM]`, the chunks one after the other.
        keys, values: `[slots, HEADS / SHARED, DIM]` of one layer.
        starts: `[sequences + 1]` int32, first token of each chunk in the batch.
        lengths: `[sequences]` int32, tokens in the cache, the chunk's own included.
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
    dim = tl.arange(0, DIM)
    kv_heads: tl.constexpr = HEADS // SHARED
    kv_head = head // SHARED
    live_row = row < new
    at_q = ((begin + row).to(tl.int64) * HEADS + head) * DIM
    q = tl.load(query + at_q[:, None] + dim[None, :], mask=live_row[:, None], other=0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    factor = scale * 1.4426950408889634
    end = min(context, context - new + first_row + ROWS)  # nobody here sees beyond
    for first in tl.range(0, end, STEP):
        token = first + tl.arange(0, STEP)
        live = token < end
        block = tl.load(table + token // BLOCK, mask=live, other=0).to(tl.int64)
        at = ((block * BLOCK + token % BLOCK) * kv_heads + kv_head) * DIM
        k = tl.load(keys + at[:, None] + dim[None, :], mask=live[:, None], other=0).to(q.dtype)
        v = tl.load(values + at[:, None] + dim[None, :], mask=live[:, None], other=0).to(q.dtype)
        score = tl.dot(q, tl.trans(k)) * factor
        score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        decay = tl.exp2(best - new_best)
        weight = tl.exp2(score - new_best[:, None])
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q.dtype), v, acc * decay[:, None])
        best = new_best
    tl.store(
        out + at_q[:, None] + dim[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=live_row[:, None],
    )
