"""One token of the gated delta rule for each of several sequences, states changed where they are.

    grid   (sequence, value head, part of the values): S `[KEY, BLOCK]` is read once, kept in registers, and
           written back; columns of S don't depend on one another.

Plain torch would gather the states, and hold several of them in float32: see `layers/delta_rule.py`, which
this computes.
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched

BLOCK = 32  # values of a program: S takes 128 · 32 registers of a block's


@launched
@triton.jit(do_not_specialize=["slots"])
def correct(
    query, key, value, decay, beta, slots, states, out, query_stride, key_stride, value_stride, decay_stride,
    beta_stride, scale, eps, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Strides are those from one sequence to the next; `out` `[sequences, HEADS, VALUE]` float32.

    `states` `[slots, HEADS, KEY, VALUE]`; `SHARED`: value heads that a key head serves; `WIDE`: a power of
    two that holds a key.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, WIDE)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    within = row < KEY
    beside = column < VALUE
    at = head // SHARED * KEY + row
    q = tl.load(query + sequence * query_stride + at, mask=within, other=0).to(tl.float32)
    k = tl.load(key + sequence * key_stride + at, mask=within, other=0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
    v = tl.load(value + sequence * value_stride + head * VALUE + column, mask=beside, other=0).to(tl.float32)
    kept = tl.exp(tl.load(decay + sequence * decay_stride + head).to(tl.float32))
    share = tl.load(beta + sequence * beta_stride + head).to(tl.float32)
    slot = tl.load(slots + sequence).to(tl.int64)
    place = states + (slot * HEADS + head) * KEY * VALUE + row[:, None] * VALUE + column[None, :]
    inside = within[:, None] & beside[None, :]
    s = tl.load(place, mask=inside, other=0) * kept
    change = (v - tl.sum(s * k[:, None], 0)) * share
    s += k[:, None] * change[None, :]
    tl.store(place, s, mask=inside)
    target = out + (sequence * HEADS + head) * VALUE + column
    tl.store(target, tl.sum(s * q[:, None], 0), mask=beside)


def recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The parts of a `Rule`, whose rows may be apart, on float32 `states` at `slots` `[sequences]` int64.

    Returns `[sequences, value_heads, value_dim]` float32. Slots that stand twice are left in any state.
    """
    sequences, heads, width = value.shape
    out = torch.empty(sequences, heads, width, dtype=torch.float32, device=value.device)
    rows = (query, key, value, decay, beta)
    assert all(x[0].is_contiguous() for x in rows), "the heads of a token must lie side by side"
    correct[(sequences, heads, triton.cdiv(width, BLOCK))](
        *rows,
        slots,
        states,
        out,
        *(x.stride(0) for x in rows),
        key.shape[2] ** -0.5,
        eps,
        HEADS=heads,
        SHARED=heads // key.shape[1],
        KEY=key.shape[2],
        VALUE=width,
        WIDE=triton.next_power_of_2(key.shape[2]),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
