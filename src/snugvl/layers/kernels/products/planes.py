"""Products of 2 to 32 rows of input with weights of 5 and 6 bits, in two planes.

The lower four bits of eight neighbours are a word, as int4 has them; their upper ones are 8 or 16 bits of a
second plane. The planes have the same order, so the kernel for int4 (`skinny.py`) says where a
thread finds its share of either. Only how the two become numbers is different, and what is subtracted: codes
less 2^(BITS − 1), which is exact in bf16.

Where the upper plane has bytes, the compiler keeps more neighbours of an operand together than elsewhere
(`PAIR`), in products that these go into: so the sums of the input have to come from the same product as what
they are for.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.compiler.launch import launched
from snugvl.layers.kernels.products import skinny
from snugvl.layers.kernels.products.epilogue import rms_factor
from snugvl.layers.kernels.products.unpack import _assembly

PER = tl.constexpr(8)  # weights of an element of either plane


def _planes_bf16(bits: int) -> Iterator[str]:
    """PTX lines that make bf16 of codes, as int4's do (`unpack.py`): below 2⁷, minus 128 + 2^(bits − 1).

    `$10` and `$11` are the upper plane.
    """
    bias, mask = 0xC300 | 1 << (bits - 1), (1 << (bits - 4)) - 1 << 4
    yield "mov.b32 one, 0x3f803f80;"
    yield f"mov.b32 bias, 0x{bias:04x}{bias:04x};"
    yield "prmt.b32 a, $8, $9, 0x5410;"
    yield "prmt.b32 b, $8, $9, 0x7632;"
    yield "prmt.b32 u, $10, $11, 0x5410;"
    for place in range(4):
        for word, out in (("a", place), ("b", 4 + place)):
            if place:
                yield f"shr.u32 t, {word}, {4 * place};"
            yield f"lop3.b32 t, {'t' if place else word}, 0x000f000f, 0x43004300, 0xea;"
            shift = (bits - 4) * out - 4  # the upper bits go to the fifth place
            if shift:
                yield f"{'shr.u32' if shift > 0 else 'shl.b32'} s, u, {abs(shift)};"
            yield f"lop3.b32 t, {'s' if shift else 'u'}, 0x{mask:04x}{mask:04x}, t, 0xea;"
            yield f"fma.rn.bf16x2 ${out}, t, one, bias;"


_INT5_BF16 = _assembly("a, b, u, s, t, one, bias", *_planes_bf16(5))
_INT6_BF16 = _assembly("a, b, u, s, t, one, bias", *_planes_bf16(6))


@triton.jit
def _code(words, upper, POSITION: tl.constexpr, kind: tl.constexpr, BITS: tl.constexpr):
    high: tl.constexpr = BITS - 4
    code = ((words >> (4 * POSITION)) & 15) | (((upper >> (high * POSITION)) & ((1 << high) - 1)) << 4)
    return (code - (1 << (BITS - 1))).to(kind)


@triton.jit
def codes(words, upper, kind: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Codes − 2^(BITS − 1) of `[…, n]` words and their upper bits, in their order: `[…, n, 2, 2, 2]`."""
    upper = upper.to(tl.int32)
    if ASSEMBLY:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT5_BF16 if BITS == 5 else _INT6_BF16,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words, upper],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        a, b = _code(words, upper, 0, kind, BITS), _code(words, upper, 1, kind, BITS)
        c, d = _code(words, upper, 2, kind, BITS), _code(words, upper, 3, kind, BITS)
        e, f = _code(words, upper, 4, kind, BITS), _code(words, upper, 5, kind, BITS)
        g, h = _code(words, upper, 6, kind, BITS), _code(words, upper, 7, kind, BITS)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd)


@triton.jit
def _skinny_multiplied(
    acc, words, upper, v, scale, zero, rows, first, groups: tl.constexpr, kind: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr,
    EACH: tl.constexpr, PAIR: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`acc` and the product of `BATCH` groups, `[BATCH, BN, BM]`."""
    chunks: tl.constexpr = GROUP // (4 * EACH)
    group = first + tl.arange(0, BATCH)
    where = rows[None, :] * groups + group[:, None]
    here = (group < groups)[:, None]
    s = tl.load(scale + where, mask=here, other=0).to(tl.float32)
    z = tl.load(zero + where, mask=here, other=0).to(tl.float32)
    value = tl.reshape(codes(words, upper, kind, BITS, ASSEMBLY), [8, BATCH, BN // 8, chunks, 4, EACH])
    value = skinny._operand(value, BATCH, BN, GROUP, EACH, PAIR, PER)
    part, total = skinny._with_sum(value, v, BATCH, BN, BM, GROUP)
    part += ((1 << (BITS - 1)) - z)[:, :, None] * total
    return acc + part * s[:, :, None]


@launched
@triton.jit(do_not_specialize=["M"])
def skinny_planes(
    x, norm, w, upper, scale, zero, bias, residual, out, M, N, eps, K: tl.constexpr, WIDE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BATCH: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, ASSEMBLY: tl.constexpr, EACH: tl.constexpr, PAIR: tl.constexpr,
    FLIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`skinny.skinny` of two planes: up to 32 rows of input. `w`: int32 words, the lower four bits of eight
    weights each; `upper`: their upper bits, uint8 (`BITS` 5) or int16 (6), as many."""
    groups: tl.constexpr = K // GROUP
    last: tl.constexpr = (groups - 1) // BATCH * BATCH
    outputs: tl.constexpr = BN // 2 if SWIGLU else BN
    kind: tl.constexpr = x.dtype.element_ty
    first = tl.program_id(0) * outputs
    r = tl.arange(0, BN // 8)[None, None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None, None]
    flat = tl.arange(0, BN)
    rows = (tl.minimum(first + r % outputs, N - 1) + (r // outputs) * N).to(tl.int64)
    flat = tl.minimum(first + flat % outputs, N - 1) + (flat // outputs) * N

    words = skinny._stored(w, rows, 0, groups, GROUP, BATCH, EACH, PER, FLIP)
    high = skinny._stored(upper, rows, 0, groups, GROUP, BATCH, EACH, PER, FLIP)
    if PDL:
        gdc_wait()
    rstd = 1.0
    if HAS_NORM:
        rstd = rms_factor(x, eps, K, WIDE)
    acc = tl.zeros([BATCH, BN, BM], tl.float32)
    for at in tl.range(0, last, BATCH, num_stages=1):
        v = skinny._inputs(x, norm, at, rstd, M, K, GROUP, BM, BATCH, EACH, PAIR, PER, FLIP, HAS_NORM, OFFSET)
        next_words = skinny._stored(w, rows, at + BATCH, groups, GROUP, BATCH, EACH, PER, FLIP)
        next_high = skinny._stored(upper, rows, at + BATCH, groups, GROUP, BATCH, EACH, PER, FLIP)
        acc = _skinny_multiplied(
            acc, words, high, v, scale, zero, flat, at, groups, kind, BITS, GROUP, BM, BN, BATCH, EACH, PAIR,
            ASSEMBLY,
        )  # fmt: skip
        words, high = next_words, next_high
    v = skinny._inputs(x, norm, last, rstd, M, K, GROUP, BM, BATCH, EACH, PAIR, PER, FLIP, HAS_NORM, OFFSET)
    if PDL:
        gdc_launch_dependents()
    acc = _skinny_multiplied(
        acc, words, high, v, scale, zero, flat, last, groups, kind, BITS, GROUP, BM, BN, BATCH, EACH, PAIR,
        ASSEMBLY,
    )  # fmt: skip
    skinny._store(
        tl.sum(acc, 0), bias, residual, out, flat, first, M, N, kind, BM, BN, HAS_BIAS, HAS_RESIDUAL, SWIGLU
    )


@launched
@triton.jit(do_not_specialize=["count", "first", "half", "beyond"])
def dequantize_planes(
    w, upper, scale, zero, out, count, first, half, beyond, K: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`dequantize.dequantize` of two planes: `count` rows of one group of columns to `out` `[count, K]`."""
    local = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    here = (local < count)[:, None]
    rows = local + first + tl.where(local >= half, beyond, 0)
    inner: tl.constexpr = GROUP // PER
    at = rows[:, None] * (K // PER) + tl.program_id(1) * inner + tl.arange(0, inner)[None, :]
    words = tl.load(w + at, mask=here, other=0)
    high = tl.load(upper + at, mask=here, other=0)
    where = (rows * (K // GROUP) + tl.program_id(1))[:, None]
    s = tl.load(scale + where, mask=here, other=0).to(tl.float32)
    z = tl.load(zero + where, mask=here, other=0).to(tl.float32)
    value = tl.reshape(codes(words, high, tl.float32, BITS, False), [BN, GROUP])
    value = (value + ((1 << (BITS - 1)) - z)) * s
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    tl.store(out + local[:, None] * K + column[None, :], value.to(out.dtype.element_ty), mask=here)
