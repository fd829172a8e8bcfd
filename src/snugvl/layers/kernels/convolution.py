"""The convolution before the delta rule: a few taps of each channel, over the tokens of a flat batch.

    inputs of a sequence     those of the step before, from its slot │ this step's
                                                                     └► silu(taps · inputs), for each token

Queries and keys then get length 1, as all that follows needs them so. The last inputs go back to the slot: in
a decode step at once, as no other program reads them; of a longer chunk afterwards, by `slide`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from snugvl.layers.kernels.compiler.launch import launched, pdl, wait_for_others
from snugvl.layers.kernels.places import most_sequences, owner

TOKENS = 32  # of a program
CHANNELS = 1024  # whose last inputs a program replaces


class DeltaNet(NamedTuple):
    """A layer's weights and sizes.

    Attributes:
        conv: `[channels, 1, taps]`, the oldest first.
        a_log, dt_bias: `[value_heads]`, how fast a head forgets.
        norm, norm_eps: `[value_dim]`, of the outputs.
        key_heads, value_heads, key_dim, value_dim: sizes.
        eps: under the root of a key's length.
        tiled: see `LinearAttention`.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def constants(self) -> dict[str, int]:
        """Sizes that kernels are compiled for."""
        sizes = (self.channels, self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        return dict(zip(("CHANNELS", "KEY_HEADS", "HEADS", "KEY", "VALUE"), sizes, strict=True))


def wide(size: int) -> int:
    """A power of two that holds a head, and that matrix units take."""
    return max(16, int(triton.next_power_of_2(size)))


@launched
@triton.jit(do_not_specialize=["slots", "starts", "lengths", "sequences"])
def convolve(
    projected, conv, inputs, slots, starts, lengths, out, sequences, eps, CHANNELS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    STRIDE: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr,
    EACH: tl.constexpr, MAX: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (block of tokens of a sequence, head): `out` `[tokens, channels]`.

    Args:
        projected: `[tokens, channels + HEADS · VALUE]`, STRIDE apart.
        inputs: `[slots, TAPS - 1, channels]`; with SINGLE, where each sequence has one token, replaced.
        WIDE: a power of two that holds a head.
    """
    if SINGLE:
        sequence = tl.program_id(0)
        begin, new, nth = sequence, 1, 0
    else:
        wait_for_others(PDL)
        sequence, begin, new, nth = owner(starts, tl.program_id(0), sequences, EACH, MAX)
    context = tl.load(lengths + sequence)
    if not SINGLE and (nth * EACH >= new or context == 0):
        return
    head = tl.program_id(1)
    is_key = head < 2 * KEY_HEADS
    width = tl.where(is_key, KEY, VALUE)
    first = tl.where(is_key, head * KEY, 2 * KEY_HEADS * KEY + (head - 2 * KEY_HEADS) * VALUE)
    inside = tl.arange(0, WIDE) < width
    channel = first + tl.arange(0, WIDE)
    token = nth * EACH + tl.arange(0, EACH)
    live = (token < tl.where(context > 0, new, 0))[:, None] & inside[None, :]
    remembered = inputs + tl.load(slots + sequence).to(tl.int64) * ((TAPS - 1) * CHANNELS)
    known = (token < tl.where(context > new, new, 0))[:, None] & inside[None, :]
    total = tl.zeros([EACH, WIDE], tl.float32)
    if SINGLE:
        # What an earlier step left is read and moved up before the wait: the kernel before this one has
        # nothing to do with it.
        for tap in tl.static_range(TAPS - 1):
            there = remembered + tap * CHANNELS + channel[None, :] + token[:, None]
            x = tl.load(there, mask=known, other=0)
            w = tl.load(conv + channel * TAPS + tap, mask=inside, other=0).to(tl.float32)
            total += x.to(tl.float32) * w[None, :]
            if tap > 0:
                tl.store(there - CHANNELS, x, mask=live)
        w = tl.load(conv + channel * TAPS + (TAPS - 1), mask=inside, other=0).to(tl.float32)
        wait_for_others(PDL)
        at = (begin + token).to(tl.int64)[:, None] * STRIDE + channel[None, :]
        x = tl.load(projected + at, mask=live, other=0)
        total += x.to(tl.float32) * w[None, :]
        tl.store(remembered + (TAPS - 2) * CHANNELS + channel[None, :] + token[:, None], x, mask=live)
    for tap in tl.static_range(0 if SINGLE else TAPS):
        at = token + (tap - (TAPS - 1))
        fresh = (at >= 0)[:, None]
        here = projected + (begin + at).to(tl.int64)[:, None] * STRIDE + channel[None, :]
        there = remembered + (at + (TAPS - 1))[:, None] * CHANNELS + channel[None, :]
        x = tl.load(here, mask=live & fresh, other=0) + tl.load(
            there, mask=known & (at < 0)[:, None], other=0
        )
        w = tl.load(conv + channel * TAPS + tap, mask=inside, other=0).to(tl.float32)
        total += x.to(tl.float32) * w[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    y = total.to(kind).to(tl.float32)
    y = (y * tl.sigmoid(y)).to(kind).to(tl.float32)
    if is_key:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    tl.store(out + (begin + token).to(tl.int64)[:, None] * CHANNELS + channel[None, :], y.to(kind), mask=live)


@launched
@triton.jit(do_not_specialize=["slots", "starts", "lengths", "landings", "unsure", "scratch"])
def slide(
    projected, inputs, slots, starts, lengths, landings, unsure, scratch, LANDS: tl.constexpr,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (sequence, EACH channels): its last inputs, for the next step.

    With LANDS, those behind `landings` go to slot `scratch`: TAPS tokens or more, or 0 for nowhere. And those
    of its last `unsure` tokens aren't among them.
    """
    wait_for_others(PDL)
    sequence = tl.program_id(0)
    begin = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begin
    if new == 0:
        return
    known = tl.load(lengths + sequence) > new
    channel = tl.program_id(1) * EACH + tl.arange(0, EACH)
    remembered = inputs + tl.load(slots + sequence).to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
    sure = new
    if LANDS:
        sure -= tl.load(unsure + sequence).to(tl.int32)
        landing = tl.load(landings + sequence)
        kept = inputs + scratch.to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
        for row in tl.static_range(TAPS - 1):
            here = projected + (begin + landing - (TAPS - 1) + row) * STRIDE + channel
            inside = channel < tl.where(landing > 0, CHANNELS, 0)
            tl.store(kept + row * CHANNELS, tl.load(here, mask=inside, other=0), mask=inside)
    for row in tl.static_range(TAPS - 1):  # what a row is replaced by stood in a later one, or is new
        at = sure - (TAPS - 1) + row
        here = projected + (begin + at).to(tl.int64) * STRIDE + channel
        x = tl.load(here, mask=channel < tl.where(at >= 0, CHANNELS, 0), other=0)
        old = channel < tl.where((at < 0) & known, CHANNELS, 0)
        x += tl.load(remembered + (sure + row) * CHANNELS, mask=old, other=0)
        tl.store(remembered + row * CHANNELS, x, mask=channel < CHANNELS)


def convolved(
    projected: torch.Tensor,
    layer: DeltaNet,
    inputs: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    lengths: torch.Tensor,
    landing: tuple[torch.Tensor, torch.Tensor, int] | None,
) -> torch.Tensor:
    """Queries, keys and values, `[tokens, channels]`; for the arguments see `delta_rule.attend`."""
    channels, tokens, sequences = layer.channels, len(projected), len(lengths)
    single, taps, early = starts is None, layer.conv.shape[-1], pdl(projected.device)
    places = sequences if starts is None else tokens // TOKENS + sequences
    where = (slots, lengths if starts is None else starts, lengths)
    out = torch.empty(tokens, channels, dtype=projected.dtype, device=projected.device)
    convolve[(places, 2 * layer.key_heads + layer.value_heads)](
        projected, layer.conv, inputs, *where, out, sequences, layer.eps, **layer.constants,
        STRIDE=projected.stride(0), TAPS=taps, WIDE=wide(max(layer.key_dim, layer.value_dim)),
        EACH=1 if single else TOKENS, MAX=most_sequences(sequences), SINGLE=single, num_warps=4, **early,
    )  # fmt: skip
    if not single:
        slide[(sequences, triton.cdiv(channels, CHANNELS))](
            projected, inputs, *where, *(landing or (lengths, lengths, 0)), LANDS=landing is not None,
            CHANNELS=channels, STRIDE=projected.stride(0), TAPS=taps, EACH=CHANNELS, num_warps=4, **early,
        )  # fmt: skip
    return out
