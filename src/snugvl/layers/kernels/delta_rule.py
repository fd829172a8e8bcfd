"""Gated DeltaNet over a flat batch: its convolution, the gated delta rule, the norm with its gate.

    projected   [ s0 … s0 | s1 | s2 … ]     whose tokens they are is found in `starts`, as in attention
                     │
    convolve    taps of each channel, silu; queries and keys get length 1; of a sequence's first tokens it
                     │    reads the last inputs of the step before, which `slide` then replaces
    correct     sequences with one new token: S is read once, kept in registers and written back; output,
                     │    norm and gate. Nothing else runs in a decode step
    solve       chunks of 64 tokens of longer ones, all at once: what their corrections undo of each other,
                     │    a triangular inverse `[64, 64]`, and what their queries find in the chunk, another
    scan        the chunks one after the other: a program keeps some columns of S, which don't depend on
                     │    one another, in registers
    gate        the norm of those outputs, times silu of their gates

A sequence whose context is new altogether begins from zeros, whatever is in its slot. Sequences of no tokens
pad a CUDA graph. `layers/delta_rule.py` computes the same in plain torch.

What products read is in the network's type, sums and S are in float32, as in the kernels that the models were
trained with; a network in float32 is not rounded anywhere.

Sources: Gated Delta Networks (https://arxiv.org/abs/2412.06464); the chunkwise form of DeltaNet
(https://arxiv.org/abs/2406.06484).
"""

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others
from snugvl.layers.kernels.convolution import DeltaNet, convolved, wide
from snugvl.layers.kernels.device import HOPPER, capability, in_loops
from snugvl.layers.kernels.places import most_sequences, owner

CHUNK = 64  # tokens of a chunk
WARPS = 4  # that correct a state
GATED = 16  # rows of a program of the gate


@triton.jit
def key_head_of(head, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, TILED: tl.constexpr):
    """The key head of a value head."""
    if TILED:
        return head % KEY_HEADS
    return head // (HEADS // KEY_HEADS)


@triton.jit
def rates(rates_of, a_log, dt_bias, token, live, head, HEADS: tl.constexpr, RATES: tl.constexpr):
    """Rates of a value head's tokens: how much is corrected, and the logarithm of how much is kept.

    `rates_of` `[tokens, 2 · HEADS]`, RATES apart: what makes the former, then the latter. Padding does
    neither.
    """
    at = rates_of + token.to(tl.int64) * RATES + head
    share = tl.load(at, mask=live, other=0)
    beta = tl.sigmoid(share.to(tl.float32)).to(share.dtype).to(tl.float32)
    x = tl.load(at + HEADS, mask=live, other=0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    speed = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))  # softplus
    kept = -tl.exp(tl.load(a_log + head).to(tl.float32)) * speed
    return tl.where(live, beta, 0.0), tl.where(live, kept, 0.0)


@launched
@triton.jit(do_not_specialize=["slots", "starts", "lengths"])
def correct(
    mixed, projected, rates_of, a_log, dt_bias, norm, states, slots, starts, lengths, out, scale, norm_eps,
    CHANNELS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, TILED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr, WIDE_KEY: tl.constexpr, STRIDE: tl.constexpr, RATES: tl.constexpr,
    WIDE: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (sequence, value head) of those with one new token: `out` `[tokens, HEADS · VALUE]`.

    Args:
        mixed: `[tokens, channels]`, convolved.
        projected: `[tokens, channels + HEADS · VALUE]`, STRIDE apart, whose end are the gates.
        states: `[slots, HEADS, KEY, VALUE]` float32.
        SINGLE: all have one, and `starts` isn't read.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin = sequence
    context = tl.load(lengths + sequence)
    if not SINGLE:
        begin = tl.load(starts + sequence)
        context = tl.where(tl.load(starts + sequence + 1) - begin == 1, context, 0)
    row, column = tl.arange(0, WIDE_KEY), tl.arange(0, WIDE)
    slot = tl.load(slots + sequence).to(tl.int64)
    place = states + (slot * HEADS + head) * (KEY * VALUE) + row[:, None] * VALUE + column[None, :]
    inside = (row < KEY)[:, None] & (column < VALUE)[None, :]
    known = (row < tl.where(context > 1, KEY, 0))[:, None] & (column < VALUE)[None, :]
    w = tl.load(norm + column, mask=column < VALUE, other=0).to(tl.float32)
    s = tl.load(place, mask=known, other=0)  # an earlier step's: the kernel before this one writes none
    wait_for_others(PDL)  # a program that ends without it lets others begin too early
    if context == 0:
        return
    line = mixed + begin.to(tl.int64) * CHANNELS
    key_head = key_head_of(head, HEADS, KEY_HEADS, TILED)
    q = tl.load(line + key_head * KEY + row, mask=row < KEY, other=0).to(tl.float32) * scale
    k = tl.load(line + (KEY_HEADS + key_head) * KEY + row, mask=row < KEY, other=0).to(tl.float32)
    value = line + 2 * KEY_HEADS * KEY + head * VALUE + column
    v = tl.load(value, mask=column < VALUE, other=0).to(tl.float32)
    beta, kept = rates(rates_of, a_log, dt_bias, begin, context > 0, head, HEADS, RATES)
    beside = projected + begin.to(tl.int64) * STRIDE + CHANNELS + head * VALUE
    opened = tl.load(beside + column, mask=column < VALUE, other=0).to(tl.float32)
    s *= tl.exp(kept)
    change = (v - tl.sum(s * k[:, None], 0)) * beta
    s += k[:, None] * change[None, :]
    tl.store(place, s, mask=inside)
    kind: tl.constexpr = out.dtype.element_ty
    y = tl.sum(s * q[:, None], 0).to(kind).to(tl.float32)
    if SINGLE:
        y = (y * tl.rsqrt(tl.sum(y * y, 0) / VALUE + norm_eps)).to(kind).to(tl.float32) * w
        y = y.to(kind).to(tl.float32) * opened * tl.sigmoid(opened)
    tl.store(out + (begin.to(tl.int64) * HEADS + head) * VALUE + column, y.to(kind), mask=column < VALUE)


@triton.jit
def unit_inverse(system, SIZE: tl.constexpr, precision: tl.constexpr):
    """The inverse of 1 + `system` `[SIZE, SIZE]`, which is strictly lower triangular.

    Blocks D of 16 on the diagonal by elimination, all at once; with N for what stands below them, the inverse
    is (1 + D⁻¹ N)⁻¹ D⁻¹, and of a matrix X with four blocks all below the diagonal X⁴ = 0, so that
    (1 + X)⁻¹ = (1 − X) (1 + X²).
    """
    size: tl.constexpr = 16
    parts: tl.constexpr = SIZE // size
    tl.static_assert(parts == 4)
    part = tl.arange(0, parts)
    blocks = tl.reshape(system, [parts, size, parts, size])
    own = part[:, None, None, None] == part[None, None, :, None]
    low = tl.sum(tl.where(own, blocks, 0.0), 2)  # [parts, size, size]
    line = tl.arange(0, size)
    diagonal = tl.where(line[None, :, None] == line[None, None, :], 1.0, 0.0) + low * 0
    for i in range(size - 1):  # row i is final: take it out of those below
        undone = tl.sum(tl.where(line[None, None, :] == i, low, 0.0), 2)
        final = tl.sum(tl.where(line[None, :, None] == i, diagonal, 0.0), 1)
        diagonal -= undone[:, :, None] * final[:, None, :]
    spread = tl.where(own, diagonal[:, :, None, :], 0.0)
    inverse = tl.reshape(spread, [SIZE, SIZE])
    below = tl.reshape(tl.where(own, 0.0, blocks), [SIZE, SIZE])
    x = tl.dot(inverse, below, input_precision=precision)
    square = tl.dot(x, x, input_precision=precision)
    solved = inverse + tl.dot(square, inverse, input_precision=precision)
    return solved - tl.dot(x, solved, input_precision=precision)


@triton.jit
def inverse_by_rows(system, SIZE: tl.constexpr):
    """`unit_inverse` without products of matrices: row after row is taken out of those below it."""
    line = tl.arange(0, SIZE)
    inverse = tl.where(line[:, None] == line[None, :], 1.0, 0.0) + system * 0
    for i in range(SIZE - 1):
        undone = tl.sum(tl.where(line[None, :] == i, system, 0.0), 1)
        final = tl.sum(tl.where(line[:, None] == i, inverse, 0.0), 0)
        inverse -= undone[:, None] * final[None, :]
    return inverse


@triton.jit
def times(matrix, values, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`matrix @ values` `[ROWS, COLUMNS]` in float32, a column at a time: no thread holds a whole operand."""
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(COLUMNS):
        one = tl.sum(tl.where(column[None, :] == at, values.to(tl.float32), 0.0), 1)
        found = tl.sum(matrix.to(tl.float32) * one[None, :], 1)
        product = tl.where(column[None, :] == at, found[:, None], product)
    return product


@triton.jit
def between(queries, keys, live, KEY: tl.constexpr, CHUNK: tl.constexpr):
    """Products of rows at `queries` with rows at `keys` `[CHUNK, CHUNK]`, one of their numbers at a time."""
    product = tl.zeros([CHUNK, CHUNK], tl.float32)
    for at in range(KEY):
        q = tl.load(queries + at, mask=live, other=0).to(tl.float32)
        k = tl.load(keys + at, mask=live, other=0).to(tl.float32)
        product += q[:, None] * k[None, :]
    return product


@launched
@triton.jit(do_not_specialize=["starts", "sequences"])
def solve(
    mixed, rates_of, a_log, dt_bias, starts, inverse, found, paces, sequences, scale, CHANNELS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, TILED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    WIDE_KEY: tl.constexpr, RATES: tl.constexpr, CHUNK: tl.constexpr, MAX: tl.constexpr, LOOPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One (chunk of a sequence, value head): `inverse` and `found`, both `[tokens, HEADS, CHUNK]`, and
    `paces` `[2, HEADS, tokens]` float32: how much is corrected, the logarithm of what is left of S before the
    chunk.

    Correction i undoes what the earlier ones have added along its key, so that the corrections solve a
    triangular system.
    """
    wait_for_others(PDL)
    precision: tl.constexpr = "ieee" if mixed.dtype.element_ty == tl.float32 else "tf32"
    _sequence, begin, new, nth = owner(starts, tl.program_id(0), sequences, CHUNK, MAX)
    if new <= 1 or nth * CHUNK >= new:
        return
    head = tl.program_id(1)
    token, dim, column = nth * CHUNK + tl.arange(0, CHUNK), tl.arange(0, WIDE_KEY), tl.arange(0, CHUNK)
    live = token < new
    key_head = key_head_of(head, HEADS, KEY_HEADS, TILED)
    line = mixed + (begin + token).to(tl.int64)[:, None] * CHANNELS + key_head * KEY + dim[None, :]
    inside = live[:, None] & (dim < KEY)[None, :]
    if not LOOPS:
        q = tl.load(line, mask=inside, other=0)
        k = tl.load(line + KEY_HEADS * KEY, mask=inside, other=0)
    beta, kept = rates(rates_of, a_log, dt_bias, begin + token, live, head, HEADS, RATES)
    since = tl.cumsum(kept, 0)
    row = tl.arange(0, CHUNK)
    left = tl.where(row[:, None] >= column[None, :], since[:, None] - since[None, :], float("-inf"))
    left = tl.exp(left)
    if LOOPS:
        queries = mixed + (begin + token).to(tl.int64) * CHANNELS + key_head * KEY
        keys = queries + KEY_HEADS * KEY
        inner = between(queries, keys, live, KEY, CHUNK) * left * scale
        system = between(keys, keys, live, KEY, CHUNK) * left * beta[:, None]
    else:
        inner = tl.dot(q, tl.trans(k), input_precision=precision) * left * scale
        system = tl.dot(k, tl.trans(k), input_precision=precision) * left * beta[:, None]
    system = tl.where(row[:, None] > column[None, :], system, 0.0)
    solved = inverse_by_rows(system, CHUNK) if LOOPS else unit_inverse(system, CHUNK, precision)
    at = ((begin + token).to(tl.int64)[:, None] * HEADS + head) * CHUNK + column[None, :]
    kind: tl.constexpr = inverse.dtype.element_ty
    tl.store(inverse + at, solved.to(kind), mask=live[:, None])
    tl.store(found + at, inner.to(kind), mask=live[:, None])
    tokens = tl.load(starts + sequences)
    tl.store(paces + head * tokens + begin + token, beta, mask=live)
    tl.store(paces + (HEADS + head) * tokens + begin + token, since, mask=live)


@launched
@triton.jit(do_not_specialize=["slots", "starts", "lengths", "landings", "unsure", "scratch", "sequences"])
def scan(
    mixed, inverse, found, paces, states, slots, starts, lengths, landings, unsure, scratch, out, sequences,
    scale, LANDS: tl.constexpr, CHANNELS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    TILED: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDE_KEY: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, LOOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (COLUMNS of S, value head, sequence) of those with more than one new token.

    `out` `[tokens, HEADS · VALUE]`: what the queries find, before norm and gate. With LANDS, S behind
    `landings`, a multiple of CHUNK or 0 for nowhere, goes to slot `scratch`, and the last `unsure` tokens
    don't enter the S that is written back.
    """
    wait_for_others(PDL)
    precision: tl.constexpr = "ieee" if mixed.dtype.element_ty == tl.float32 else "tf32"
    kind: tl.constexpr = mixed.dtype.element_ty
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begin
    if new <= 1:
        return
    row, dim, other = tl.arange(0, CHUNK), tl.arange(0, WIDE_KEY), tl.arange(0, CHUNK)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    beside = (column < VALUE)[None, :]
    slot = tl.load(slots + sequence).to(tl.int64)
    place = states + (slot * HEADS + head) * (KEY * VALUE) + dim[:, None] * VALUE + column[None, :]
    known = dim < tl.where(tl.load(lengths + sequence) > new, KEY, 0)
    s = tl.load(place, mask=known[:, None] & beside, other=0)
    key_head, tokens = key_head_of(head, HEADS, KEY_HEADS, TILED), tl.load(starts + sequences)
    landing, kept, sure = 0, place, new
    if LANDS:
        landing = tl.load(landings + sequence).to(tl.int32)
        sure -= tl.load(unsure + sequence).to(tl.int32)
        kept += (scratch.to(tl.int64) - slot) * (HEADS * KEY * VALUE)
    for first in range(0, new, CHUNK):
        if LANDS:
            here = dim < tl.where((first == landing) & (first > 0), KEY, 0)
            tl.store(kept, s, mask=here[:, None] & beside)
        token = first + row
        live = token < new
        at = (begin + token).to(tl.int64)[:, None]
        line = mixed + at * CHANNELS + key_head * KEY + dim[None, :]
        inside = live[:, None] & (dim < KEY)[None, :]
        q = tl.load(line, mask=inside, other=0)
        k = tl.load(line + KEY_HEADS * KEY, mask=inside, other=0)
        values = mixed + at * CHANNELS + 2 * KEY_HEADS * KEY + head * VALUE + column[None, :]
        v = tl.load(values, mask=live[:, None] & beside, other=0).to(tl.float32)
        square = (at * HEADS + head) * CHUNK + other[None, :]
        solved = tl.load(inverse + square, mask=live[:, None], other=0)
        inner = tl.load(found + square, mask=live[:, None], other=0)
        beta = tl.load(paces + head * tokens + begin + token, mask=live, other=0)
        since = tl.load(paces + (HEADS + head) * tokens + begin + token, mask=live, other=0)
        whole = tl.load(paces + (HEADS + head) * tokens + begin + tl.minimum(first + CHUNK, sure) - 1)
        before = s.to(kind)
        if LOOPS:
            at_columns = tl.arange(0, COLUMNS)
            answer = times(k, before, at_columns, CHUNK, COLUMNS) * tl.exp(since)[:, None]
            wanted = (v - answer) * beta[:, None]
            change = times(solved, wanted.to(kind), at_columns, CHUNK, COLUMNS)
            output = times(q, before, at_columns, CHUNK, COLUMNS) * (tl.exp(since) * scale)[:, None]
            output += times(inner, change.to(kind), at_columns, CHUNK, COLUMNS)
        else:
            answer = tl.dot(k, before, input_precision=precision) * tl.exp(since)[:, None]
            wanted = (v - answer) * beta[:, None]
            change = tl.dot(solved, wanted.to(kind), input_precision=precision)
            output = tl.dot(q, before, input_precision=precision) * (tl.exp(since) * scale)[:, None]
            output = tl.dot(inner, change.to(kind), output, input_precision=precision)
        tl.store(
            out + (at * HEADS + head) * VALUE + column[None, :], output.to(kind), mask=live[:, None] & beside
        )
        lasting = (change * tl.exp(tl.minimum(whole - since, 0.0))[:, None]).to(kind)
        if LANDS:
            lasting = tl.where((token < sure)[:, None], lasting, 0.0).to(kind)
        if LOOPS:
            s = s * tl.exp(whole) + times(tl.trans(k), lasting, at_columns, WIDE_KEY, COLUMNS)
        else:
            s = s * tl.exp(whole) + tl.dot(tl.trans(k), lasting, input_precision=precision)
    tl.store(place, s, mask=(dim < KEY)[:, None] & beside)


@launched
@triton.jit(do_not_specialize=["starts", "sequences"])
def gate(
    projected, norm, starts, out, sequences, norm_eps, CHANNELS: tl.constexpr, HEADS: tl.constexpr,
    VALUE: tl.constexpr, STRIDE: tl.constexpr, WIDE: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH of the rows `[tokens · HEADS, VALUE]` of `out`: normed, times silu of their gates."""
    wait_for_others(PDL)
    row, column = tl.program_id(0) * EACH + tl.arange(0, EACH), tl.arange(0, WIDE)
    inside = (row < tl.load(starts + sequences) * HEADS)[:, None] & (column < VALUE)[None, :]
    place = out + row.to(tl.int64)[:, None] * VALUE + column[None, :]
    line = (row // HEADS).to(tl.int64) * STRIDE + CHANNELS + row % HEADS * VALUE
    y = tl.load(place, mask=inside, other=0).to(tl.float32)
    opened = tl.load(projected + line[:, None] + column[None, :], mask=inside, other=0).to(tl.float32)
    w = tl.load(norm + column, mask=column < VALUE, other=0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    rstd = tl.rsqrt(tl.sum(y * y, 1) / VALUE + norm_eps)
    y = (y * rstd[:, None]).to(kind).to(tl.float32) * w[None, :]
    y = y.to(kind).to(tl.float32) * opened * tl.sigmoid(opened)
    tl.store(place, y.to(kind), mask=inside)


def scan_tile(card: tuple[int, int], dtype: torch.dtype, *, loops: bool) -> tuple[int, int, int]:
    """Columns of S that a program scans, warps, stages (measured on an H200, but for `loops`).

    On Hopper four warps multiply together. With one stage Triton 3.6 makes of that what gives wrong numbers,
    or reads where nothing is; two warps, which multiply apart, are right everywhere, and slower.
    """
    if loops:
        return 16, 8, 1
    return (64, 4, 2) if card == HOPPER and dtype.itemsize == 2 else (16, 2, 1)


def attend(
    projected: torch.Tensor,
    rates_of: torch.Tensor,
    layer: DeltaNet,
    inputs: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    lengths: torch.Tensor,
    landing: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """The output for a batch, normed and gated, `[tokens, value_heads · value_dim]`; its states move on.

    Args:
        projected: `[tokens, channels + value_heads · value_dim]`: queries, keys and values, then gates. Of it
            and of `rates_of` a token's are neighbours, the tokens may lie further apart.
        rates_of: `[tokens, 2 · value_heads]`: what betas are made of, then decays.
        inputs: `[slots, taps - 1, channels]`, what the convolution remembers.
        states: `[slots, value_heads, key_dim, value_dim]` float32.
        slots: `[sequences]` int64, each another.
        starts: `[sequences + 1]` int32; None where each sequence has one token.
        lengths: `[sequences]` int32, tokens of each once these are taken in; 0 for a padding row.
        landing: `[sequences]` int64, new tokens of one behind which its state is copied: a multiple of
            `CHUNK` below their number, 0 of all others. `[sequences]` int64, last new tokens of each that its
            state doesn't take in: fewer than it has, and 0 of one with more than `CHUNK`. And the slot that a
            state is copied to.
    """
    heads, key, value, scale = layer.value_heads, layer.key_dim, layer.value_dim, layer.key_dim**-0.5
    tokens, sequences = len(projected), len(lengths)
    mixed = convolved(projected, layer, inputs, slots, starts, lengths, landing)
    out = torch.empty(tokens, heads * value, dtype=projected.dtype, device=projected.device)
    early = pdl(projected.device)
    sizes = {**layer.constants, "TILED": layer.tiled, "WIDE_KEY": wide(key), **early}
    decay = (rates_of, layer.a_log, layer.dt_bias)
    stride, apart = projected.stride(0), rates_of.stride(0)
    where = (slots, lengths if starts is None else starts, lengths)
    correct[(sequences, heads)](
        mixed, projected, *decay, layer.norm, states, *where, out, scale, layer.norm_eps, **sizes,
        STRIDE=stride, RATES=apart, WIDE=wide(value), SINGLE=starts is None, num_warps=WARPS,
    )  # fmt: skip
    if starts is None:
        return out
    inverse = torch.empty(tokens, heads, CHUNK, dtype=projected.dtype, device=projected.device)
    found = torch.empty_like(inverse)
    paces = torch.empty(2, heads, tokens, dtype=torch.float32, device=projected.device)
    loops = in_loops(out.device, projected.dtype)
    columns, warps, stages = scan_tile(capability(out.device), projected.dtype, loops=loops)
    columns = min(columns, wide(value))
    solve[(tokens // CHUNK + sequences, heads)](
        mixed, *decay, starts, inverse, found, paces, sequences, scale, **sizes, RATES=apart, CHUNK=CHUNK,
        MAX=most_sequences(sequences), LOOPS=loops, num_warps=8 if loops else 4,
    )  # fmt: skip
    scan[(triton.cdiv(value, columns), heads, sequences)](
        mixed, inverse, found, paces, states, *where, *(landing or (lengths, lengths, 0)), out, sequences,
        scale, LANDS=landing is not None, **sizes, COLUMNS=columns, CHUNK=CHUNK, LOOPS=loops, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    gate[(triton.cdiv(tokens * heads, GATED),)](
        projected, layer.norm, starts, out, sequences, layer.norm_eps, CHANNELS=layer.channels, HEADS=heads,
        VALUE=value, STRIDE=stride, WIDE=wide(value), EACH=GATED, num_warps=4, **early,
    )  # fmt: skip
    return out
