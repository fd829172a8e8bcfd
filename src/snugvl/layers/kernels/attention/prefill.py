"""Causal attention of chunks of prompts, and of decodes beside them, over the paged cache.

    sequence s    cached prefix … | chunk of new tokens         queries are the chunk, keys are both;
                  0 … c − n         c − n … c − 1               nothing of size [n, c] is ever stored

All query heads of a KV head share what is read of it: the `ROWS` rows of a program are some tokens of a
chunk, for each of them `SHARED` heads. Whose tokens they are is found in `starts` (`places.py`):

    tokens of a program        ROWS / SHARED
    programs take places       last, first, last but one, second, …

A sequence with one new token has too few rows for that. It takes a tile of `FEW` rows, and one program for
each KV head reads the whole context. In a batch decodes come first, and wait for memory; the last tokens of
the last prompt see most keys, and compute. So both begin early, and one does while the other waits.

With a sliding window a block of queries begins where its first one sees anything. Heads are read in a power
of two of values, the last ones masked.

Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691), PagedAttention (https://arxiv.org/abs/2309.06180).
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, wait_for_others
from snugvl.layers.kernels.e4m3 import cached, operand
from snugvl.layers.kernels.places import owner
from snugvl.layers.kernels.products.weights import e4m3_factor

LOWEST = tl.constexpr(-1e30)  # below every score


@triton.jit
def attend_steps(
    q, position, best, total, acc, keys, values, table, kv_head, first, last, end, factor,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Go on with rows `q` `[rows, WIDE]` at `position` `[rows]` over tokens `first … last` of a sequence.

    Args:
        best, total, acc: the rows' highest score, sum of weights `[rows]`, and output `[rows, WIDE]` so far.
        first, last: multiples of STEP apart.
        end: tokens from there on are padding.
        factor: makes scores exponents of 2.
        MASKED: some token is not seen by some row, or lies beyond `end`.

    The table is read a step ahead: were it not, every step would wait for it before it asks for keys.
    """
    dim = tl.arange(0, WIDE)
    # float32 is for comparing with an oracle: tf32, the default, would lose 13 of its 23 bits.
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    token = first + tl.arange(0, STEP)
    block = tl.load(table + token // BLOCK, mask=token < end, other=0)
    stride: tl.constexpr = KV_HEADS * DIM
    for _ in tl.range(first, last, STEP, num_stages=STAGES):
        inner = tl.arange(0, STEP) if STEP % BLOCK == 0 else token  # what is no different in the next step
        at = (inner % BLOCK * stride + kv_head * DIM)[:, None] + dim[None, :]
        # Fewer than 2³¹ blocks: a product of 32 bits by 32 is one instruction.
        at = at + (block.to(tl.int32).to(tl.int64) * (BLOCK * stride))[:, None]
        if MASKED:  # slots beyond read as 0: what a freed block holds may be NaN, and 0 · NaN is NaN
            there = (token < end)[:, None]
            if WIDE != DIM:
                there = there & (dim < DIM)[None, :]
            k = tl.load(keys + at, mask=there, other=0)
            v = tl.load(values + at, mask=there, other=0)
        elif WIDE != DIM:
            k = tl.load(keys + at, mask=(dim < DIM)[None, :], other=0)
            v = tl.load(values + at, mask=(dim < DIM)[None, :], other=0)
        else:
            k = tl.load(keys + at)
            v = tl.load(values + at)
        k, v = cached(k, q.dtype, NATIVE), cached(v, q.dtype, NATIVE)
        score = tl.dot(q, tl.trans(k), input_precision=precision)
        if MASKED:
            score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
            if WINDOW > 0:
                score = tl.where(token[None, :] > position[:, None] - WINDOW, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1) * factor)
        if WINDOW > 0:  # a row may see nothing of a step, and inf − inf is NaN
            new_best = tl.maximum(new_best, LOWEST)
        decay = tl.exp2(best - new_best)
        weight = tl.exp2(score * factor - new_best[:, None])
        total = total * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q.dtype), v, acc * decay[:, None], input_precision=precision)
        best = new_best
        token += STEP
        block = tl.load(table + token // BLOCK, mask=token < end, other=0)
    return best, total, acc


@triton.jit
def attend_rows(
    query, keys, values, table, out, begin, row_token, new, context, kv_head, end, scale, ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, APART: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Tokens `row_token …` of a chunk of `new`, as many as `ROWS` hold, that see no token from `end` on.

    APART: steps that every row sees have a loop without masks.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDE)
    mine = row_token + row // SHARED
    position = context - new + mine
    live = (row < ROWS // SHARED * SHARED) & (mine < new)
    at_q = (((begin + mine).to(tl.int64) * KV_HEADS + kv_head) * SHARED + row % SHARED) * DIM
    inside = live[:, None]
    if WIDE != DIM:
        inside = inside & (dim < DIM)[None, :]
    q = tl.load(query + at_q[:, None] + dim[None, :], mask=inside, other=0)
    factor = scale * 1.4426950408889634  # log2(e): exp2 is what the hardware has
    if keys.dtype.element_ty == tl.uint8:
        q = operand(q)
        factor *= e4m3_factor(NATIVE)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - new + row_token - WINDOW + 1, 0) // STEP * STEP
    elif APART:
        full = (context - new + row_token + 1) // STEP * STEP
        best, total, acc = attend_steps(
            q, position, best, total, acc, keys, values, table, kv_head, 0, full, end, factor,
            KV_HEADS, DIM, WIDE, BLOCK, STEP, STAGES, WINDOW, False, NATIVE,
        )  # fmt: skip
        first = full
    best, total, acc = attend_steps(
        q, position, best, total, acc, keys, values, table, kv_head, first, end, end, factor,
        KV_HEADS, DIM, WIDE, BLOCK, STEP, STAGES, WINDOW, True, NATIVE,
    )  # fmt: skip
    if keys.dtype.element_ty == tl.uint8:
        acc *= e4m3_factor(NATIVE)
    if WINDOW > 0:  # padding rows may have seen nothing at all
        total = tl.where(live, total, 1.0)
    tl.store(
        out + at_q[:, None] + dim[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )


@launched
@triton.jit(do_not_specialize=["tables", "starts", "lengths", "table_width", "sequences"])
def attend_chunk(
    query, keys, values, tables, starts, lengths, out, scale, table_width, sequences, KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    MAX_SEQUENCES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    FEW: tl.constexpr, FEW_STEP: tl.constexpr, FEW_STAGES: tl.constexpr, WINDOW: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (KV head, block of tokens of a sequence).

    Args:
        query, out: `[tokens, KV_HEADS · SHARED, DIM]`, the chunks one after the other.
        keys, values: `[slots, KV_HEADS, DIM]` of one layer.
        tables: `[sequences, table_width]`, block tables.
        starts: `[sequences + 1]` int32, first token of each chunk in the batch.
        lengths: `[sequences]` int32, tokens in the cache, the chunk's own included.
        WIDE: a power of two that holds DIM.
        MAX_SEQUENCES: a power of two that holds the sequences.
        ROWS, STEP, STAGES: rows of a program, `SHARED` of them or more, tokens read at a time, and Triton's
            stages: 3 load a step while another is computed.
        FEW, FEW_STEP, FEW_STAGES: the same for a sequence with one new token; FEW holds SHARED.
        WINDOW: tokens that a query sees, itself included; 0 for all.
        NATIVE: the hardware converts float8; read only where keys and values are bytes of e4m3.
    """
    wait_for_others(PDL)
    kv_head = tl.program_id(0)
    place = tl.program_id(1)
    place = tl.where(place % 2 == 0, tl.num_programs(1) - 1 - place // 2, place // 2)
    each: tl.constexpr = ROWS // SHARED
    sequence, begin, new, nth = owner(starts, place, sequences, each, MAX_SEQUENCES)
    if nth >= tl.cdiv(new, each):
        return
    context = tl.load(lengths + sequence)
    table = tables + sequence.to(tl.int64) * table_width
    if new == 1:
        attend_rows(
            query, keys, values, table, out, begin, 0, new, context, kv_head, context, scale,
            FEW, KV_HEADS, SHARED, DIM, WIDE, BLOCK, FEW_STEP, FEW_STAGES, WINDOW, False, NATIVE,
        )  # fmt: skip
    else:
        token = nth * each
        end = min(context, context - new + token + each)  # no query here sees beyond
        attend_rows(
            query, keys, values, table, out, begin, token, new, context, kv_head, end, scale,
            ROWS, KV_HEADS, SHARED, DIM, WIDE, BLOCK, STEP, STAGES, WINDOW, True, NATIVE,
        )  # fmt: skip
