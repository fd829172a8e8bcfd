"""q/k-norm, rotary embedding and the write into the KV cache, in one pass over the new tokens."""

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, eps, half, DIM: tl.constexpr):
    """Both halves of one head after RMSNorm, as transformers rounds them."""
    kind = x.dtype.element_ty
    low = tl.load(x + half).to(tl.float32)
    high = tl.load(x + DIM // 2 + half).to(tl.float32)
    rstd = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
    low = (low * rstd).to(kind) * tl.load(weight + half)
    high = (high * rstd).to(kind) * tl.load(weight + DIM // 2 + half)
    return low, high


@triton.jit
def rope_and_cache(
    qkv,
    q_norm,
    k_norm,
    cosine,
    sine,
    slots,
    query,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One (token, head) of `qkv` `[tokens, HEADS + 2 · KV_HEADS, DIM]`.

    Query heads go to `query` `[tokens, HEADS, DIM]`, keys and values to their slot of the cache
    `[slots, KV_HEADS, DIM]`; a slot below 0 is not written. `cosine`, `sine`: `[tokens, DIM]`, the second
    half repeating the first.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, DIM // 2)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    slot = tl.load(slots + token).to(tl.int64)
    if head >= HEADS + KV_HEADS:
        if slot >= 0:
            target = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
            kind = values.dtype.element_ty
            tl.store(target + half, tl.load(source + half).to(kind))
            tl.store(target + DIM // 2 + half, tl.load(source + DIM // 2 + half).to(kind))
        return
    is_query = head < HEADS
    if HAS_NORM:
        weight = q_norm
        if not is_query:
            weight = k_norm
        low, high = _normed(source, weight, eps, half, DIM)
    else:
        low = tl.load(source + half)
        high = tl.load(source + DIM // 2 + half)
    cos = tl.load(cosine + token * DIM + half)
    sin = tl.load(sine + token * DIM + half)
    kind = qkv.dtype.element_ty
    # Each product rounded to the input's type, as transformers does, before they are added.
    left = (low * cos).to(kind) + (-high * sin).to(kind)
    right = (high * cos).to(kind) + (low * sin).to(kind)
    if is_query:
        target = query + (token * HEADS + head) * DIM
        tl.store(target + half, left)
        tl.store(target + DIM // 2 + half, right)
    elif slot >= 0:
        target = keys + (slot * KV_HEADS + head - HEADS) * DIM
        tl.store(target + half, left.to(keys.dtype.element_ty))
        tl.store(target + DIM // 2 + half, right.to(keys.dtype.element_ty))
