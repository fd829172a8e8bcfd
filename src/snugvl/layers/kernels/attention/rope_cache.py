"""q/k-norm, rotary embedding and the write into the KV cache, in one pass over the new tokens.

a head   | first half | second half | rest, not rotated |      read in powers of two, the last values masked
         └──────── ROTATED ─────────┘                   DIM

A program takes one head of one token where there are few; of several tokens where many would be more programs
than a GPU starts in the time that it needs for their values.
"""

import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, wait_for_others
from snugvl.layers.kernels.e4m3 import stored


@triton.jit
def _weighted(x, weight, at, inside, offset, kind: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """Values times their weights, rounded where transformers does: see `layers/linear.py`."""
    w = tl.load(weight + at, mask=inside, other=0)
    y = x.to(kind) * w
    if HAS_OFFSET:
        y = (x * (offset + w.to(tl.float32))).to(kind)
    return y


@triton.jit
def _normed(
    low, high, rest, x, weight, eps, offset, half, more, ROTATED: tl.constexpr, DIM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """The three parts of one head, of several tokens, after RMSNorm, as transformers rounds them."""
    kind: tl.constexpr = x.dtype.element_ty
    low, high, rest = low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)
    square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    if ROTATED < DIM:
        square += tl.sum(rest * rest, 1)
    rstd = tl.rsqrt(square / DIM + eps)[:, None]
    inside = half < ROTATED // 2
    low = _weighted(low * rstd, weight, half, inside, offset, kind, HAS_OFFSET)
    high = _weighted(high * rstd, weight, ROTATED // 2 + half, inside, offset, kind, HAS_OFFSET)
    if ROTATED < DIM:
        at = ROTATED + more
        rest = _weighted(rest * rstd, weight, at, at < DIM, offset, kind, HAS_OFFSET)
    return low, high, rest


@launched
@triton.jit(do_not_specialize=["slots", "tokens"])
def rope_and_cache(
    qkv, q_norm, k_norm, cosine, sine, slots, query, keys, values, eps, offset, tokens, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, HAS_NORM: tl.constexpr, HAS_OFFSET: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`TOKENS` tokens of a head of `qkv` `[tokens, HEADS + 2 · KV_HEADS, DIM]`; `GATED`: queries have gates.

    Query heads go to `query` `[tokens, HEADS, DIM]`, keys and values to their slot of the cache
    `[slots, KV_HEADS, DIM]`, as e4m3 where that is bytes; a slot below 0 is not written. `cosine`, `sine`:
    `[tokens, ROTATED]`, the second half repeating the first. `HALF`, `REST`: powers of two that hold half of
    the rotated values and the rest.
    """
    wait_for_others(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    here = token < tokens
    token = token[:, None]
    half = tl.arange(0, HALF)[None, :]
    more = tl.arange(0, REST)[None, :]
    inside = here[:, None] & (half < ROTATED // 2)
    beyond = here[:, None] & (ROTATED + more < DIM)
    if GATED:
        source = qkv + (token * 2 * (HEADS + KV_HEADS) + head + tl.minimum(head, HEADS)) * DIM
    else:
        source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    slot = tl.load(slots + token, mask=here[:, None], other=-1).to(tl.int64)
    low = tl.load(source + half, mask=inside, other=0)
    high = tl.load(source + ROTATED // 2 + half, mask=inside, other=0)
    rest = tl.load(source + ROTATED + more, mask=beyond, other=0)
    # Where a key goes, in heads of the cache; a value's head comes KV_HEADS later.
    cell = slot * KV_HEADS + head - HEADS
    written, more_written = inside & (slot >= 0), beyond & (slot >= 0)
    if head >= HEADS + KV_HEADS:
        to_values = values + (cell - KV_HEADS) * DIM
        _store(to_values, low, high, rest, half, more, written, more_written, ROTATED, DIM)
        return
    is_query = head < HEADS
    if HAS_NORM:
        weight = q_norm
        if not is_query:
            weight = k_norm
        low, high, rest = _normed(
            low, high, rest, qkv, weight, eps, offset, half, more, ROTATED, DIM, HAS_OFFSET
        )
    cos = tl.load(cosine + token * ROTATED + half, mask=inside, other=0)
    sin = tl.load(sine + token * ROTATED + half, mask=inside, other=0)
    kind = qkv.dtype.element_ty
    # Each product rounded to the input's type, as transformers does, before they are added.
    left = (low * cos).to(kind) + (-high * sin).to(kind)
    right = (high * cos).to(kind) + (low * sin).to(kind)
    # What both branches name must have one type, and a cache may hold bytes.
    if is_query:
        to_query = query + (token * HEADS + head) * DIM
        _store(to_query, left, right, rest, half, more, inside, beyond, ROTATED, DIM)
    else:
        to_keys = keys + cell * DIM
        _store(to_keys, left, right, rest, half, more, written, more_written, ROTATED, DIM)


@triton.jit
def _store(target, low, high, rest, half, more, inside, beyond, ROTATED: tl.constexpr, DIM: tl.constexpr):
    """The three parts of a head to where it begins, of several tokens."""
    kind = target.dtype.element_ty
    tl.store(target + half, stored(low, kind), mask=inside)
    tl.store(target + ROTATED // 2 + half, stored(high, kind), mask=inside)
    if ROTATED < DIM:
        tl.store(target + ROTATED + more, stored(rest, kind), mask=beyond)
